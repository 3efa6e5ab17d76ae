"""Each kind of model is known by its config.json, and its data and loss are those of transformers' own classes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.host_reads import HostReads
from harness.ranks import run_ranks
from harness.warm_shapes import WarmShapes
from points import config_of_line
from torch.utils._pytree import tree_map

from orchestrator import cli
from orchestrator.config.parallel import Parallel
from orchestrator.config.schema import Batch, Data, DataKind, Loss, LossKind, Measure, Model, RunConfig, Train
from orchestrator.config.strict import Refusal
from orchestrator.wings.kinds.classes import NAMES, class_name
from orchestrator.wings.kinds.kind import TYPES, ModelKind, SampleShape, experts_of, kind_of, problem, sample_of
from orchestrator.wings.predict import counting_child, fit
from orchestrator.worker.setup import build_data, build_deferred
from orchestrator.workloads.data import IGNORED_LABEL, TokenBatch
from orchestrator.workloads.models import build_meta_model, build_model, token_losses
from zero_runtime.checkpoint.hugging_face.names import weights_for
from zero_runtime.optim.configs import SgdConfig
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime

LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}
MODELS: dict[str, dict[str, Any]] = {
    "t5": {"vocab_size": 300, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2},
    "bart": {"vocab_size": 300, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24}
    | {"decoder_ffn_dim": 24, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
    "bert": LAYERS | {"vocab_size": 300, "max_position_embeddings": 64},
    "vit": LAYERS | {"image_size": 16, "patch_size": 8},
}
PAIRS = [{"prompt": "Good morning", "response": "Guten Morgen"}, {"prompt": "x" * 20, "response": "y"}]
SEQ, LR = 16, 0.5


def config_of(name: str, words: str = "data=synthetic") -> RunConfig:
    config = config_of_line(
        f"model=llama_tiny batch.seq={SEQ} resources.device=cpu measure.validation_batches=0 {words}"
    )
    return replace(config, model=replace(config.model, name=name, model_type=name, config=MODELS[name], path=None))


@pytest.mark.parametrize(
    ("model_type", "config", "kind"),
    [
        ("llama", {}, ModelKind.causal),
        ("t5", {"architectures": ["T5ForConditionalGeneration"]}, ModelKind.encoder_decoder),
        ("bart", {"architectures": ["BartForCausalLM"]}, ModelKind.causal),
        ("bert", {"architectures": ["BertForPreTraining"]}, ModelKind.masked),
        ("bert", {"is_decoder": True}, ModelKind.causal),
        ("vit", {}, ModelKind.image),
    ],
)
def test_a_kind_is_known_by_the_configuration(model_type: str, config: dict[str, Any], kind: ModelKind) -> None:
    assert kind_of(model_type, config) is kind


def test_transformers_has_a_class_for_every_architecture_of_the_table() -> None:
    for kind, types in TYPES.items():
        assert set(types.split()) <= set(NAMES[kind])
    assert class_name("deit", {"architectures": ["DeiTForImageClassificationWithTeacher"]}).endswith("Teacher")


@pytest.mark.parametrize(
    ("model_type", "config", "told"),
    [
        ("mixtral", {}, "model.model_type=mixtral"),
        ("any", {"n_routed_experts": 8}, "model.config.n_routed_experts=8"),
        ("any", {"text_config": {"num_experts": 4}}, "model.config.num_experts=4"),
        ("llama", {"num_experts": 1}, ""),
    ],
)
def test_a_mixture_of_experts_is_known_by_its_keys(model_type: str, config: dict[str, Any], told: str) -> None:
    assert experts_of(model_type, config) == told


@pytest.mark.parametrize(
    ("name", "words", "told"),
    [
        ("llama", "seq=1", "batch.seq must be at least 2"),
        ("bert", "seq=65", "at most the model's max_position_embeddings, 64"),
        ("bert", "data=pairs", "data=pairs has responses to generate"),
        ("bert", "tp=2", "divide causal language models"),
        ("t5", "examples=2", "train.examples continues texts"),
        ("t5", "seq=4096", ""),  # n_positions is no limit of relative positions
        ("vit", "data=stdlib", "only data=synthetic makes images"),
        ("vit", "loss=tiled", "loss=tiled is of tokens"),
        ("vit", "seq=64", "batch.seq is the length of a text"),
        ("vit", "", ""),
    ],
)
def test_a_setting_that_a_kind_does_not_take_is_refused(name: str, words: str, told: str) -> None:
    key, _, value = words.partition("=")
    model = Model(name, name, MODELS.get(name, {}) | ({"n_positions": 512} if name == "t5" else {}))
    broken = problem(
        True,
        model,
        Data(DataKind(value) if key == "data" else DataKind.synthetic, path="a"),
        Batch(seq=int(value) if key == "seq" else 128 if name == "vit" else 16),
        Parallel(tp=int(value) if key == "tp" else 1),
        Loss(LossKind.tiled if key == "loss" else LossKind.full),
        Measure(steps=None if key == "examples" else 25, validation_batches=0),
        Train(max_steps=1 if key == "examples" else None),
    )
    assert (told in str(broken.rule)) if broken else not told


def test_the_amount_of_a_step_is_in_tokens_or_images() -> None:
    assert SampleShape((128,), (128,)).amount(8) == "1,024 tokens"
    assert SampleShape((2, 16), (16,)).amount(8) == "128 tokens"
    assert SampleShape((3, 32, 32), (1,), is_image=True).amount(1024) == "1,024 images"


def test_fit_says_once_what_is_wrong_with_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["vit"] | {"model_type": "vit"}))
    assert cli.main(["fit", f"model={tmp_path}/config.json", "hardware=a100_80gb", "batch.seq=4096"]) == 2
    told = capsys.readouterr().err
    assert told.count("error:") == 1
    assert "error: batch.seq is the length of a text" in told


def test_fit_answers_a_mixture_of_experts_with_its_bytes_at_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(counting_child, "start_process", WarmShapes)
    model = LAYERS | {"vocab_size": 256, "num_key_value_heads": 2, "num_local_experts": 4}
    (tmp_path / "config.json").write_text(json.dumps(model | {"model_type": "mixtral"}))
    words = [f"model={tmp_path}/config.json", "hardware=a100_80gb", "resources.ranks=2", "batch.seq=16"]
    words += ["zero=stage0,stage3", "offload=none", "recompute=none", "loss=full"]
    assert cli.main(["fit", *words, "--json"]) == 0
    rows = {one["label"]: one for one in json.loads(capsys.readouterr().out)["rows"]}
    numel = sum(one.numel() for one in build_meta_model("mixtral", model).parameters())
    padding = 64 * 18  # elements of a unit that make it divisible: few bytes beside the states
    for label, each in (("stage0", 18), ("stage3", 9)):
        assert 0 <= rows[label]["resting_bytes"] - each * numel <= padding * 4, label
        assert rows[label]["fits"] == "perhaps"
    with pytest.raises(Refusal, match="--explain: a mixture of experts is answered with its bytes at rest alone"):
        fit.main([*words, "--explain", "stage0"])


# ---- data and losses -------------------------------------------------------------------------------------------------


def batch_of(config: RunConfig, count: int = 2) -> tuple[TokenBatch, tuple[torch.Tensor, torch.Tensor]]:
    found = build_data(config).train_batch(0, count)
    return found, (torch.from_numpy(found.input_ids), torch.from_numpy(found.labels))


def of_transformers(name: str, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a user of transformers passes to the model's own class."""
    if name == "vit":
        return {"pixel_values": inputs, "labels": labels[:, 0]}
    if name == "bert":
        return {"input_ids": inputs, "labels": labels}
    mask = {"attention_mask": inputs[:, 2]} if inputs.shape[1] == 3 else {}
    return {"input_ids": inputs[:, 0], "labels": labels, **mask}


