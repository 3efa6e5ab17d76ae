"""The rounds of one rank: when they begin and end, what they record, and how a rank waits for its turn."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from itertools import pairwise
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.patience import wait_until

from orchestrator.config.schema import Measure
from orchestrator.records.run_record import AttemptPaths
from orchestrator.records.turns import Turns, grant, open_turns
from orchestrator.rounds.intervals import CONTROLLED
from orchestrator.rounds.recorded import NOTABLE_SHARE
from orchestrator.worker.core_speed import PAGE_BYTES, ReferenceWork, arrays_in
from orchestrator.worker.machine_load import Used
from orchestrator.worker.rounds import MOST_FURTHER, MeasuredRounds


class Rank:
    """A rank whose steps take as many seconds as `steps` says. shares: the load of each round in turn."""

    def __init__(self, folder: Path, rounds: int, shares: list[float] | None = None, min_s: float = 0.0) -> None:
        self.steps: list[float] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._shares = list(shares or [])
        self.rounds = MeasuredRounds(
            AttemptPaths(folder),
            Measure(rounds=rounds, min_s=min_s),
            self.steps,
            self._gather,
            lambda event, **values: self.events.append((event, values)),
            lambda: None,
        )

    def _gather(self, used: Used) -> list[Used]:
        share = self._shares.pop(0) if self._shares else 0.0
        return [Used("here", 10.0, 5.0, {0: 5.0 + 10 * share}, counted_s=used.counted_s)]

    def run(self, first: int, seconds: list[float]) -> None:
        self.rounds.divide(first, first + len(seconds))
        self.steps += [1.0] * first  # the warm-up
        for step, one in enumerate(seconds, start=first):
            if self.rounds.begins(step):
                self.rounds.begin()
            self.steps.append(one)
            if (number := self.rounds.ends(step)) is not None:
                self.rounds.end(number)

    def repeat(self, number: int, seconds: list[float]) -> None:
        self.rounds.begin()
        self.steps += seconds
        self.rounds.end(number)


def test_steps_after_the_warm_up_are_divided_into_rounds_without_their_first_steps(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 3)
    rank.run(2, [0.9, 0.1, 0.2, 0.9, 0.3, 0.4, 0.9, 0.5, 0.6])
    assert [one.step_ms for one in rank.rounds.found] == [
        pytest.approx([100, 200]),
        pytest.approx([300, 400]),
        pytest.approx([500, 600]),
    ]
    assert [event for event, _ in rank.events] == ["round"] * 3, "without a file of turns nobody waits"
    assert rank.rounds.to_dict()["session"] is None
    assert rank.rounds.others_share() == 0.0


@pytest.mark.parametrize(
    ("seconds", "min_s", "further"),
    [
        (0.5, 2.0, []),  # four counted steps of 0.5 s are enough
        (0.5, 3.0, [(3, 3)]),  # two more of them, after one that is not counted
        (0.5, 3.2, [(3, 3), (4, 3)]),
        (0.5, 20.0, [(number, 3) for number in range(3, 3 + MOST_FURTHER)]),
        (0.5, 38.1, [(number, 6) for number in range(3, 3 + MOST_FURTHER)]),  # 73 of them: more would make more rounds
    ],
)
def test_further_rounds_follow_until_the_counted_steps_took_min_s(
    tmp_path: Path, seconds: float, min_s: float, further: list[tuple[int, int]]
) -> None:
    rank = Rank(tmp_path, 2, min_s=min_s)
    rank.run(0, [0.9, seconds, seconds] * 2)
    assert rank.rounds.further() == further
    for number, steps in further:
        rank.rounds.begin()
        rank.steps += [0.9, *[seconds] * (steps - 1)]
        rank.rounds.end(number)
    assert sum(sum(one.step_ms) for one in rank.rounds.found) >= 1e3 * min_s
    assert rank.rounds.to_repeat() == []


def with_reference(folder: Path, rounds: int, reference: Callable[[], float | None]) -> MeasuredRounds:
    """Rounds of two ranks, of which the other's reference work takes four times as long."""

    def gather(used: Used) -> list[Used]:
        return [used, used._replace(reference_ms=[4 * one for one in used.reference_ms])]

    steps: list[float] = []
    made = MeasuredRounds(
        AttemptPaths(folder),
        Measure(rounds=rounds),
        steps,
        gather,
        lambda event, **values: None,
        lambda: None,
        reference=reference,
    )
    made.divide(0, 3 * rounds)
    for number in range(1, rounds + 1):
        made.before_step()  # before a round: nothing is timed
        made.begin()
        for _ in range(3):
            made.before_step()
            steps.append(1.0)
        made.end(number)
    return made


