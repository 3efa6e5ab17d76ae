"""Outer sharding on the data axis of tensor parallelism, and on the ranks of sequence parallelism.

Weights, losses and norms are those of one process of plain PyTorch within rounding, and have the bits of groups that
replicate what outer sharding divides; messages equal closed forms.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from harness.data_messages import Sent, counted, outer_messages
from harness.divided import (
    HEADS,
    MICRO,
    SEQ,
    VOCABULARY,
    WIDTH,
    DividedRun,
    Result,
    check_against_plain,
    one_step,
    weights_of,
)
from harness.ranks import run_ranks
from test_sequence_parallel_messages import GROUPED, Parts, part_messages
from test_tensor_parallel_messages import Axes, tensor_messages

from zero_runtime.plan import OuterSharding, ZeroPlan

MICROS = 2
SLICES = DividedRun("llama", 3, 2, micro_batches=MICROS, clip_norm=0.5, gathers_logits=False, shard_ranks=1)
PARTS = DividedRun("llama", 3, 1, 2, micro_batches=MICROS, clip_norm=0.5, shard_ranks=2)
Found = tuple[Result, Sent, int, int]  # after the last step; what it sent; units, and their elements


def trained(runs: list[DividedRun]) -> list[Found]:
    """What this rank has after each run, and what it sent in the last step."""
    found = []
    for run in runs:
        runtime = run.runtime()
        steps = []
        for step in range(3):
            runtime.reset_ledger()
            steps.append(one_step(runtime, step))
        sent = counted(runtime)
        found.append(((steps, weights_of(runtime)), *sent))
        runtime.close()
    return found


def with_kinds(run: DividedRun, *kinds: OuterSharding | None) -> list[DividedRun]:
    return [replace(run, outer_sharding=kind) for kind in kinds]


def layer_messages(run: DividedRun, world: int) -> Sent:
    """Those of the divided layers, or of the parts of sequences, in closed form."""
    if run.degree > 1:
        return tensor_messages(
            Axes(world // run.degree, run.degree, MICROS, MICRO, SEQ, WIDTH, VOCABULARY, gathers_logits=False)
        )
    return part_messages(Parts(run.parts, MICROS, MICRO * SEQ, HEADS, GROUPED, WIDTH // HEADS))


def check(world: int, runs: list[DividedRun]) -> None:
    """runs: in a row those with other kinds of outer sharding, of which the first has none."""
    by_rank = run_ranks(trained, world, runs)
    check_against_plain([[result for result, *_ in found] for found in by_rank], runs)
    for found in by_rank:
        for run, ((steps, weights), sent, units, padded) in zip(runs, found, strict=True):
            if run.outer_sharding is None:
                alike_steps, alike = steps, weights
            assert steps == alike_steps, run
            assert all(torch.equal(weights[name], value) for name, value in alike.items()), run
            if run.outer_sharding is not None:
                plan = ZeroPlan.from_stage(3, shard_ranks=run.shard_ranks, outer_sharding=run.outer_sharding)
                of_data = outer_messages(plan, world // run.degree, MICROS, units, padded)
                assert sent == layer_messages(run, world) | of_data, run


def test_outer_sharding_with_slices_and_with_parts_of_sequences_equals_plain_torch() -> None:
    check(4, with_kinds(SLICES, None, "optim") + with_kinds(PARTS, None, "optim"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "run"),
    [
        (4, SLICES),
        (4, PARTS),
        (8, replace(SLICES, shard_ranks=2)),
        (4, replace(PARTS, shard_ranks=1)),
        (4, replace(PARTS, parts=4)),
        (8, PARTS),
    ],
    ids=["slices", "parts", "slices in groups of 2", "parts in groups of 1", "4 parts", "parts on 8 ranks"],
)
def test_other_groups_equal_plain_torch(world: int, run: DividedRun) -> None:
    check(world, with_kinds(run, None, "optim"))
