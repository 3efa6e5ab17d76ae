"""The share of the cores that other processes used is computed from the system's CPU time counters."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from orchestrator.worker.machine_load import (
    LoadMeter,
    Used,
    busy_seconds,
    others_share,
    usable_cores,
)

TICK = os.sysconf("SC_CLK_TCK")


def stat_file(path: Path, *cores: tuple[int, ...]) -> Path:
    lines = [f"cpu{core} " + " ".join(str(seconds * TICK) for seconds in row) for core, row in enumerate(cores)]
    path.write_text("cpu  1 2 3\n" + "\n".join(lines) + "\nintr 5 0\n")
    return path


def test_busy_time_excludes_idle_and_io_wait_and_counts_guest_time_once(tmp_path: Path) -> None:
    #                                    user nice system idle iowait irq softirq steal guest guest_nice
    stat = stat_file(tmp_path / "stat", (10, 20, 30, 1000, 1000, 1, 2, 3, 10, 20), (7, 0, 0, 0, 0, 0, 0, 0, 0, 0))
    assert busy_seconds(stat, [0]) == {0: 66.0}
    assert busy_seconds(stat, [0, 1]) == {0: 66.0, 1: 7.0}


@pytest.mark.parametrize("text", [None, "", "cpu0 a b c d e f g h\n", "cpu0 1 2\n"])
def test_a_system_without_readable_counters_gives_no_busy_times(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "stat").write_text(text)
    assert busy_seconds(tmp_path / "stat", [0]) == {}


def test_busy_time_that_the_ranks_did_not_use_belongs_to_other_processes() -> None:
    ranks = [Used("a", 10.0, 8.0, {0: 10.0, 1: 9.0}), Used("a", 10.0, 7.0, {0: 10.0, 1: 9.0})]
    assert others_share(ranks) == pytest.approx((19 - 15) / 20)


def test_ranks_bound_to_different_cores_of_a_host_are_one_machine() -> None:
    ranks = [Used("a", 10.0, 8.0, {0: 10.0}), Used("a", 10.0, 8.0, {1: 8.0})]
    assert others_share(ranks) == pytest.approx(0.1)


def test_the_busiest_machine_counts_and_a_machine_without_counters_makes_the_share_unknown() -> None:
    quiet, busy = Used("a", 10.0, 9.0, {0: 9.0}), Used("b", 10.0, 4.0, {0: 10.0})
    assert others_share([quiet, busy]) == pytest.approx(0.6)
    assert others_share([quiet, Used("b", 10.0, 4.0, {})]) is None
    assert others_share([Used("a", 10.0, 4.0, {0: 0.0})]) is None, "it counts nothing, not even what we did"


def test_rounding_to_clock_ticks_never_gives_a_negative_share() -> None:
    assert others_share([Used("a", 1.0, 1.0, {0: 0.99})]) == 0.0


def test_a_meter_measures_from_its_begin_to_its_end(tmp_path: Path) -> None:
    cores = max(usable_cores()) + 1
    stat = stat_file(tmp_path / "stat", *[(1, 0, 0, 0, 0, 0, 0, 0)] * cores)
    meter = LoadMeter(stat)
    stat_file(stat, *[(3, 0, 0, 0, 0, 0, 0, 0)] * cores)
    meter.begin()
    stat_file(stat, *[(3, 4, 0, 9, 9, 0, 0, 1)] * cores)
    used = meter.end()
    assert used.host == platform.node()
    assert used.busy_s == dict.fromkeys(usable_cores(), 5.0)
    assert used.wall_s > 0
    assert used.own_s >= 0


def test_ranks_of_the_sweep_that_wait_are_not_others(tmp_path: Path) -> None:
    def process(number: int, session: int, ticks: int) -> None:
        (tmp_path / str(number)).mkdir(exist_ok=True)
        text = f"{number} (a ) b) S 1 {number} {session} 0 -1 0 0 0 0 0 {ticks} {ticks} 7 7 20 0\n"
        (tmp_path / str(number) / "stat").write_text(text)

    for number, session in ((11, 11), (12, 11), (13, 13)):
        process(number, session, 100)
    meter = LoadMeter(tmp_path / "stat", tmp_path)
    meter.begin([11])
    for number, session in ((11, 11), (12, 11), (13, 13)):
        process(number, session, 150)
    assert meter.end().beside_s == pytest.approx(4 * 50 / os.sysconf("SC_CLK_TCK"))
    waiting, alone = Used("a", 10.0, 15.0, {0: 10.0, 1: 8.0}, beside_s=2.0), Used("a", 10.0, 15.0, {0: 10.0, 1: 8.0})
    assert others_share([waiting]) == pytest.approx(0.05)
    assert others_share([alone]) == pytest.approx(0.15)
