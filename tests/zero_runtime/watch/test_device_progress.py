"""A device that hangs while every host has issued everything is seen, and all ranks end long before NCCL's timeout."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.lone_rank import lone_rank
from harness.outcomes import HASTY, rank_outcomes
from test_judge import SLOW_S, START_S, STUCK_S, judged

from zero_runtime.collectives import Collectives
from zero_runtime.phase_clock import PhaseClock
from zero_runtime.watch.device_progress import KEPT, DeviceProgress
from zero_runtime.watch.journal import Journal
from zero_runtime.watch.judge import Blame, Note, RankStatus
from zero_runtime.watch.watch import RankWatch

# ---- what is polled --------------------------------------------------------------------------------------------------


class Device:
    """A device that has completed the first `done` collectives."""

    def __init__(self) -> None:
        self.done = 0
        self.asked: list[int] = []

    def completes(self, sequence: int) -> Callable[[], bool]:
        def is_completed() -> bool:
            self.asked.append(sequence)
            return sequence <= self.done

        return is_completed


def issued(count: int) -> tuple[Device, Journal, DeviceProgress]:
    device, journal = Device(), Journal()
    progress = DeviceProgress(journal)
    for _ in range(count):
        sequence = journal.issue("all_gather", "a", 8, torch.float32)
        progress.add(sequence, device.completes(sequence))
    return device, journal, progress


def test_the_journal_has_the_last_completed_collective_and_the_first_that_is_not() -> None:
    device, journal, progress = issued(4)
    assert not progress.poll()
    assert (journal.read()[0].completed, journal.read()[0].under_way) == (0, 1)
    device.done = 3
    assert progress.poll()
    assert (journal.read()[0].completed, journal.read()[0].under_way) == (3, 4)
    assert not progress.poll()
    assert device.asked[-1] == 4, "completed collectives are dropped"
    device.done = 4
    assert progress.poll()
    assert (journal.read()[0].completed, journal.read()[0].under_way) == (4, 0)
    assert not progress.poll()
    assert (journal.read()[0].completed, journal.read()[0].under_way) == (4, 0)


def test_only_the_last_collectives_are_held_and_none_after_forget() -> None:
    device, _, progress = issued(3 * KEPT)
    progress.poll()
    assert device.asked == [2 * KEPT + 1]
    progress.forget()
    assert not progress.poll()
    assert len(device.asked) == 1


def test_the_work_of_reductions_and_of_gathers_into_temporary_tensors_is_not_held() -> None:
    """A work object holds the output of its collective, whose memory is needed before the next poll."""
    journal = Journal()
    watch: Any = SimpleNamespace(journal=journal, progress=DeviceProgress(journal))
    with lone_rank(1, 4):
        collectives = Collectives(2, PhaseClock(torch.device("cpu")), watch)
        full, shard = torch.zeros(8), torch.zeros(4)
        collectives.all_gather(full, shard).wait()
        collectives.all_gather(full, shard, lasting=False).wait()
        collectives.reduce(full, shard).wait()
        collectives.sum_over_ranks_(torch.zeros(2))
        kinds = {op.sequence: op.kind for op in journal.read()[1]}
        assert [kinds[one.sequence] for one in watch.progress._under_way] == ["all_gather", "control_sum"]
        collectives.free()
        assert not watch.progress._under_way


# ---- what the judge makes of it --------------------------------------------------------------------------------------


def note(rank: int, units: str, *, under_way: int = 0, idle_s: float = STUCK_S, starts: bool = False) -> Note:
    """A rank on CUDA that gathered (lower case) or reduced (upper case) `units`; its device is in one of them."""
    journal = Journal()
    journal.keep_one_order()
    for unit in units:
        journal.issue("all_gather" if unit.islower() else "reduce_scatter", unit, 8, torch.float32)
    if not starts:
        journal.end_start()
    journal.see_device(0, under_way)
    return Note(rank, RankStatus.RUNNING, *journal.read(), idle_s)


def test_if_no_device_completes_what_every_rank_has_issued_all_ranks_are_blamed() -> None:
    verdict = judged(note(0, "abc", under_way=2), note(1, "abc", under_way=2))
    assert (verdict.ranks, verdict.hung) == ((0, 1), True)
    assert "expected within 60 s" in verdict.text
    assert "the device in collective gather 2: all_gather of unit b" in verdict.text
    assert judged(note(0, "abc", under_way=2, idle_s=SLOW_S - 1), note(1, "abc", under_way=2)) == Blame((), "")
    patient = judged(note(0, "abc", under_way=2, idle_s=STUCK_S - 1), note(1, "abc", under_way=2))
    assert patient.ranks == ()
    assert "no device has completed the collective that it is in for 59 s" in patient.text


def test_a_device_that_computes_or_whose_rank_starts_is_given_more_time() -> None:
    assert judged(note(0, "abc", under_way=2), note(1, "abc")) == Blame((), "")
    starting = note(0, "abc", under_way=2, starts=True), note(1, "abc", under_way=2, starts=True)
    assert judged(*starting).ranks == ()
    assert judged(*(replace(one, idle_s=START_S) for one in starting)).ranks == (0, 1)


def test_a_rank_whose_host_keeps_the_devices_of_others_waiting_is_blamed() -> None:
    behind = note(1, "ab")
    assert judged(note(0, "abc", under_way=3, idle_s=9), behind).ranks == (1,)
    assert judged(note(0, "abc", under_way=3, idle_s=9), replace(behind, idle_s=STUCK_S - 1)).ranks == ()


def test_on_one_device_gathers_and_reductions_must_interleave_in_the_same_way() -> None:
    verdict = judged(note(0, "abBA"), note(1, "abBA"), note(2, "aBbA"))
    assert verdict.ranks == (2,)
    assert "differ in collective 2" in verdict.text


def test_the_fingerprint_covers_the_order_over_all_channels_only_on_a_device() -> None:
    prints = []
    for one_order in (False, True):
        for kinds in (("all_gather", "reduce_scatter"), ("reduce_scatter", "all_gather")):
            journal = Journal()
            if one_order:
                journal.keep_one_order()
            for kind in kinds:
                journal.issue(kind, "a", 8, torch.float32)
            prints.append(journal.fingerprint())
    assert prints[0] == prints[1]
    assert prints[2] != prints[3]


# ---- ranks -----------------------------------------------------------------------------------------------------------


def _device_hangs(watch: RankWatch, rank_0_dies: bool = False) -> None:
    """Every host issues three collectives, of which the device completes one, and blocks in a read of the device."""
    journal = watch.journal
    journal.end_start()
    for number in range(3):
        sequence = journal.issue("all_gather", f"blocks.{number}", 8, torch.float32)
        watch.progress.add(sequence, partial(int.__le__, sequence, 1))
    dist.barrier()
    if rank_0_dies and dist.get_rank() == 0:
        os._exit(3)
    while True:
        time.sleep(0.1)


def test_a_hang_of_the_devices_ends_all_ranks_with_the_collective() -> None:
    for outcome in rank_outcomes(_device_hangs, 2, replace(HASTY, slow_s=0.3, stuck_s=1.5)):
        assert (outcome.how, outcome.blamed) == ("ended", (0, 1)), outcome
        assert "the device in collective gather 2: all_gather of unit blocks.1" in outcome.text


@pytest.mark.full
def test_a_rank_whose_device_waits_ends_soon_after_the_rank_with_the_store() -> None:
    dies = partial(_device_hangs, rank_0_dies=True)
    _, other = rank_outcomes(dies, 2, replace(HASTY, slow_s=0.5), tcp=True)
    assert (other.how, other.blamed) == ("ended", (0,)), other
