"""The cost of logging: what its numbers mean, and a short run of it with a real tracker."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import logging_cost
from benchmarks.logging_cost import LoggingTurns


def test_the_writes_and_the_tracker_add_up_to_a_share_of_the_step() -> None:
    turns = LoggingTurns([0.1005] * 6, [0.1] * 6, steps=1000, seconds=100.0, writing=0.2, tracking=0.4)
    assert turns.accounted(2) == pytest.approx(0.002 + 0.002)
    assert turns.holds(2)
    assert "paired turns: logging costs +0.50 %" in turns.lines(2)[1]


def test_a_cost_of_a_hundredth_by_either_account_fails() -> None:
    slow = LoggingTurns([0.102] * 6, [0.1] * 6, steps=1000, seconds=100.0, writing=0.2, tracking=0.4)
    busy = LoggingTurns([0.1] * 6, [0.1] * 6, steps=1000, seconds=100.0, writing=0.2, tracking=1.8)
    assert (slow.holds(2), busy.holds(2)) == (False, False)


@pytest.mark.full
def test_turns_with_a_real_tracker_are_counted(tmp_path: Path) -> None:
    turns = logging_cost.measured(2, 3.0, tmp_path)
    assert (len(turns.logged), len(turns.bare)) == (2, 2)
    assert turns.writing > 0
    assert turns.tracking >= 0  # the tracker rests for up to 30 s after a tick, which is longer than these turns