@pytest.mark.parametrize(
    ("name", "pairs"), [("t5", False), ("t5", True), ("bart", True), ("bert", False), ("vit", False)]
)
def test_the_loss_is_that_of_transformers_own_class_and_its_inputs_make_no_device_wait(
    name: str, pairs: bool, tmp_path: Path
) -> None:
    (tmp_path / "pairs.json").write_text(json.dumps(PAIRS))
    config = config_of(
        name, f"data=pairs data.path={tmp_path}/pairs.json data.validation_fraction=0" if pairs else "data=synthetic"
    )
    _, (inputs, labels) = batch_of(config)
    assert inputs.shape[1:] == sample_of(config).inputs
    model: Any = build_model(name, MODELS[name], seed=1)
    with HostReads() as reads:
        found = token_losses(model, inputs, labels)
    # BART's decoder makes a mask of ones itself, and transformers looks whether it is one.
    assert bool(reads.found) == (name == "bart")
    if name == "t5":  # a saved T5 says so; BART's class does
        model.config.decoder_start_token_id = 0
    model.__class__ = type(model).__bases__[1]  # transformers' class
    expected = model(**of_transformers(name, inputs, labels)).loss * (labels != IGNORED_LABEL).sum()
    # Both sum the same terms of a cross entropy in fp32; a mask of two dimensions is the only difference of operations,
    # and attention with it may take another kernel: 2^-24 for each of the at most 10^3 operations behind a number.
    assert abs(found.item() - expected.item()) <= 1e3 * 2**-24 * abs(expected.item())


