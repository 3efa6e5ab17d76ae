"""Pairs share rows: none is cut, and each has the loss and the gradients that it has in a row of its own."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from string import ascii_letters
from typing import Any

import numpy as np
import pytest
import torch
from harness.host_reads import HostReads
from harness.ranks import run_alone, run_ranks
from points import config_of_line

from orchestrator.config.parallel import Parallel
from orchestrator.config.schema import Batch, Data, DataKind, Loss, Measure, Model, RunConfig, Train
from orchestrator.wings.kinds.classes import take_packed_rows
from orchestrator.wings.kinds.kind import PACKED, problem, sample_of
from orchestrator.wings.pairs.packing import best_fit
from orchestrator.worker.setup import build_data
from orchestrator.workloads.data import IGNORED_LABEL
from orchestrator.workloads.models import build_model, token_losses
from zero_runtime.optim.configs import SgdConfig
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime

SEQ, LR = 24, 0.5
SIZES = (3, 8, 1, 20, 2, 2, 30, 6, 4, 1)  # the pair of 30 is longer than a row, and left out
PAIRS = [{"prompt": (ascii_letters * 2)[size : 2 * size + 1], "response": ascii_letters[: size % 7]} for size in SIZES]
LAYERS = {"vocab_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
DECODER = LAYERS | {"intermediate_size": 24, "num_key_value_heads": 1, "pad_token_id": 0}
OTHERS: dict[str, dict[str, Any]] = {
    "gpt_neox": LAYERS | {"intermediate_size": 24},
    "opt": LAYERS | {"ffn_dim": 24, "word_embed_proj_dim": 16, "pad_token_id": 0},
    "phi": LAYERS | {"intermediate_size": 24},
    "mixtral": DECODER | {"num_local_experts": 2},
    "qwen3_moe": DECODER | {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8},
    **{one: DECODER | {"head_dim": 8} for one in ("gemma", "gemma2", "gemma3_text", "glm", "glm4", "qwen3")},
    **{one: {"vocab_size": 256, "n_layer": 2, "n_head": 2, "n_embd": 16} for one in ("gpt2", "gpt_bigcode")},
    "gptj": {"vocab_size": 256, "n_layer": 2, "n_head": 2, "n_embd": 16, "rotary_dim": 4},
}


def config_of(folder: Path, words: str = "data.packing=true", name: str = "llama") -> RunConfig:
    (folder / "pairs.json").write_text(json.dumps(PAIRS))
    config = config_of_line(
        f"model=llama_tiny batch.seq={SEQ} resources.device=cpu measure.validation_batches=0 data=pairs "
        f"data.path={folder}/pairs.json data.validation_fraction=0 {words}"
    )
    spread = "init_std" if name == "opt" else "initializer_range"
    settings = OTHERS.get(name, DECODER) | {spread: 0.2}  # with which tokens attend to some, not to all alike
    return replace(config, model=replace(config.model, name=name, model_type=name, config=settings, path=None))


def packing_model(config: RunConfig) -> Any:
    assert config.model.model_type is not None
    model: Any = build_model(config.model.model_type, config.model.config, seed=1)
    take_packed_rows(model, config.precision)
    return model


@pytest.mark.parametrize(
    ("sizes", "capacity", "rows"),
    [
        ([], 4, []),
        ([4, 4], 4, [[0], [1]]),
        ([1, 3, 2, 2], 4, [[1, 0], [2, 3]]),
        ([4, 3, 2, 3], 6, [[0, 2], [1, 3]]),
        ([0, 2, 1], 2, [[1, 0], [2]]),
    ],
)
def test_each_sample_is_in_the_fullest_row_that_holds_it(
    sizes: list[int], capacity: int, rows: list[list[int]]
) -> None:
    assert best_fit(np.asarray(sizes, dtype=np.int64), capacity) == rows


def test_rows_hold_every_pair_once_with_its_own_positions_and_labels(tmp_path: Path) -> None:
    packed, alone = (build_data(config_of(tmp_path, f"data.packing={value}")) for value in ("true", "false"))
    inputs, labels = packed.train_batch(0, packed.train_samples)
    found = []
    for (ids, positions), targets in zip(inputs, labels, strict=True):
        for part in np.split(np.arange(SEQ), np.flatnonzero(positions == 0)[1:]):
            assert positions[part].tolist() == list(range(len(part)))
            found.append((ids[part].tolist(), targets[part].tolist()))
    wanted = []
    for row, targets in zip(*alone.train_batch(0, alone.train_samples), strict=True):
        size = 1 + int(np.flatnonzero(targets != IGNORED_LABEL)[-1])  # the last token of a pair is only a label
        wanted.append((row[:size].tolist(), targets[:size].tolist()))
    assert sorted(one for one in found if one != ([0], [IGNORED_LABEL])) == sorted(wanted)
    assert (packed.train_samples, alone.train_samples) == (4, 9)
    assert packed.notes[-1] == ("packed 9 samples into 4 rows of 24 tokens (82 % filled; 37 % without packing)")
    assert packed.learned_tokens(9) == (packed.train_batch(0, 9).labels != IGNORED_LABEL).sum()
    assert packed.hash != alone.hash
    again = build_data(config_of(tmp_path))  # of a run that is continued after three samples
    assert all(map(np.array_equal, again.train_batch(3, 6), packed.train_batch(3, 6)))


def test_held_out_pairs_have_rows_of_their_own(tmp_path: Path) -> None:
    words = "data.validation_fraction=0.2"
    packed, alone = (build_data(config_of(tmp_path, f"{words} data.packing={value}")) for value in ("true", "false"))
    for mine, theirs in zip(packed.validation_batch(0, 2), alone.validation_batch(0, 2), strict=True):
        assert np.array_equal(mine, theirs)
    assert packed.examples(2) == alone.examples(2)


def parts(config: RunConfig, model: Any) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The loss of all samples; the sum of their gradients; and that of the absolute gradients of each row."""
    data, loss = build_data(config), 0.0
    sums = {key: torch.zeros_like(value) for key, value in model.named_parameters()}
    sizes = {key: torch.zeros_like(value) for key, value in model.named_parameters()}
    for row in range(data.train_samples):
        inputs, labels = map(torch.from_numpy, data.train_batch(row, 1))
        model.zero_grad()
        one = token_losses(model, inputs, labels, config.loss.tile_tokens)
        one.backward()
        loss += one.item()
        for key, value in model.named_parameters():
            if value.grad is not None:  # an expert that no token is sent to has none
                sums[key] += value.grad
                sizes[key] += value.grad.abs()
    return loss, sums, sizes


