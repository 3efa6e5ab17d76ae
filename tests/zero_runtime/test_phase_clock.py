"""PhaseClock charges every moment to exactly one phase."""

from __future__ import annotations

import pytest
import torch

from zero_runtime import phase_clock
from zero_runtime.errors import CallOrderError
from zero_runtime.phase_clock import OTHER, PhaseClock


class HandClock:
    """Replaces `time`: `perf_counter` returns the time that the test has set, in whole seconds."""

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


def started() -> PhaseClock:
    clock = PhaseClock(torch.device("cpu"))
    clock.start()
    return clock


def test_time_in_a_nested_phase_is_not_charged_to_the_outer_phase(hand: HandClock) -> None:
    clock = started()
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
    assert clock.end().seconds() == {OTHER: 65, "outer": 34, "inner": 20, "innermost": 8}


def test_the_times_of_a_repeated_phase_are_summed(hand: HandClock) -> None:
    clock = started()
    for seconds in (1, 2, 4):
        with clock.phase("work"):
            hand.now += seconds
    assert clock.end().seconds()["work"] == 7


def test_consecutive_laps_neither_overlap_nor_lose_time(hand: HandClock) -> None:
    clock = started()
    with clock.phase("work"):
        hand.now += 1
        first = clock.end().seconds()
        clock.start()
        hand.now += 2
    hand.now += 4
    second = clock.end().seconds()
    assert first.get("work") == 1
    assert (second["work"], second[OTHER]) == (2, 4)
    assert sum(first.values()) + sum(second.values()) == hand.now


def test_a_phase_ends_if_its_body_raises(hand: HandClock) -> None:
    clock = started()
    with pytest.raises(KeyError), clock.phase("work"):
        hand.fail_after(1)
    hand.now += 2
    assert clock.end().seconds() == {OTHER: 2, "work": 1}


def test_on_the_host_clock_the_phases_sum_to_the_total_time() -> None:
    clock = started()
    start = clock._marks[0][1]
    with clock.phase("outer"), clock.phase("inner"):
        torch.ones(1000).sum()
    ended = clock.end()
    stop = ended._marks[-1][1]
    lap = ended.seconds()
    assert isinstance(start, float)
    assert isinstance(stop, float)
    # Five differences of consecutive readings, each rounded by half a unit in the last place, and their sum.
    assert sum(lap.values()) == pytest.approx(stop - start, abs=10 * 2**-52 * stop)
    assert all(seconds >= 0 for seconds in lap.values())


class Event:
    """Replaces torch.cuda.Event: records the streams that it was recorded on; its time is that of `hand`."""

    made = 0
    hand: HandClock

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        Event.made += 1

    def record(self, stream: object) -> None:
        self.stream, self.at = stream, self.hand.now

    def synchronize(self) -> None:
        """The device has no work."""

    def elapsed_time(self, later: Event) -> float:
        return (later.at - self.at) * 1e3


@pytest.fixture
def cuda(hand: HandClock, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    device = torch.device("cuda", 3)
    Event.made, Event.hand = 0, hand
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda of: ("current stream", of))
    return device


def test_a_clock_that_nobody_started_makes_no_marks(cuda: torch.device) -> None:
    for device in (cuda, torch.device("cpu")):
        clock = PhaseClock(device)
        for _ in range(100):
            with clock.phase("work"):
                pass
        assert clock._marks == []
        with pytest.raises(CallOrderError, match=r"call start\(\) first"):
            clock.end()
    assert Event.made == 0


def test_events_are_used_again_after_a_lap(cuda: torch.device, hand: HandClock) -> None:
    clock = PhaseClock(cuda)
    for _ in range(50):
        clock.start()
        for seconds in (1, 2):
            with clock.phase("work"):
                hand.now += seconds
        hand.now += 4
        assert clock.end().seconds() == {OTHER: 4, "work": 3}
    assert Event.made == 6, "the marks of a lap"
    clock.start()
    for _ in range(50):
        with clock.phase("work"):
            hand.now += 1
        clock.start()
    clock.stop()
    assert Event.made == 6
    assert clock._marks == []


def test_a_lap_that_is_read_during_the_next_has_its_own_times(cuda: torch.device, hand: HandClock) -> None:
    clock, earlier = PhaseClock(cuda), None
    for step in range(20):
        clock.start()
        with clock.phase("work"):
            hand.now += step
        if earlier is not None:
            assert earlier.seconds() == {OTHER: 0, "work": step - 1}
        earlier = clock.end()
        hand.now += 100  # between laps
        clock.start()  # discards nothing of the lap that ended
    assert Event.made <= 9, "the marks of two laps"


def test_events_belong_to_the_clocks_device(cuda: torch.device) -> None:
    clock = PhaseClock(cuda)
    clock.start()
    with clock.phase("work"):
        pass
    assert {stamp.stream for _, stamp in clock._marks} == {("current stream", cuda)}  # type: ignore[union-attr]


def test_a_clock_that_starts_inside_a_phase_measures_that_phase(hand: HandClock) -> None:
    clock = PhaseClock(torch.device("cpu"))
    with clock.phase("outer"):
        hand.now += 1
        clock.start()
        hand.now += 2
    hand.now += 4
    assert clock.end().seconds() == {"outer": 2, OTHER: 4}


def test_a_listener_hears_of_each_mark_with_the_number_of_open_phases(hand: HandClock) -> None:
    heard: list[tuple[int, str]] = []
    clock = PhaseClock(torch.device("cpu"))
    clock.listen(lambda depth, phase: heard.append((depth, phase)))
    with clock.phase("before"):
        pass
    clock.start()
    with clock.phase("outer"), clock.phase("inner"):
        hand.now += 1
    clock.end()
    clock.listen(None)
    clock.start()
    assert heard == [(0, OTHER), (1, "outer"), (2, "inner"), (1, "outer"), (0, OTHER), (0, OTHER)]
