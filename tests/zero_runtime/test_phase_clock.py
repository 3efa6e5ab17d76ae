"""Every moment belongs to exactly one phase, on a clock that the test turns by hand."""

from __future__ import annotations

import pytest
import torch

from zero_runtime import phase_clock
from zero_runtime.phase_clock import OTHER, PhaseClock


class HandClock:
    """Stands in for `time`: `perf_counter` tells what the test has let pass, in whole seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def fail_after(self, seconds: float) -> None:
        self.now += seconds
        raise KeyError


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    clock = HandClock()
    monkeypatch.setattr(phase_clock, "time", clock)
    return clock


def test_a_nested_phase_takes_its_time_away_from_the_outer_one(hand: HandClock) -> None:
    clock = PhaseClock(torch.device("cpu"))
    hand.now += 1
    with clock.phase("outer"):
        hand.now += 2
        with clock.phase("inner"):
            hand.now += 4
            with clock.phase("innermost"):
                hand.now += 8
            hand.now += 16
        hand.now += 32
    hand.now += 64
    assert clock.lap() == {OTHER: 65, "outer": 34, "inner": 20, "innermost": 8}


def test_a_phase_entered_again_adds_up(hand: HandClock) -> None:
    clock = PhaseClock(torch.device("cpu"))
    for seconds in (1, 2, 4):
        with clock.phase("work"):
            hand.now += seconds
    assert clock.lap()["work"] == 7


def test_laps_share_no_moment_and_lose_none(hand: HandClock) -> None:
    clock = PhaseClock(torch.device("cpu"))
    with clock.phase("work"):
        hand.now += 1
        first = clock.lap()
        hand.now += 2
    hand.now += 4
    second = clock.lap()
    assert first.get("work") == 1
    assert (second["work"], second[OTHER]) == (2, 4)
    assert sum(first.values()) + sum(second.values()) == hand.now


def test_a_phase_that_raises_ends(hand: HandClock) -> None:
    clock = PhaseClock(torch.device("cpu"))
    with pytest.raises(KeyError), clock.phase("work"):
        hand.fail_after(1)
    hand.now += 2
    assert clock.lap() == {OTHER: 2, "work": 1}


def test_on_the_hosts_clock_phases_sum_to_the_whole() -> None:
    clock = PhaseClock(torch.device("cpu"))
    start = clock._marks[0][1]
    with clock.phase("outer"), clock.phase("inner"):
        torch.ones(1000).sum()
    lap = clock.lap()
    stop = clock._marks[-1][1]
    assert isinstance(start, float)
    assert isinstance(stop, float)
    # Five differences of neighbours, each rounded by half a unit in the last place of the reading, and their sum.
    assert sum(lap.values()) == pytest.approx(stop - start, abs=10 * 2**-52 * stop)
    assert all(seconds >= 0 for seconds in lap.values())
