"""The judge decides from the ranks' notes alone which ranks are to blame for a hang."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from zero_runtime.watch.journal import RING, Journal, read_journal
from zero_runtime.watch.judge import Blame, Note, Patience, RankStatus, judge

SLOW_S, STUCK_S, START_S = 5.0, 60.0, 300.0
RUNNING = RankStatus.RUNNING


def note(rank: int, units: str, *, waiting: int = 0, idle_s: float = 9.0, standing: RankStatus = RUNNING) -> Note:
    """The note of a rank that gathered (lower case) or reduced (upper case) `units` and waits for number `waiting`."""
    journal = Journal()
    for unit in units:
        journal.issue("all_gather" if unit.islower() else "reduce_scatter", unit, 8, torch.float32)
    journal.next_step()
    journal.wait(waiting)
    return Note(rank, standing, *journal.read(), idle_s)


def judged(*notes: Note) -> Blame:
    return judge(notes, Patience(SLOW_S, STUCK_S, START_S))


def test_no_rank_is_blamed_while_all_agree() -> None:
    assert judged(note(0, "ab", waiting=2), note(1, "ab", waiting=2)) == Blame((), "")


def test_a_rank_that_computes_while_others_wait_is_named_but_not_blamed() -> None:
    verdict = judged(note(0, "ab", waiting=2), note(1, "a", idle_s=STUCK_S - 1))
    assert verdict.ranks == ()
    assert "rank 1 has not come to it for 59 s" in verdict.text


def test_a_rank_that_keeps_others_waiting_for_too_long_is_blamed() -> None:
    assert judged(note(0, "ab", waiting=2), note(1, "a", idle_s=STUCK_S)).ranks == (1,)


def test_a_starting_rank_has_more_time() -> None:
    ahead, behind = note(0, "ab", waiting=2), note(1, "a", idle_s=START_S - 1)
    assert behind.place is not None
    behind = replace(behind, place=behind.place._replace(step=1, is_starting=True))
    assert judged(ahead, behind).ranks == ()
    verdict = judged(ahead, replace(behind, idle_s=START_S))
    assert verdict.ranks == (1,)
    assert "within 300 s (start_s of the watch)" in verdict.text
    patient = Patience(SLOW_S, 2 * START_S, START_S)  # no less time to start than for a step
    assert judge((ahead, replace(behind, idle_s=2 * START_S - 1)), patient).ranks == ()


def test_a_rank_that_has_started_has_no_extra_time_in_its_first_step() -> None:
    ahead, behind = note(0, "ab", waiting=2), note(1, "a", idle_s=STUCK_S)
    assert behind.place is not None
    verdict = judged(ahead, replace(behind, place=behind.place._replace(step=1)))
    assert verdict.ranks == (1,)
    assert "within 60 s (stuck_s of the watch)" in verdict.text


def test_the_start_ends_with_end_start_or_after_the_first_step() -> None:
    said, stepped = Journal(), Journal()
    said.begin("forward")
    assert said.read()[0].is_starting
    assert stepped.read()[0].is_starting
    said.end_start()
    stepped.next_step()
    assert (said.read()[0].is_starting, said.read()[0].step) == (False, 1)
    assert (stepped.read()[0].is_starting, stepped.read()[0].step) == (False, 2)


def test_a_rank_that_only_prefetches_further_ahead_causes_no_blame() -> None:
    assert judged(note(0, "abc", idle_s=1), note(1, "ab", idle_s=STUCK_S)).ranks == ()
    assert judged(note(0, "abc", waiting=2), note(1, "ab", idle_s=STUCK_S)).ranks == ()


@pytest.mark.parametrize(
    ("units", "blamed"),
    [(("ab", "ac", "ab"), (1,)), (("ac", "ab", "ab"), (0,)), (("ab", "ac"), (1,)), (("ab", "ac", "ad"), (1, 2))],
)
def test_if_ranks_differ_those_outside_the_largest_group_are_blamed(
    units: tuple[str, ...], blamed: tuple[int, ...]
) -> None:
    verdict = judged(*(note(rank, gathered) for rank, gathered in enumerate(units)))
    assert verdict.ranks == blamed
    assert "collective gather 2" in verdict.text


def test_gathers_and_reductions_may_interleave_differently() -> None:
    """They run in separate process groups, and a rank with unused parameters reduces at a different time."""
    assert judged(note(0, "abBA", waiting=4), note(1, "aBbA", waiting=4)) == Blame((), "")


def test_a_rank_that_waits_in_another_group_than_the_others_is_blamed() -> None:
    notes = note(0, "ab", waiting=2), note(1, "aA", waiting=2), note(2, "ab", waiting=2)
    verdict = judged(*notes)
    assert verdict.ranks == (1,)
    assert "ranks 0, 2 issued all_gather of unit b" in verdict.text
    assert judged(*(replace(one, idle_s=SLOW_S - 1) for one in notes)).ranks == ()


def test_a_difference_is_blamed_before_the_death_that_it_caused() -> None:
    assert judged(note(0, "ab", standing=RankStatus.GONE), note(1, "ac"), note(2, "ab")).ranks == (1,)


@pytest.mark.parametrize("standing", [RankStatus.GONE, RankStatus.STOPPED, RankStatus.SILENT])
def test_an_absent_rank_is_blamed(standing: RankStatus) -> None:
    assert judged(note(0, "ab", waiting=2), note(1, "ab", standing=standing)).ranks == (1,)


def test_a_rank_that_ended_is_blamed_only_if_others_issue_more_collectives() -> None:
    assert judged(note(0, "abc", waiting=3), note(1, "ab", standing=RankStatus.LEFT)).ranks == (1,)
    assert judged(note(0, "ab", idle_s=999), note(1, "ab", standing=RankStatus.LEFT)).ranks == ()


def test_a_note_is_unchanged_after_dump_and_load() -> None:
    written = note(1, "ab", waiting=2)
    assert Note.load(written.dump().encode()) == written


def test_a_journal_is_read_from_its_file_and_keeps_the_last_collectives(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.begin("backward")
    journal.enter("blocks.1")
    for index in range(RING + 5):
        journal.issue("reduce_scatter", "blocks.1", index, torch.bfloat16)
    place, ops = read_journal(tmp_path / "journal")
    assert (place.issued, place.step, place.phase, place.unit) == (RING + 5, 1, "backward", "blocks.1")
    assert [op.sequence for op in ops] == list(range(6, RING + 6))
    assert str(ops[-1]) == f"reduce_scatter of unit blocks.1 ({RING + 4} x bfloat16) in backward of step 1"


def test_unit_names_beyond_the_journals_capacity_are_reported_as_more_names() -> None:
    journal = Journal()
    for index in range(3000):
        journal.issue("all_gather", f"a_rather_long_name_of_a_unit.{index}", 8, torch.float32)
    assert "more names" in journal.read()[1][-1].unit


def test_fingerprints_depend_on_kind_unit_size_dtype_and_order_and_are_summed_exactly() -> None:
    base = [("all_gather", "a", 8, torch.float32), ("all_gather", "c", 8, torch.float32)]
    variants = [base, base[::-1], base[:1], [*base, base[0]]]
    changes = (("all_reduce", "a", 8, torch.float32), ("all_gather", "b", 8, torch.float32))
    changes += (("all_gather", "a", 9, torch.float32), ("all_gather", "a", 8, torch.float64))
    variants += [[change, base[1]] for change in changes]
    prints = []
    for ops in variants:
        journal = Journal()
        for op in ops:
            journal.issue(*op)
        prints.append(journal.fingerprint())
    assert len(set(prints)) == len(variants)
    largest, world = 2**20 - 1, 2**13
    assert max(prints) <= largest
    assert float(world * largest**2) == world * largest**2 < 2**53
