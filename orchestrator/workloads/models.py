"""Builds Hugging Face architectures from configuration, with random weights from a seed. Downloads nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch
import torch.nn.functional as F
from torch import nn

# The libraries read these at import. With them set, nothing in this process contacts the hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

from huggingface_hub.errors import StrictDataclassError
from transformers import masking_utils
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.configuration_utils import GenerationConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from orchestrator import wings
from orchestrator.config.strict import nearest
from orchestrator.workloads.data import IGNORED_LABEL as IGNORED_LABEL
from zero_runtime.activations.tiled_loss import tiled_cross_entropy
from zero_runtime.divisions import SequencePart
from zero_runtime.initial_values import parameters_on_meta

# The least value of sizes, by the names that transformers gives them for all architectures.
LEAST = {
    "vocab_size": 2,  # with a single token there is nothing to predict
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"), 1),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 1),
}


def build_model(model_type: str, config: Mapping[str, Any], *, seed: int) -> nn.Module:
    """A model of any kind on the CPU in fp32, in training mode, without dropout and without a cache.

    Its weights depend on `config` and `seed` alone, and the global random state is unchanged.
    ValueError if the architecture does not accept the configuration.
    """
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also seed every GPU, and fork_rng does not restore those here.
        torch.default_generator.manual_seed(seed)
        return _build(model_type, config, torch.device("cpu"))


def build_deferred_model(model_type: str, config: Mapping[str, Any], *, as_saved: bool = False) -> nn.Module:
    """The same model without weights, for the runtime: parameters on the meta device, buffers with their values.

    `as_saved`: `config` is the content of a saved config.json; see `model_config`.
    """
    with parameters_on_meta():
        return _build(model_type, config, torch.device("cpu"), as_saved=as_saved)


def build_meta_model(model_type: str, config: Mapping[str, Any]) -> nn.Module:
    """The same model without memory: shapes, names and ties of `build_model`, all on the meta device."""
    return _build(model_type, config, torch.device("meta"))


def prepare_to_generate(model: nn.Module, folder: str | None) -> None:
    """Set evaluation mode, a cache of keys and values, and the end tokens of the folder's generation_config.json."""
    known = cast(PreTrainedModel, model)
    known.eval()
    known.config.use_cache = True
    if folder is not None and (Path(folder) / "generation_config.json").exists():
        known.generation_config = GenerationConfig.from_pretrained(folder)
    settings = known.generation_config
    assert settings is not None
    settings.use_cache = True
    # Sampling settings of the folder would only cause warnings: nothing is sampled here.
    settings.temperature = settings.top_p = settings.top_k = None
    if settings.pad_token_id is None:
        ends = settings.eos_token_id
        settings.pad_token_id = ends[0] if isinstance(ends, list) else ends if ends is not None else 0


@runtime_checkable
class DividedHead(Protocol):
    """The head of a model whose layers are divided between ranks, which computes losses of the rows that it holds."""

    def loss(self, logits: torch.Tensor, labels: torch.Tensor, *, ignored: int) -> torch.Tensor: ...
    def tiled_loss(self, hidden: torch.Tensor, labels: torch.Tensor, *, tile: int, ignored: int) -> torch.Tensor: ...


def token_losses(
    model: nn.Module,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    tile: int | None = None,
    head: DividedHead | None = None,
    sequence: SequencePart | None = None,
) -> torch.Tensor:
    """The cross entropy summed in fp32 over the tokens whose label is not -100: a scalar with a graph.

    `labels[b, i]` is the target of `input_ids[b, i]` (already shifted), both [B, T] int64. The caller
    divides by the number of unmasked tokens in the global batch. Without any such token the loss and all its gradients
    are zero. Reads no value on the host. `tile`: the number of tokens whose logits exist at a time; None for all.
    `head`: the divided head of `head_of`, if the model has one; the loss is then the same on all ranks of its group.
    `sequence`: the runtime's, if it may divide sequences; the loss is then that of this rank's part of them.
    """
    labels = labels if sequence is None else sequence.part(labels)
    if tile is not None:
        return _tiled_losses(model, input_ids, labels, tile)
    if head is not None:
        return head.loss(_logits(model, input_ids), labels, ignored=IGNORED_LABEL)
    # The logits are not bound to a name, so only the fp32 log-probabilities that backward needs stay alive.
    return F.cross_entropy(
        _logits(model, input_ids).flatten(0, -2).float(),
        labels.flatten(),
        ignore_index=IGNORED_LABEL,
        reduction="sum",
    )


