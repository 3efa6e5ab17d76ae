"""Contestants that take turns have equal states: the same weights, the same tokens and as many earlier steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.ranks import run_ranks

from benchmarks.gpt import GptSize
from benchmarks.stages import GLIBC, in_turn, measure_time
from benchmarks.stages_contestants import batch_of, whole_step
from benchmarks.stages_task import LIMIT, ROWS, WARMUP, Task
from orchestrator.launch import environment

TASK = Task("", 2, GptSize(layers=2, width=32, heads=2, vocab=64, seq=16, micro=1), "fp32", 2)
CPU = torch.device("cpu")


def _measured_and_alone() -> tuple[dict[str, Any], list[float]]:
    measured = measure_time(TASK, "time", CPU, None)
    alone = whole_step("stage0", TASK, CPU, None)
    return measured, [alone(batch_of(TASK, index, CPU)) for index in range(WARMUP + TASK.rounds)]


@pytest.mark.full
def test_every_row_has_the_losses_of_a_row_that_is_trained_alone() -> None:
    (measured, alone), (_, other) = run_ranks(_measured_and_alone, 2)
    expected = [mine + its for mine, its in zip(alone, other, strict=True)]
    assert {name: losses for name, losses in measured["losses"].items() if name != LIMIT} == dict.fromkeys(
        ROWS, expected
    )
    assert measured["losses"][LIMIT][0] == expected[0]  # after that step the others have other weights
    assert {len(seconds) for seconds in measured["seconds"].values()} == {TASK.rounds}


def test_the_rows_have_the_allocator_settings_of_the_launcher() -> None:
    assert GLIBC == environment.GLIBC


def test_each_round_has_every_contestant_once_in_a_changing_order_that_all_ranks_share() -> None:
    names = list("abcdefgh")
    orders = [in_turn(names, index) for index in range(4)]
    assert orders == [in_turn(names, index) for index in range(4)]
    assert all(sorted(order) == names for order in orders)
    assert len({tuple(order) for order in orders}) == 4
