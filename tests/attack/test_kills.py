"""After SIGKILL at any moment, no result is lost, repeated or changed, and no process or leftover file remains.

The same command, run again, finishes successfully.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from harness.attack_counts import Tally
from harness.patience import HANG_S

HERE = Path(__file__).resolve().parent
PROMISES = dict.fromkeys(
    ("results_lost", "results_repeated", "wrong_bits", "wrong_exit_codes", "processes_left", "leftovers"), 0
)


def kill_sweeps(folder: Path, tally: Tally, shares: int, kills: int, seed: int, *words: str) -> None:
    """Makes `kills` kills in each of `shares` parallel processes; their assertions are in sweep_kills.py."""
    command = [sys.executable, str(HERE / "sweep_kills.py")]
    drivers = []
    for share in range(shares):
        (folder / f"share{share}").mkdir()
        line = [*command, str(folder / f"share{share}"), *map(str, (kills, seed + share, share, shares)), *words]
        drivers.append(subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    told = [driver.communicate(timeout=HANG_S) for driver in drivers]
    assert [driver.returncode for driver in drivers] == [0] * shares, "\n".join(errors for _, errors in told)
    counts: Counter[str] = Counter()
    for printed, _ in told:
        counts.update(json.loads(printed.splitlines()[-1]))
    tally(f"kills of sweeps and runs{' with MLflow' if 'tracked' in words else ''}", **counts, **PROMISES)


def test_sweeps_and_runs_survive_kills_at_any_moment(tmp_path: Path, tally: Tally) -> None:
    kill_sweeps(tmp_path, tally, 2, 5, 1)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_sweeps_and_runs_survive_a_hundred_kills_before_every_kind_of_change(tmp_path: Path, tally: Tally) -> None:
    kill_sweeps(tmp_path, tally, 4, 25, 100)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_the_mlflow_store_is_complete_after_kills_at_any_moment(tmp_path: Path, tally: Tally) -> None:
    kill_sweeps(tmp_path, tally, 2, 12, 200, "tracked")


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kills", "words"), [(4, []), (20, ["forks"])], ids=["processes", "forks"])
def test_killed_and_repeated_commands_give_the_bits_of_unbroken_ones(
    kills: int, words: list[str], tmp_path: Path, tally: Tally
) -> None:
    line = [sys.executable, str(HERE / "command_kills.py"), str(tmp_path), str(kills), "5", *words]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tally("kills of whole commands", **json.loads(done.stdout.splitlines()[-1]), **PROMISES)
