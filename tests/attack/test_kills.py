"""After SIGKILL at any moment, no result is lost, repeated or changed, and no process or leftover file remains.

The same command, run again, finishes successfully.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from harness.attack_counts import Tally
from harness.patience import HANG_S, wait_until

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
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


# ---- complete commands -----------------------------------------------------------------------------------------------

LINE = (
    "model=llama_tiny data=synthetic precision=fp32 tracking=none resources.device=cpu resources.ranks=2 "
    "resources.threads=1 batch.seq=16 batch.micro=1 measure.validation_batches=0 measure.warmup_steps=1 "
    "measure.steps=7 checkpoint=sharded checkpoint.every=1"
)
WHAT = {"run": "zero=stage2", "sweep": "--multirun zero=stage1,stage3 --retry error"}
COMMAND_KILLS, SEED = 20, 5


class Commands:
    """One output folder in which the same command is repeated until it ends by itself."""

    def __init__(self, folder: Path, what: str) -> None:
        (folder / "tmp").mkdir(parents=True)
        self.folder, self.output, self.temporary = folder, folder / "outputs", folder / "tmp"
        words = [*WHAT[what].split(), *LINE.split(), f"output={self.output}"]
        self._line = [sys.executable, str(ROOT / "run.py"), *words]

    def start(self) -> subprocess.Popen[str]:
        environment = {**os.environ, "TMPDIR": str(self.temporary), "ZLAB_LOCKS": str(self.folder / "locks")}
        log = (self.folder / "screen.txt").open("a")
        with log:
            return subprocess.Popen(self._line, cwd=self.folder, env=environment, stdout=log, stderr=log, text=True)

    def living(self) -> list[psutil.Process]:
        """The running processes that work for this output folder."""
        return [
            process
            for process in psutil.process_iter(["cmdline", "status"])
            if str(self.output) in " ".join(process.info["cmdline"] or [])
        ]

    def ended(self, command: subprocess.Popen[str]) -> int:
        code = command.wait(HANG_S)
        wait_until(lambda: not self.living())
        screen = (self.folder / "screen.txt").read_text()
        assert code in (0, 1, 3, -signal.SIGKILL), f"exit code {code}: {screen}"
        return code

    def results(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.output.glob("points/*/attempts/*/result.json")}

    def bits(self) -> dict[str, object]:
        """Losses by point and step, and the last weights: the same however often the command was killed."""
        found: dict[str, object] = {}
        for path in sorted(self.output.glob("points/*/attempts/*/metrics.jsonl")):
            for event in map(json.loads, path.read_text().splitlines()):
                if event.get("event") == "step":
                    name = f"{path.parents[2].name} step {event['step']}"
                    assert found.setdefault(name, event["loss"]) == event["loss"], f"{name} has two losses"
        for path in self.output.glob("points/*/checkpoints/step-*/*.safetensors"):
            found[str(path.relative_to(self.output))] = path.read_bytes()
        return found

    def check(self) -> None:
        left = [path for pattern in (".*.tmp", "*.partial", ".trash-*") for path in self.output.rglob(pattern)]
        assert [*left, *self.temporary.glob("zero_rank_*")] == [], "leftovers"


def part_of(process: psutil.Process) -> str:
    words = " ".join(process.info["cmdline"])
    return next((part for part in ("launch controller", "launch rank", "controller") if part in words), "command")


def kill_one(commands: Commands, moment: float, chance: random.Random) -> str:
    """Kills a random process and returns its part of the command; empty if the command had ended by then."""
    while time.monotonic() < moment:
        time.sleep(0.01)
    found = commands.living()
    if not found:
        return ""
    part = chance.choice(sorted({part_of(one) for one in found}))
    victim = chance.choice([one for one in found if part_of(one) == part])
    try:
        victim.kill()
    except psutil.NoSuchProcess:
        return ""
    return part


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_killed_and_repeated_commands_give_the_bits_of_unbroken_ones(tmp_path: Path, tally: Tally) -> None:
    chance = random.Random(SEED)
    unbroken, lasts_s = {}, {}
    for what in WHAT:
        commands, begun = Commands(tmp_path / what, what), time.monotonic()
        assert commands.ended(commands.start()) == 0
        unbroken[what], lasts_s[what] = commands.bits(), time.monotonic() - begun
    counts: Counter[str] = Counter()
    while counts["kills"] < COMMAND_KILLS:
        what = "sweep" if counts["chains"] % 2 else "run"
        commands = Commands(tmp_path / f"chain{counts['chains']}", what)
        code, results = -1, {}
        while code != 0:
            begun, command = time.monotonic(), commands.start()
            if counts["kills"] < COMMAND_KILLS:
                part = kill_one(commands, begun + chance.uniform(0, lasts_s[what]), chance)
                counts.update({"kills": bool(part), f"of {part}": 1} if part else {})
            code = commands.ended(command)
            now = commands.results()
            assert {path: now.get(path) for path in results} == results, f"{commands.folder}: results were lost"
            results = now
        commands.check()
        assert commands.bits() == unbroken[what], f"{commands.folder} is not what an unbroken run gives"
        if what == "sweep":  # a single run is measured each time it is started
            assert len(results) == 2, "a point was measured twice"
        counts.update(chains=1)
    tally("kills of whole commands", **counts, **PROMISES)
