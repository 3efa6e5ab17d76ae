"""Kills whole commands that train with the real worker, each repeated until it ends by itself, and compares the bits.

`python command_kills.py FOLDER KILLS SEED [forks]` makes KILLS kills at random moments and prints its counts as JSON.
With `forks`, every process is a fork of this one, which has imported torch (see family.py): a command then takes a
fifth of the time. Without, it is a new Python, as on a user's machine. A violation is an AssertionError.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import psutil

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE.parent), str(HERE.parent / "orchestrator"), str(HERE)]

from family import ROLES, Family  # noqa: E402
from harness.patience import HANG_S, wait_until  # noqa: E402

LINE = (
    "model=llama_tiny data=synthetic precision=fp32 tracking=none resources.device=cpu resources.ranks=2 "
    "resources.threads=1 batch.seq=16 batch.micro=1 measure.validation_batches=0 measure.warmup_steps=1 "
    "measure.steps=7 checkpoint=sharded checkpoint.every=1"
)
WHAT = {"run": "zero=stage2", "sweep": "--multirun zero=stage1,stage3 --retry error"}


class Member(NamedTuple):
    """A process of a command and the part of the command that it is."""

    pid: int
    part: str


class Commands:
    """One output folder in which the same command is repeated until it ends by itself."""

    def __init__(self, folder: Path, what: str) -> None:
        (folder / "tmp").mkdir(parents=True)
        self.folder, self.output, self.temporary = folder, folder / "outputs", folder / "tmp"
        self.words = [*WHAT[what].split(), *LINE.split(), f"output={self.output}"]
        self.environment = {"TMPDIR": str(self.temporary), "ZLAB_LOCKS": str(folder / "locks")}
        self.screen = folder / "screen.txt"

    def start(self) -> Started:
        with self.screen.open("a") as log:
            line = [sys.executable, str(ROOT / "run.py"), *self.words]
            environment = {**os.environ, **self.environment}
            command = subprocess.Popen(line, cwd=self.folder, env=environment, stdout=log, stderr=log)
        return Started(self, command)

    def check(self) -> None:
        left = [path for pattern in (".*.tmp", "*.partial", ".trash-*") for path in self.output.rglob(pattern)]
        left += self.temporary.glob("zero_rank_*")
        assert not left, f"leftovers: {[str(path.relative_to(self.folder)) for path in left]}"

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
        assert found
        return found


class Started:
    """A command that was started, as new processes."""

    def __init__(self, commands: Commands, command: subprocess.Popen[bytes]) -> None:
        self._commands, self._command = commands, command

    def living(self) -> list[Member]:
        """The running processes that work for this output folder."""
        return [
            Member(process.pid, _part(" ".join(process.info["cmdline"])))
            for process in psutil.process_iter(["cmdline"])
            if str(self._commands.output) in " ".join(process.info["cmdline"] or [])
        ]

    def wait(self) -> int:
        return self._command.wait(HANG_S)

    def close(self) -> None:
        """Nothing is open."""


def _part(words: str) -> str:
    return next((role for program, role in ROLES.items() if program in words), "command")


class ForkedCommands(Commands):
    def start(self) -> StartedForks:
        log = self.folder / f"family{time.monotonic_ns()}.log"
        family = Family(log, [])
        return StartedForks(family, family.start(self._command, self.screen))

    def _command(self) -> int:
        from orchestrator import cli

        os.environ.update(self.environment)
        os.chdir(self.folder)
        return cli.main(self.words)


class StartedForks:
    """A command that was started as forks of this process."""

    def __init__(self, family: Family, pid: int) -> None:
        self._family, self._pid = family, pid

    def living(self) -> list[Member]:
        return [Member(one.pid, one.role.rstrip("0123456789")) for one in self._family.living()]

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def close(self) -> None:
        self._family.close()


def preload() -> None:
    """Imports what the processes of a command import."""
    import matplotlib.figure
    import transformers.models.llama.modeling_llama

    from orchestrator import cli
    from orchestrator.commands import run, sweep
    from orchestrator.launch import controller, local_executor
    from orchestrator.wings.page import files
    from orchestrator.wings.predict import shapes
    from orchestrator.worker import train

    assert all((matplotlib, transformers, cli, run, sweep, controller, local_executor, files, shapes, train))
    gc.freeze()  # a collection in a fork would visit all objects of the libraries, and so copy the shared pages


def ended(commands: Commands, command: Started | StartedForks) -> int:
    code = command.wait()
    wait_until(lambda: not command.living())
    assert code in (0, 1, 3, -signal.SIGKILL), f"exit code {code}: {commands.screen.read_text()}"
    return code


def kill_one(command: Started | StartedForks, moment: float, chance: random.Random) -> str:
    """Kills a random process and returns its part of the command; empty if the command had ended by then."""
    while time.monotonic() < moment:
        time.sleep(0.01)
    found = command.living()
    if not found:
        return ""
    part = chance.choice(sorted({one.part for one in found}))
    victim = chance.choice([one for one in found if one.part == part])
    try:
        os.kill(victim.pid, signal.SIGKILL)  # checked a moment ago, and pids are not reused so soon
    except ProcessLookupError:
        return ""
    return part


def chain(commands: Commands, lasts_s: float, most: int, chance: random.Random) -> Counter[str]:
    """Repeats the command until it succeeds, and makes up to `most` kills before."""
    counts: Counter[str] = Counter()
    code, part, results = -1, "", {}
    while code != 0:
        begun, part = time.monotonic(), ""
        with closing(commands.start()) as command:
            if counts["kills"] < most:
                part = kill_one(command, begun + chance.uniform(0, lasts_s), chance)
                counts.update({"kills": bool(part), f"of {part}": 1} if part else {})
            code = ended(commands, command)
        now = commands.results()
        assert {path: now.get(path) for path in results} == results, f"{commands.folder}: results were lost"
        results = now
    if part:  # what a process leaves that was killed last, the next command removes
        with closing(commands.start()) as command:
            assert ended(commands, command) == 0
    commands.check()
    return counts


def main(argv: list[str]) -> None:
    folder, kills, chance = Path(argv[0]), int(argv[1]), random.Random(int(argv[2]))
    kind: type[Commands] = ForkedCommands if "forks" in argv else Commands
    if kind is ForkedCommands:
        preload()
    unbroken, lasts_s = {}, {}
    for what in WHAT:
        commands, begun = kind(folder / what, what), time.monotonic()
        with closing(commands.start()) as command:
            assert ended(commands, command) == 0
        unbroken[what], lasts_s[what] = commands.bits(), time.monotonic() - begun
    counts: Counter[str] = Counter()
    while counts["kills"] < kills:
        what = "sweep" if counts["chains"] % 2 else "run"
        commands = kind(folder / f"chain{counts['chains']}", what)
        counts += chain(commands, lasts_s[what], kills - counts["kills"], chance)
        assert commands.bits() == unbroken[what], f"{commands.folder} is not what an unbroken run gives"
        if what == "sweep":  # a single run is measured each time it is started
            assert len(commands.results()) == 2, "a point was measured twice"
        counts.update(chains=1)
    print(json.dumps(counts))


if __name__ == "__main__":
    main(sys.argv[1:])
