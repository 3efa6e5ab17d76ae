"""Sequence parallelism with ZeRO equals one process of plain PyTorch, and its states do not depend on the degree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness.divided import (
    HOST_PARAMS,
    KINDS,
    ODD_KINDS,
    PART_KINDS,
    DividedRun,
    batch_of,
    check_against_plain,
    divided_results,
    loss_sum,
    one_step,
    weights_of,
)
from harness.ranks import run_ranks

from zero_runtime.activations.rule import RecomputeRule
from zero_runtime.checkpoint.load import CheckpointReader, load_checkpoint
from zero_runtime.checkpoint.save import save_checkpoint
from zero_runtime.errors import PlanError
from zero_runtime.optim.configs import AdamWConfig
from zero_runtime.precision import MixedPrecision

BF16 = MixedPrecision("bf16")
KNOWN = [kind for kind in (*KINDS, *ODD_KINDS, *PART_KINDS) if not kind.startswith("t5")]
SHORT_KINDS = ["gpt2", "llama"]  # which need no further imports


def parts_of(kind: str, stage: int = 0, parts: int = 2, **others: object) -> DividedRun:
    return DividedRun(kind, stage, degree=1, parts=parts, **others)  # type: ignore[arg-type]


def check(world: int, runs: list[DividedRun]) -> None:
    check_against_plain(run_ranks(divided_results, world, runs), runs)


@pytest.mark.parametrize("kinds", [SHORT_KINDS, pytest.param(KNOWN, marks=pytest.mark.full)], ids=len)
def test_two_parts_of_a_sequence_equal_plain_torch(kinds: list[str]) -> None:
    """Most of the first part has no labels, so the ranks' losses have different weights."""
    check(2, [parts_of(kind) for kind in kinds])


@pytest.mark.full
def test_two_parts_on_two_data_ranks_equal_plain_torch_with_other_settings() -> None:
    accumulated = parts_of("llama", 2, micro_batches=2, clip_norm=0.5)
    every = [
        parts_of("qwen2", 0),
        accumulated,
        replace(accumulated, kind="qwen2", stage=3, offload=HOST_PARAMS),
        replace(accumulated, stage=1, precision=BF16),
        parts_of("llama", 3, recompute=RecomputeRule("full")),
        parts_of("llama", 1, recompute=RecomputeRule("by_operation")),
        parts_of("llama", 2, parts=4),  # more ranks than key and value heads
        parts_of("gpt2", 3, shard_ranks=2),  # with replicas of a group's shards
    ]
    check(4, every)


@pytest.mark.full
@pytest.mark.parametrize(("stage", "parts"), [(0, 2), (1, 2), (2, 2), (3, 2), (0, 4), (3, 4)])
def test_other_stages_and_degrees_of_parts_equal_plain_torch(stage: int, parts: int) -> None:
    settings = [{}, {"micro_batches": 2, "clip_norm": 0.5}, {"precision": BF16, "clip_norm": 0.5}]
    runs = [parts_of(kind, stage, parts, **one) for kind in ("llama", "qwen2", "gpt2") for one in settings]
    check(4, [*runs, parts_of("llama", stage, parts, optimizer=AdamWConfig(eps=0.01))])


# ---- refusals --------------------------------------------------------------------------------------------------------


def different_batches() -> str:
    runtime = parts_of("llama", 1).runtime()
    runtime.backward(
        loss_sum(runtime.model, batch_of(runtime.model, 0, runtime.collectives.rank), None, runtime.sequence)
    )
    with pytest.raises(PlanError) as error:
        runtime.step(0.1)
    return str(error.value)


def test_different_batches_of_the_parts_are_refused_on_every_rank() -> None:
    for message in run_ranks(different_batches, 2):
        assert "parallel.sp=2" in message
        assert "the same batch, found different tokens or labels on ranks [0, 1]" in message


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def saved(root: Path, parts: int) -> dict[str, torch.Tensor]:
    runtime = parts_of("llama", 2, parts).runtime()
    one_step(runtime, 0)
    save_checkpoint(runtime, root, step=1, trainer={})
    return weights_of(runtime)


def loaded(root: Path, degree: int, parts: int) -> dict[str, torch.Tensor]:
    runtime = DividedRun("llama", 3, degree, parts).runtime()
    with CheckpointReader.open(root / "step-00000001", verify=False) as checkpoint:
        load_checkpoint(runtime, checkpoint)
    return weights_of(runtime)


@pytest.mark.parametrize(
    ("parts", "world", "degree", "other"),
    [(2, 2, 1, 1), pytest.param(1, 4, 1, 4, marks=pytest.mark.full), pytest.param(4, 4, 2, 1, marks=pytest.mark.full)],
)
def test_a_checkpoint_is_loaded_at_any_degree(tmp_path: Path, parts: int, world: int, degree: int, other: int) -> None:
    """degree, other: of tensor and of sequence parallelism afterwards."""
    wanted = run_ranks(saved, 4, tmp_path, parts)[0]
    for found in run_ranks(loaded, world, tmp_path, degree, other):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
