"""Who is to blame, from notes alone."""

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
    """A rank that gathered (small letters) or reduced (large ones) these units, and waits for the n-th of them."""
    journal = Journal()
    for unit in units:
        journal.issue("all_gather" if unit.islower() else "reduce_scatter", unit, 8, torch.float32)
    journal.next_step()
    journal.wait(waiting)
    return Note(rank, standing, *journal.read(), idle_s)


def judged(*notes: Note) -> Blame:
    return judge(notes, Patience(SLOW_S, STUCK_S, START_S))


def test_nobody_is_blamed_while_all_agree() -> None:
    assert judged(note(0, "ab", waiting=2), note(1, "ab", waiting=2)) == Blame((), "")


def test_a_rank_that_computes_while_others_wait_is_named_but_not_blamed() -> None:
    verdict = judged(note(0, "ab", waiting=2), note(1, "a", idle_s=STUCK_S - 1))
    assert verdict.ranks == ()
    assert "rank 1 has not come to it for 59 s" in verdict.text


def test_a_rank_that_keeps_others_waiting_for_too_long_is_blamed() -> None:
    assert judged(note(0, "ab", waiting=2), note(1, "a", idle_s=STUCK_S)).ranks == (1,)


def test_a_rank_that_starts_has_more_time() -> None:
    ahead, behind = note(0, "ab", waiting=2), note(1, "a", idle_s=START_S - 1)
    assert behind.place is not None
    behind = replace(behind, place=behind.place._replace(step=1, is_starting=True))
    assert judged(ahead, behind).ranks == ()
    verdict = judged(ahead, replace(behind, idle_s=START_S))
    assert verdict.ranks == (1,)
    assert "within 300 s (start_s of the watch)" in verdict.text
    patient = Patience(SLOW_S, 2 * START_S, START_S)  # nobody has less time to start than for a step
    assert judge((ahead, replace(behind, idle_s=2 * START_S - 1)), patient).ranks == ()


def test_a_rank_that_has_started_has_no_more_time_in_its_first_step_than_in_any_other() -> None:
    ahead, behind = note(0, "ab", waiting=2), note(1, "a", idle_s=STUCK_S)
    assert behind.place is not None
    verdict = judged(ahead, replace(behind, place=behind.place._replace(step=1)))
    assert verdict.ranks == (1,)
    assert "within 60 s (stuck_s of the watch)" in verdict.text


def test_the_start_is_over_when_somebody_says_so_or_the_first_step_ends() -> None:
    said, stepped = Journal(), Journal()
    said.begin("forward")
    assert said.read()[0].is_starting
    assert stepped.read()[0].is_starting
    said.end_start()
    stepped.next_step()
    assert (said.read()[0].is_starting, said.read()[0].step) == (False, 1)
    assert (stepped.read()[0].is_starting, stepped.read()[0].step) == (False, 2)


def test_a_rank_that_only_gathers_further_ahead_makes_no_other_guilty() -> None:
    assert judged(note(0, "abc", idle_s=1), note(1, "ab", idle_s=STUCK_S)).ranks == ()
    assert judged(note(0, "abc", waiting=2), note(1, "ab", idle_s=STUCK_S)).ranks == ()


@pytest.mark.parametrize(
    ("units", "blamed"),
    [(("ab", "ac", "ab"), (1,)), (("ac", "ab", "ab"), (0,)), (("ab", "ac"), (1,)), (("ab", "ac", "ad"), (1, 2))],
)
def test_the_side_with_fewer_ranks_is_blamed_for_a_difference(units: tuple[str, ...], blamed: tuple[int, ...]) -> None:
    verdict = judged(*(note(rank, gathered) for rank, gathered in enumerate(units)))
    assert verdict.ranks == blamed
    assert "collective gather 2" in verdict.text


def test_gathers_and_reductions_may_interleave_differently() -> None:
    """They run in groups of their own, and a rank that leaves parameters unused reduces at another time."""
    assert judged(note(0, "abBA", waiting=4), note(1, "aBbA", waiting=4)) == Blame((), "")


def test_ranks_that_wait_for_each_other_in_different_groups_are_told_apart() -> None:
    notes = note(0, "ab", waiting=2), note(1, "aA", waiting=2), note(2, "ab", waiting=2)
    verdict = judged(*notes)
    assert verdict.ranks == (1,)
    assert "ranks 0, 2 issued all_gather of unit b" in verdict.text
    assert judged(*(replace(one, idle_s=SLOW_S - 1) for one in notes)).ranks == ()


def test_a_difference_comes_before_the_death_that_it_caused() -> None:
    assert judged(note(0, "ab", standing=RankStatus.GONE), note(1, "ac"), note(2, "ab")).ranks == (1,)


@pytest.mark.parametrize("standing", [RankStatus.GONE, RankStatus.STOPPED, RankStatus.SILENT])
def test_an_absent_rank_is_blamed(standing: RankStatus) -> None:
    assert judged(note(0, "ab", waiting=2), note(1, "ab", standing=standing)).ranks == (1,)


def test_a_rank_that_left_is_blamed_only_where_others_issue_more() -> None:
    assert judged(note(0, "abc", waiting=3), note(1, "ab", standing=RankStatus.LEFT)).ranks == (1,)
    assert judged(note(0, "ab", idle_s=999), note(1, "ab", standing=RankStatus.LEFT)).ranks == ()


def test_a_note_survives_the_way_through_the_store() -> None:
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


def test_more_names_than_fit_are_told_as_such_and_break_nothing() -> None:
    journal = Journal()
    for index in range(3000):
        journal.issue("all_gather", f"a_rather_long_name_of_a_unit.{index}", 8, torch.float32)
    assert "more names" in journal.read()[1][-1].unit


def test_fingerprints_differ_where_kind_unit_size_or_dtype_or_order_do_and_sum_exactly() -> None:
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