def test_masked_tokens_depend_on_the_seed_alone_and_are_15_of_100() -> None:
    config = config_of("bert", "data=stdlib batch.seq=64")
    data = build_data(config)
    batch = data.train_batch(0, 32)
    masked = batch.labels != IGNORED_LABEL
    assert (masked.sum(1) == round(0.15 * 64)).all()
    assert data.learned_tokens(32) == masked.sum()
    again = build_data(config).train_batch(8, 4)  # another rank's part
    assert all(np.array_equal(one[8:12], part) for one, part in zip(batch, again, strict=True))
    kept = (batch.input_ids == batch.labels)[masked].mean()
    mask = (batch.input_ids == 299)[masked].mean()
    # 320 draws: 4 standard deviations of 10 % and of 80 % are 7 and 9 in 100.
    assert abs(mask - 0.8) < 0.09
    assert abs(kept - 0.1) < 0.07
    other = build_data(replace(config, seed=config.seed + 1)).train_batch(0, 32)
    assert not np.array_equal(other.labels != IGNORED_LABEL, masked)


def test_pairs_are_sources_and_targets_and_say_what_is_cut(tmp_path: Path) -> None:
    (tmp_path / "pairs.json").write_text(json.dumps(PAIRS))
    words = f"data=pairs data.path={tmp_path}/pairs.json data.validation_fraction=0"
    data = build_data(config_of("t5", words))
    order = {bytes(data.windows.read(np.asarray([at]))[0, :5].astype(np.uint8)): at for at in range(2)}
    inputs, labels = data.windows.batch(np.asarray([order[b"Guten"]]))  # type: ignore[attr-defined]
    source, read, counts = inputs[0]
    assert bytes(source[:12].astype(np.uint8)) == b"Good morning"
    assert counts.tolist() == [1] * 12 + [0] * 4
    assert bytes(labels[0, :13].astype(np.uint8)) == b"Guten Morgen\0"
    assert labels[0, 13:].tolist() == [IGNORED_LABEL] * 3
    assert read[1:13].tolist() == labels[0, :12].tolist()
    assert data.notes == ("1 of 2 pairs are longer than batch.seq and lose their end",)


def test_images_show_their_class_and_others_do_not() -> None:
    data = build_data(config_of("vit"))
    images, labels = data.train_batch(0, 64)
    assert images.dtype == np.float32
    assert set(labels[:, 0].tolist()) == {0, 1}
    means = [images[labels[:, 0] == one].mean(0) for one in (0, 1)]
    assert np.abs(means[0] - means[1]).mean() > 0.3  # noise alone: 2 x 0.58 / 32 ** 0.5 x 0.8 = 0.16


# ---- weights and stages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["t5", "vit"])
def test_a_saved_model_is_read_by_the_names_of_its_class(name: str, tmp_path: Path) -> None:
    model: Any = build_model(name, MODELS[name], seed=1)
    model.save_pretrained(tmp_path)  # a ViT's names in files are older than those of its class
    deferred, _ = build_deferred(config_of(name))
    with weights_for(tmp_path, deferred) as weights:
        for key, value in dict(model.named_parameters()).items():
            assert torch.equal(weights.read(key, 0, value.numel()), value.detach().flatten()), key


def trained(name: str) -> list[str]:
    """Weights, by stage, that after three steps differ from those of plain PyTorch with the gradients of both ranks."""
    config, wrong = config_of(name), []
    batches = tree_map(torch.from_numpy, [tuple(build_data(config).train_batch(2 * step, 2)) for step in range(3)])
    count = int((batches[0][1] != IGNORED_LABEL).sum())
    plain = build_model(name, MODELS[name], seed=1)
    start = {key: value.detach().clone() for key, value in plain.named_parameters()}
    rule = torch.optim.SGD(plain.parameters(), lr=LR)
    for inputs, labels in batches:
        rule.zero_grad()
        for rank in (0, 1):
            (token_losses(plain, inputs[rank : rank + 1], labels[rank : rank + 1]) / count).backward()
        rule.step()
    for stage in range(4):
        model = build_model(name, MODELS[name], seed=1)
        plan, device = ZeroPlan.from_stage(stage), torch.device("cpu")
        runtime = ZeroRuntime(model, plan, MixedPrecision(), SgdConfig(), RuntimeSettings(), device)
        rank = torch.distributed.get_rank()
        for inputs, labels in batches:
            runtime.backward(token_losses(model, inputs[rank : rank + 1], labels[rank : rank + 1]) / count)
            runtime.step(LR)
        with runtime.full_params() as values:
            wrong += [
                f"{key} in stage {stage}" for key, value in plain.named_parameters() if not values[key].equal(value)
            ]
            assert any(not values[key].equal(value) for key, value in start.items())
        runtime.close()
    return wrong


@pytest.mark.parametrize("name", ["vit", *(pytest.param(name, marks=pytest.mark.full) for name in ("t5", "bert"))])
def test_every_stage_has_the_bits_of_plain_pytorch(name: str) -> None:
    # A sum of two ranks' gradients is rounded once, whichever comes first.
    assert run_ranks(trained, 2, name) == [[], []]