def _logits(model: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """What the head returns for sequences that each start at position 0.

    transformers looks in every forward whether the positions restart within a row, and reads the answer on the host,
    which then waits for all that the GPU has still to do. Here they never restart, which is what None means.
    """
    looks = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        return cast(torch.Tensor, model(input_ids=input_ids, use_cache=False).logits)
    finally:
        masking_utils.find_packed_sequence_indices = looks


def _tiled_losses(model: nn.Module, input_ids: torch.Tensor, labels: torch.Tensor, tile: int) -> torch.Tensor:
    """Computes the loss inside the head. The head is called once as usual, so its hooks run, but returns the loss.

    ValueError if the model changes its logits after the head (a cap, a scale), since that change would be lost.
    """
    head = cast(PreTrainedModel, model).get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ValueError(f"loss=tiled: expected an nn.Linear as the head, found {type(head).__name__}; use loss=full")
    divided = vars(head).get("forward")  # a DividedHead, with tensor parallelism
    losses: list[torch.Tensor] = []

    def loss_of(hidden: torch.Tensor) -> torch.Tensor:
        if isinstance(divided, DividedHead):
            loss = divided.tiled_loss(hidden, labels, tile=tile, ignored=IGNORED_LABEL)
        else:
            loss = tiled_cross_entropy(hidden, head.weight, head.bias, labels, tile=tile, ignored=IGNORED_LABEL)
        losses.append(loss)
        return loss

    head.forward = loss_of  # type: ignore[method-assign,assignment]
    try:
        loss = _logits(model, input_ids)
    finally:
        del head.forward  # restores the forward of the class
        if divided is not None:
            head.forward = divided  # type: ignore[method-assign]
    if loss is not losses[0]:
        raise ValueError(
            f"loss=tiled: expected {type(model).__name__} to return the output of its head unchanged, "
            "found a changed one; use loss=full"
        )
    return loss


def _build(model_type: str, config: Mapping[str, Any], device: torch.device, *, as_saved: bool = False) -> nn.Module:
    checked = model_config(model_type, config, as_saved=as_saved)
    try:
        with device:
            model: nn.Module = wings.load(wings.MODEL_CLASSES).build(model_type, config, checked)
    except (ValueError, TypeError, ArithmeticError, LookupError) as error:  # a RuntimeError may mean out of memory
        raise ValueError(f"model.config: {model_type} cannot be built: {_one_line(error)}") from error
    return model.train()


def model_config(model_type: str, config: Mapping[str, Any], *, as_saved: bool = False) -> PreTrainedConfig:
    """The architecture's configuration with dropout 0 and no cache. ValueError if a key or value is not valid for it.

    `as_saved`: `config` is a saved config.json. It is read as from_pretrained reads it (older spellings and unknown
    keys are accepted), and its dropout is set to 0.
    """
    kind = CONFIG_MAPPING[wings.load(wings.MODEL_CLASSES).checked(model_type, config)]
    wrong = [*_wrong_sizes(kind, config), *_wrong_numbers("model.config", config)]
    if as_saved and wrong:
        raise ValueError("\n".join(wrong))
    if as_saved:
        saved = _made(model_type, lambda: kind.from_dict(dict(config)))
        for field in fields(kind):
            if _is_dropout(field.name):
                setattr(saved, field.name, 0.0)
        saved.use_cache = False
        return saved
    wrong += [*_unknown_keys(kind, config), *_wrong_rope(config), *_wrong_values(config)]
    if wrong:
        raise ValueError("\n".join(wrong))
    ours: dict[str, Any] = {field.name: 0.0 for field in fields(kind) if _is_dropout(field.name)}
    # The architecture's default ids are for its own vocabulary; nothing here generates text or reads them.
    unset = {field.name: None for field in fields(kind) if field.name in ("bos_token_id", "eos_token_id")}
    return _made(model_type, lambda: kind(**{**unset, **config, **ours, "use_cache": False}))


def _made(model_type: str, make: Callable[[], PreTrainedConfig]) -> PreTrainedConfig:
    try:
        return make()
    except (StrictDataclassError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise ValueError(f"model.config is not a {model_type}: {_one_line(error)}") from error


def saved_config(
    model_type: str, config: Mapping[str, Any], dtype: torch.dtype, *, as_saved: bool = False
) -> PreTrainedConfig:
    """The configuration to store next to weights of `dtype`: from_pretrained reads the class and the dtype from it."""
    settings = model_config(model_type, config, as_saved=as_saved)
    settings.architectures = [wings.load(wings.MODEL_CLASSES).class_name(model_type, config)]
    settings.dtype = dtype
    return settings


def settings_of(kind: type[PreTrainedConfig]) -> set[str]:
    """The keys that describe the architecture: its own fields and their aliases.

    transformers accepts any key and ignores unknown ones. Fields that all of its models share (dtype, return_dict, ...)
    are set by the runtime and are not settings here.
    """
    shared = {field.name for field in fields(PreTrainedConfig)} | {"use_cache"}
    return {field.name for field in fields(kind)} - shared | set(kind.attribute_map)


def _unknown_keys(kind: type[PreTrainedConfig], config: Mapping[str, Any]) -> Iterator[str]:
    known = settings_of(kind)
    for key in config:
        if key not in known:
            yield _unknown(f"model.config.{key}", key, known)


def _wrong_rope(config: Mapping[str, Any]) -> Iterator[str]:
    """Checks the rotary settings, a mapping for which transformers only prints warnings."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return
    by_layer = {f"{name}.": group for name, group in rope.items() if isinstance(group, Mapping)}
    types = {*ROPE_INIT_FUNCTIONS, "default"}
    for name, group in (by_layer or {"": rope}).items():
        for key in group:
            if key not in RopeParameters.__annotations__:
                yield _unknown(f"model.config.rope_parameters.{name}{key}", key, set(RopeParameters.__annotations__))
        rope_type = group.get("rope_type", "default")
        if rope_type not in types:
            key_of_type = f"model.config.rope_parameters.{name}rope_type"
            yield f"{key_of_type}: expected one of {', '.join(sorted(types))}, found {rope_type!r}"


def _wrong_sizes(kind: type[PreTrainedConfig], config: Mapping[str, Any]) -> Iterator[str]:
    """Checks the sizes that every architecture has, under its own names for them."""
    for name, least in LEAST.items():
        key = kind.attribute_map.get(name, name)
        for given in dict.fromkeys((name, key)):
            if isinstance(value := config.get(given), int) and value < least:
                yield f"model.config.{given}: expected at least {least}, found {value}"


def _wrong_numbers(place: str, value: object) -> Iterator[str]:
    """Checks that every number, also in nested settings, can be held in fp32."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _wrong_numbers(f"{place}.{key}", one)
    elif isinstance(value, float) and not abs(value) <= torch.finfo(torch.float32).max:
        yield f"{place}: expected a finite number, found {value}"


def _wrong_values(config: Mapping[str, Any]) -> Iterator[str]:
    for key, value in config.items():
        if _is_dropout(key) and value not in (0, None):
            yield f"model.config.{key}: expected 0 (compared runs have no dropout), found {value}; remove it"


def _is_dropout(key: str) -> bool:
    return "dropout" in key or key.endswith(("_pdrop", "layerdrop", "drop_path_rate"))


def _unknown(setting: str, key: str, known: set[str]) -> str:
    near = nearest(key, sorted(known))
    hint = f"did you mean '{near}'?" if near else f"known: {' '.join(sorted(known))}"
    return f"'{setting}' is not a setting of this architecture; {hint}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