def test_the_reference_work_is_timed_around_each_step_of_a_round_and_outside_of_rounds_never(tmp_path: Path) -> None:
    left = [1.0, 1.0, 4.0, 9.0, 2.0, 2.0, 2.0, 2.0]
    found = with_reference(tmp_path, 2, lambda: left.pop(0)).found
    # The first step of a round does not count; the mean of before and after, and that of two ranks, are geometric.
    assert [one.reference_ms for one in found] == [pytest.approx([4.0, 12.0]), pytest.approx([4.0, 4.0])]
    assert left == []


def test_steps_on_another_device_have_no_reference_work(tmp_path: Path) -> None:
    elsewhere = ReferenceWork(uses_cores=False).timed_ms
    assert [one.reference_ms for one in with_reference(tmp_path, 2, elsewhere).found] == [[], []]


def test_the_reference_work_takes_time_and_draws_no_random_number() -> None:
    before = torch.get_rng_state()
    took_ms = ReferenceWork(uses_cores=True).timed_ms()
    assert took_ms is not None
    assert took_ms > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_the_arrays_of_the_reference_work_share_one_huge_page() -> None:
    arrays = arrays_in(mmap(-1, 2 * PAGE_BYTES))
    ends = [(one.data_ptr(), one.data_ptr() + one.nbytes - 1) for one in arrays]
    assert len({address // PAGE_BYTES for pair in ends for address in pair}) == 1
    assert all(last < first for (_, last), (first, _) in pairwise(ends))


def test_the_reference_work_keeps_no_tensor_that_a_count_of_a_ranks_tensors_would_find() -> None:
    before = live_tensor_bytes()
    work = ReferenceWork(uses_cores=True)
    assert work.timed_ms()
    assert live_tensor_bytes() == before


def live_tensor_bytes() -> int:
    gc.collect()
    return sum(one.nbytes for one in gc.get_objects() if isinstance(one, torch.Tensor))


def test_a_further_round_next_to_a_load_is_measured_once_more(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 2, [0.0, 0.0, NOTABLE_SHARE], min_s=3.0)
    rank.run(0, [0.9, 0.5, 0.5] * 2)
    assert rank.rounds.further() == [(3, 3)]
    rank.rounds.begin()
    rank.steps += [0.9, 0.5, 0.5]
    rank.rounds.end(3)
    assert rank.rounds.to_repeat() == [(3, 3)]


def test_a_measurement_in_one_round_counts_every_step_and_repeats_nothing(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 1, [0.5])
    rank.run(0, [0.9, 0.1])
    assert [one.step_ms for one in rank.rounds.found] == [pytest.approx([900, 100])]
    assert (rank.rounds.to_repeat(), rank.rounds.others_share()) == ([], pytest.approx(0.5))


def test_a_round_next_to_a_load_is_measured_again_and_not_after_a_pass_in_which_no_load_ended(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 2, [NOTABLE_SHARE, 0.0, 0.5])
    rank.run(0, [0.9, 0.1, 0.9, 0.2])
    assert rank.rounds.to_repeat() == [(1, 2)]
    rank.repeat(1, [0.9, 0.3])
    assert rank.rounds.to_repeat() == []
    assert [one.used for one in rank.rounds.found] == [True, True, False], "the repeated round had more load"
    assert rank.events[-1] == ("round", {"number": 1, "step_ms": 300.0, "others_share": 0.5, "again": True})


def test_a_round_that_stays_loaded_is_left_out_at_the_end(tmp_path: Path) -> None:
    rank = Rank(tmp_path, CONTROLLED + 1, [NOTABLE_SHARE])
    rank.run(0, [0.9, 0.1] * (CONTROLLED + 1))
    rank.rounds.leave_out_loaded()
    assert [one.used for one in rank.rounds.found] == [False, *[True] * CONTROLLED]
    assert rank.rounds.others_share() == 0.0


def test_passes_over_the_loaded_rounds_go_on_while_they_help_and_are_few(tmp_path: Path) -> None:
    loaded = NOTABLE_SHARE
    rank = Rank(tmp_path, 5, [loaded] * 5 + [0.0, *[loaded] * 4] + [0.0, *[loaded] * 3] + [0.0, loaded, loaded])
    rank.run(0, [0.9, 0.1] * 5)
    passes = []
    while added := rank.rounds.to_repeat():
        passes.append([number for number, _ in added])
        for number, _ in added:
            rank.repeat(number, [0.9, 0.2])
    assert passes == [[1, 2, 3, 4, 5], [2, 3, 4, 5], [3, 4, 5]]


def test_a_rank_waits_for_its_turn_and_says_so_once(tmp_path: Path) -> None:
    attempt = AttemptPaths(tmp_path)
    open_turns(attempt, "a session")
    turns, told = Turns(attempt), list[int]()
    thread = threading.Thread(target=lambda: [turns.next(told.append, lambda: None) for _ in range(2)])
    thread.start()
    wait_until(lambda: told == [1])
    grant(attempt, 1)
    wait_until(lambda: told == [1, 2])
    assert thread.is_alive()
    grant(attempt, 2)
    thread.join(10)
    assert not thread.is_alive()
    assert turns.session == "a session"


def test_a_rank_says_when_it_has_its_turn(tmp_path: Path) -> None:
    """Steps of further rounds are not recorded, so without it a point that is measured would seem to wait."""
    attempt = AttemptPaths(tmp_path)
    open_turns(attempt, "a session")
    grant(attempt, 2)
    rank = Rank(tmp_path, 2)
    rank.run(0, [0.9, 0.5] * 2)
    assert [event for event, _ in rank.events] == ["waiting", "turn", "round"] * 2
    assert [values["turn"] for event, values in rank.events if event == "turn"] == [1, 2]


def test_an_attempt_that_is_one_round_has_those_before_it_in_its_result(tmp_path: Path) -> None:
    first = Rank(tmp_path / "1", 1)
    first.run(1, [0.5, 0.4])
    (tmp_path / "2").mkdir()
    open_turns(AttemptPaths(tmp_path / "2"), "s", number=2, earlier=first.rounds.to_dict()["rounds"])
    second = Rank(tmp_path / "2", 6)
    second.run(1, [0.3, 0.2])
    assert [(one.number, one.median_ms) for one in second.rounds.found] == [
        (1, pytest.approx(450)),
        (2, pytest.approx(250)),
    ]
    assert [event for event, _ in second.events] == ["round"]


def test_a_short_attempt_ends_after_the_steps_of_one_round(tmp_path: Path) -> None:
    open_turns(AttemptPaths(tmp_path), "s", number=1, short=True)
    rounds = Rank(tmp_path, 3).rounds
    assert rounds.divide(2, 9) == 2 + 7 // 3
    assert (rounds.begins(2), rounds.ends(3)) == (True, 1)
    assert Rank(tmp_path / "other", 3).rounds.divide(2, 9) == 9
