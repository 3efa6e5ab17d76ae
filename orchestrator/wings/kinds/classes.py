"""The classes of transformers that a configuration is built as, which all take a batch as `input_ids`.

[Note: one call for all kinds]
Every part of the program calls a model as model(input_ids=inputs, use_cache=False) and reads `logits`; engines wrap it
in modules of their own. So what a kind calls its inputs is decided in the class: a subclass of transformers' class,
with its name, whose forward takes the inputs of kind.py's `SampleShape`. All other calls, such as those of `generate`,
reach transformers' forward unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from orchestrator.config.state_groups import Precision
from orchestrator.config.strict import nearest
from orchestrator.wings.kinds.kind import ModelKind, SampleShape, experts_of, is_decoder, kind_of
from zero_runtime.dtypes import TORCH_DTYPE

EXPECTED = "a causal or masked language model, an encoder-decoder or an image classifier"
NAMES: dict[ModelKind, Any] = {
    ModelKind.causal: auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    ModelKind.masked: auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    ModelKind.encoder_decoder: auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    ModelKind.image: auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
}
BUILDERS: dict[ModelKind, Any] = {
    ModelKind.causal: auto.AutoModelForCausalLM,
    ModelKind.masked: auto.AutoModelForMaskedLM,
    ModelKind.encoder_decoder: auto.AutoModelForSeq2SeqLM,
    ModelKind.image: auto.AutoModelForImageClassification,
}


def checked(model_type: str, config: Mapping[str, Any]) -> str:
    """The model_type. ValueError, with what to do, if its architecture is not one that is built here."""
    kind = kind_of(model_type, config)
    # Of an encoder-decoder that is not of our kinds, such as one for speech, the decoder alone would be built.
    halves = kind is ModelKind.causal and config.get("is_encoder_decoder") and not is_decoder(config)
    if model_type in NAMES[kind] and not halves:
        return model_type
    if model_type in CONFIG_MAPPING:
        end = ", which transformers has as a model of another kind; give a config.json of one of these kinds"
    elif config.get("auto_map"):
        end = (
            ", whose code is in its own folder (auto_map): code from a folder is not run; give a model "
            "whose code is in transformers"
        )
    else:
        near = nearest(model_type, {name for names in NAMES.values() for name in names})
        end = (
            f"; did you mean '{near}'?" if near else "; known for example: llama, gpt2, qwen2, mistral, gemma, bert, t5"
        )
    raise ValueError(f"model.model_type: expected {EXPECTED}, found '{model_type}'{end}")


def class_name(model_type: str, config: Mapping[str, Any]) -> str:
    """The name of the class of transformers that the model is built as."""
    names: str | tuple[str, ...] = NAMES[kind_of(model_type, config)][model_type]
    if isinstance(names, str):
        return names
    return next((name for name in config.get("architectures") or () if name in names), names[0])


def build(model_type: str, config: Mapping[str, Any], settings: PreTrainedConfig) -> nn.Module:
    """The model in fp32 on the current device, with torch's attention where its class has it, else with its own.

    config: as asked for, which decides the kind. settings: the same as transformers' configuration. It takes the inputs
    of `SampleShape`: [batch, seq] int64, of an encoder-decoder [batch, rows, seq] int64, of images [batch, channels,
    height, width] fp32; and gives [batch, seq, vocabulary] or [batch, classes].
    """
    kind = kind_of(model_type, config)
    settings.architectures = [class_name(model_type, config)]  # of several classes, transformers builds this one
    model: nn.Module = BUILDERS[kind].from_config(settings, dtype=torch.float32)
    if kind in TAKING:
        model.__class__ = _taking(cast(Any, type(model)), cast(Any, TAKING[kind]))
    return model


def take_packed_rows(model: nn.Module, precision: Precision) -> None:
    """Make a causal language model also take rows that several samples share, [batch, 2, seq] int64: token ids, and
    the position of each in its sample."""
    built = cast(Any, type(model))
    # Modules of several dtypes leave the dtype of the scores open; torch's attention takes a bool for all of them.
    is_open = bool(precision.keep_dtype) and cast(Any, model).config._attn_implementation == "sdpa"
    mask_dtype = torch.bool if is_open else TORCH_DTYPE[precision.compute]
    model.__class__ = _taking(built, cast(Any, _Packed), mask_dtype=mask_dtype)


@functools.cache
def _taking(built: Any, inputs: Any, **own: Any) -> Any:
    """The class that takes these inputs: see [Note: one call for all kinds]. own: its attributes."""
    same = {"__module__": built.__module__, "__qualname__": built.__qualname__}
    return type(built.__name__, (inputs, built), same | own)


class _Kind(nn.Module):
    def own_names(self, stored: Sequence[str]) -> list[str]:
        """The names in this class of the tensors of a file, which transformers renames when it reads one."""
        renamings = [one for one in get_model_conversion_mapping(cast(Any, self)) if isinstance(one, WeightRenaming)]
        return [functools.reduce(lambda name, one: one.rename_source_key(name)[0], renamings, name) for name in stored]


class _Masked(_Kind):
    def forward(self, input_ids: Any = None, use_cache: bool | None = None, **more: Any) -> Any:
        """No encoder has a cache, and some refuse the word."""
        return super().forward(input_ids=input_ids, **more)


class _SourceAndTarget(_Kind):
    def forward(self, input_ids: Any = None, use_cache: bool | None = None, **more: Any) -> Any:
        """Rows of a sample: the source, what the decoder reads, and which places of the source count."""
        if input_ids is not None and input_ids.dim() == 3:
            rows = input_ids.unbind(1)
            # Of four dimensions, so that transformers takes the mask as it is: it would look on the host whether a mask
            # of two has a place that does not count, and the memory of a step would depend on the data.
            mask = rows[2].bool()[:, None, None, :] if len(rows) > 2 else None
            input_ids, more = rows[0], {**more, "decoder_input_ids": rows[1], "attention_mask": mask}
        return super().forward(input_ids=input_ids, use_cache=use_cache, **more)


class _Image(_Kind):
    def forward(self, input_ids: Any = None, use_cache: bool | None = None, **more: Any) -> Any:
        """The images in the dtype of the model, which not every class casts them to."""
        if input_ids is not None:
            more = {**more, "pixel_values": input_ids.to(self.dtype)}
        return super().forward(**more)


class _Packed(nn.Module):
    mask_dtype: torch.dtype

    def forward(self, input_ids: Any = None, **more: Any) -> Any:
        """Tokens attend to those before them with which they share a sample, that is since the last position 0."""
        if input_ids is not None and input_ids.dim() == 3:
            input_ids, positions = input_ids.unbind(1)
            more |= {"position_ids": positions, "attention_mask": self._mask(positions)}
        return super().forward(input_ids=input_ids, **more)

    def _mask(self, positions: torch.Tensor) -> torch.Tensor:
        """What is added to scores, or which of them count, [batch, 1, seq, seq]. transformers takes a mask of four
        dimensions as it is, without a look at values on the host."""
        # In the dtype of the scores, if it is known: of a bool torch's attention would keep a copy in it in each layer.
        sample, dtype = (positions == 0).cumsum(-1)[:, None], self.mask_dtype
        if dtype is torch.bool:
            return (sample[..., :, None] == sample[..., None, :]).tril_()
        shape = (*sample.shape, sample.shape[-1])
        mask = torch.full(shape, -torch.inf, dtype=dtype, device=positions.device).triu_(1)
        return mask.masked_fill_(sample[..., :, None] != sample[..., None, :], -torch.inf)


TAKING: dict[ModelKind, type[nn.Module]] = {
    ModelKind.masked: _Masked,
    ModelKind.encoder_decoder: _SourceAndTarget,
    ModelKind.image: _Image,
}


def zeros(sample: SampleShape, count: int, device: torch.device | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of so many samples, all zero."""
    dtype = torch.float32 if sample.is_image else torch.int64
    inputs = torch.zeros((count, *sample.inputs), dtype=dtype, device=device)
    return inputs, torch.zeros((count, *sample.labels), dtype=torch.int64, device=device)


def experts_in(model: nn.Module, model_type: str | None, config: Mapping[str, Any]) -> str:
    """What says that the model is a mixture of experts, its modules included; empty if it is not one."""
    return experts_of(model_type, config) or next(
        (f"modules {name}" for name, _ in model.named_modules() if name.rpartition(".")[2] == "experts"), ""
    )