def differences(folder: Path, name: str, words: str) -> list[str]:
    """What differs between packed rows and rows of single pairs, in plain PyTorch."""
    config = config_of(folder, f"data.packing=true {words}", name)
    model = packing_model(config)
    loss, grads, _ = parts(config, model)
    wanted, single, sizes = parts(replace(config, data=replace(config.data, packing=False)), model)
    # 2^-24 for each of the at most 10^3 operations behind a number, of the sum of the absolute values that it adds up:
    # attention with a mask may take another kernel, and matrix products are of other shapes.
    bound = 1e3 * 2**-24
    wrong = ["loss"] if abs(loss - wanted) > bound * abs(wanted) else []
    # By module: terms that cancel, as those of OPT's key bias do to 0, are of the size of its weight's.
    largest: dict[str, float] = defaultdict(float)
    for key, size in sizes.items():
        module = key.rpartition(".")[0]
        largest[module] = max(largest[module], float(size.max()))
    return wrong + [
        key for key in grads if (grads[key] - single[key]).abs().max() > bound * largest[key.rpartition(".")[0]]
    ]


@pytest.mark.parametrize("words", ["", "loss=tiled loss.tile=5"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_packed_pairs_have_the_losses_and_gradients_of_single_ones(name: str, words: str, tmp_path: Path) -> None:
    assert differences(tmp_path, name, words) == []


@pytest.mark.full
@pytest.mark.parametrize("name", sorted({*PACKED.split()} - {"llama", "gpt2"}))
def test_so_has_every_architecture_that_is_packed(name: str, tmp_path: Path) -> None:
    assert run_alone(differences, tmp_path, name, "") == []


def test_without_the_mask_a_loss_is_another_and_with_it_no_device_waits(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    model, data = packing_model(config), build_data(config)
    inputs, labels = map(torch.from_numpy, data.train_batch(0, data.train_samples))
    assert inputs.shape[1:] == sample_of(config).inputs
    with HostReads() as reads:
        masked = token_losses(model, inputs, labels)
    assert reads.found == []
    # Ten times what the test above allows.
    assert abs(masked.item() - token_losses(model, inputs[:, 0], labels).item()) > 1e4 * 2**-24 * masked.item()


def trained(folder: Path) -> list[str]:
    """Weights, by stage, that after two steps on packed rows differ from those of plain PyTorch, whose gradients are
    the sums of both ranks'."""
    config, wrong = config_of(folder), []
    batches = [[*map(torch.from_numpy, build_data(config).train_batch(2 * step, 2))] for step in range(2)]
    count = int((batches[0][1] != IGNORED_LABEL).sum())
    plain = packing_model(config)
    rule = torch.optim.SGD(plain.parameters(), lr=LR)
    for inputs, labels in batches:
        rule.zero_grad()
        for rank in (0, 1):
            (token_losses(plain, inputs[rank : rank + 1], labels[rank : rank + 1]) / count).backward()
        rule.step()
    for stage in range(4):
        model, plan = packing_model(config), ZeroPlan.from_stage(stage)
        runtime = ZeroRuntime(model, plan, MixedPrecision(), SgdConfig(), RuntimeSettings(), torch.device("cpu"))
        own = slice(rank := torch.distributed.get_rank(), rank + 1)
        for inputs, labels in batches:
            runtime.backward(token_losses(model, inputs[own], labels[own]) / count)
            runtime.step(LR)
        with runtime.full_params() as values:
            wrong += [f"{key} in stage {stage}" for key, one in plain.named_parameters() if not values[key].equal(one)]
        runtime.close()
    return wrong


def test_every_stage_has_the_bits_of_plain_pytorch_on_packed_rows(tmp_path: Path) -> None:
    # A sum of two ranks' gradients is rounded once, whichever comes first.
    assert run_ranks(trained, 2, tmp_path) == [[], []]


@pytest.mark.parametrize(
    ("model_type", "settings", "kind", "sp", "told"),
    [
        ("llama", {}, "pairs", 1, ""),
        ("llama", {}, "text", 1, "packs prompts and responses"),
        ("bloom", {}, "pairs", 1, "an architecture with which it is tested"),
        ("llama", {}, "pairs", 2, "parallel.sp divides sequences"),
        ("mistral", {}, "pairs", 1, "at most the model's sliding_window, 4096"),
        ("mistral", {"sliding_window": None}, "pairs", 1, ""),
        ("phi3", {"sliding_window": 2047}, "pairs", 1, "sliding_window, 2047"),
        ("qwen2", {"sliding_window": 2048, "use_sliding_window": False}, "pairs", 1, ""),
    ],
)
def test_what_cannot_be_packed_is_refused(
    model_type: str, settings: dict[str, Any], kind: str, sp: int, told: str
) -> None:
    broken = problem(
        True,
        Model(model_type, model_type, settings),
        Data(DataKind(kind), path="a", packing=True),
        Batch(seq=8192),
        Parallel(sp=sp),
        Loss(),
        Measure(),
        Train(),
    )
    assert (told in broken.rule) if broken else not told
