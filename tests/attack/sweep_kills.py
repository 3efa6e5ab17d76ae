"""Kills a sweep or a run of the stub worker several times in a chain, whose last command is not killed.

`python sweep_kills.py FOLDER KILLS SEED SHARE OF [tracked]` makes KILLS kills, half of them aimed at the SHAREth of OF
equal parts of all kinds of changes and half at random moments, and prints its counts as JSON. The same conditions must
hold whatever the moment of a kill was; a violation is an AssertionError, printed after the chain's seed.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import signal
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import matplotlib.figure

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE.parent / "orchestrator"), str(HERE)]

import stub_worker  # noqa: E402  ranks are forks of this process
from family import Family  # noqa: E402
from harness.kill_points import Aim, kinds, notes  # noqa: E402
from harness.patience import wait_until  # noqa: E402
from points import STUB, make_config  # noqa: E402

from orchestrator import cli  # noqa: E402
from orchestrator.commands import run, watch_sweep  # noqa: E402
from orchestrator.commands.run import run_point  # noqa: E402
from orchestrator.commands.sweep import SweepRequest, run_sweep  # noqa: E402
from orchestrator.config.schema import TrackingKind  # noqa: E402
from orchestrator.launch import controller, local_executor  # noqa: E402
from orchestrator.machine import hardware  # noqa: E402
from orchestrator.planning.point import Point, Wishes, retry_states  # noqa: E402
from orchestrator.records import sweep_record  # noqa: E402
from orchestrator.records.record_file import require_json  # noqa: E402
from orchestrator.records.run_record import store_path, tracking_path  # noqa: E402
from orchestrator.tracking import names  # noqa: E402
from orchestrator.tracking import process as tracking  # noqa: E402
from orchestrator.wings.page import files  # noqa: E402

# What draws the report is imported here too: otherwise each command and each controller would do so for itself.
PRELOADED = (stub_worker, controller, local_executor, tracking, files, matplotlib.figure)
POINTS = 3
# 0: all points measured. 1: a point or the disk failed. 3: not all points run. Also -9: the command was killed.
CODES = {0, 1, 3}
LOOK_S = 0.02  # between two looks of a command: less than the program's, so that more kills hit it at work
LEFTOVERS = (".*.tmp", "*.partial", ".trash-*", "zero_rank_*")


class Scene:
    """One output folder, and the commands of a chain that run in it."""

    def __init__(self, folder: Path, what: str, store: Path | None) -> None:
        """`what`: sweep or single. `store`: an empty MLflow store if the runs are tracked, else None."""
        self.folder, self.output, self.locks = folder, folder / "outputs", folder / "locks"
        self.output.mkdir(parents=True)
        self.what, self._is_tracked = what, store is not None
        if store is not None:
            shutil.copy(store, store_path(self.output))
        kind = TrackingKind.mlflow if self._is_tracked else TrackingKind.none
        self.points = _points(self.output, kind)[: POINTS if what == "sweep" else 1]
        self._commands = 0
        self._results: dict[Path, bytes] = {}

    def start(self, aim: Aim | None = None) -> tuple[Family, int]:
        """Starts the command, which is the same each time; returns its family and its pid."""
        self._commands += 1
        family = Family(self.folder / f"family{self._commands}.log", [self.output, self.locks], aim)
        return family, family.start(self._command, self.screen)

    @property
    def screen(self) -> Path:
        return self.folder / f"screen{self._commands}.txt"

    def _command(self) -> int:
        os.environ.update(ZLAB_LOCKS=str(self.locks), STUB_STEP_S="0.01", TMPDIR=str(self.folder))
        cli._carried_out = self._sweep if self.what == "sweep" else self._single  # type: ignore[assignment]
        return cli.main([])

    def _sweep(self, words: object) -> int:
        wishes = Wishes(retry=retry_states("error"))
        request = SweepRequest("batch", tuple(self.points), ("sweeps=batch",), wishes, predicts=False, entry=STUB)
        return run_sweep(request, hardware.detect())

    def _single(self, words: object) -> int:
        return run_point(self.points[0], entry=STUB)

    def ended(self, family: Family, pid: int) -> int:
        """Waits for all processes of the family, checks what must hold after any command, and returns its exit code."""
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        wait_until(lambda: not family.living())
        assert code in CODES | {-signal.SIGKILL}, f"exit code {code}: {self.screen.read_text()}"
        logs = [self.screen, *self.output.glob("sweeps/*/controller.log"), *self.output.glob("*.log")]
        for log in logs:
            assert "Traceback" not in log.read_text(), f"{log}: {log.read_text()}"
        found = {path: path.read_bytes() for path in self.output.glob("points/*/attempts/*/result.json")}
        lost = [path for path, data in self._results.items() if found.get(path) != data]
        assert lost == [], "results were lost or written again"
        self._results = found
        return code

    @property
    def done(self) -> bool:
        return len(self._results) == len(self.points)

    def check(self) -> None:
        """Checks what must hold at the end of a chain, whose last command was not killed."""
        if self.what == "sweep":
            (sweep, *more) = sweep_record.all_sweeps(self.output)
            assert more == [], "the same command made a second sweep"
            standings = sweep_record.standings(sweep)
            assert all(one.state.measured for one in standings), standings
            twice = [*map(str, sorted(self._results)), self.screen.read_text()]
            assert len(self._results) == len(self.points), "a point was measured twice: " + "\n".join(twice)
        for path in self._results:
            config = next(one.config for one in self.points if _is_of(path, one))
            found, made = require_json(path), stub_worker.make_result(config, 9412.0 + 100 * config.zero.stage**2)
            rounds = [one["number"] for one in found.pop("rounds")]
            assert rounds == [*range(1, config.measure.rounds + 1)], "rounds were lost or written again"
            assert found.pop("session") is None or self.what == "sweep"
            assert found == made
        left = [path for pattern in LEFTOVERS for path in self.folder.rglob(pattern)]
        assert left == [], "leftovers"
        if self._is_tracked:
            self._check_store()
        for lock in [*self.locks.iterdir(), *self.output.rglob(".*lock")]:
            with lock.open("a") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: it is still held

    def _check_store(self) -> None:
        """Each attempt has one MLflow run with the attempt's status; only attempts that never began may have none."""
        assert list(tracking_path(self.output).glob("*")) == [], "MLflow does not have all"
        states = {str(path.parent): require_json(path)["state"] for path in self.output.glob("points/*/*/*/state.json")}
        with closing(sqlite3.connect(store_path(self.output))) as store:
            found = store.execute(
                "SELECT value, status FROM runs JOIN tags USING (run_uuid) WHERE key = ?", [names.ATTEMPT]
            ).fetchall()
            left = store.execute("SELECT name FROM runs WHERE status = 'RUNNING'").fetchall()
        assert left == [], "runs that nobody ended"
        unknown = states.keys() - {attempt for attempt, _ in found}
        assert {states.pop(attempt) for attempt in unknown} <= {"lost", "cancelled"}
        assert sorted(found) == sorted((attempt, names.STATUS[state]) for attempt, state in states.items())


def _is_of(result: Path, point: Point) -> bool:
    return bool(require_json(result.with_name("config.json"))["batch"]["micro"] == point.config.batch.micro)


def _points(output: Path, tracking: TrackingKind) -> list[Point]:
    """Points with one and with two ranks."""
    found = []
    for micro in range(1, POINTS + 1):
        ranks = 1 + micro % 2
        config = make_config(output, tracking=tracking)
        batch = replace(config.batch, micro=micro, global_size=2 * ranks * micro)
        resources = replace(config.resources, ranks=ranks)
        found.append(
            Point(f"micro{micro}", replace(config, batch=batch, resources=resources), (f"batch.micro={micro}",))
        )
    return found


def kinds_of(scene: Scene) -> tuple[list[Aim], float]:
    """The changes at which a run can be killed, each with its last count; and the seconds of a run without a kill."""
    begun = time.monotonic()
    family, pid = scene.start()
    with closing(family):
        assert scene.ended(family, pid) == 0
        lasted = time.monotonic() - begun
    scene.check()
    return kinds(family.log), lasted


def kill_at_random(family: Family, pid: int, lasts_s: float, chance: random.Random) -> bool:
    """Kills a random process at a random moment; False if no process was left at that moment."""
    moment = time.monotonic() + chance.uniform(0, lasts_s)
    while time.monotonic() < moment:
        time.sleep(0.005)
    found = family.living()
    if not found:
        return False
    role = chance.choice(sorted({one.role for one in found}))
    victim = chance.choice([one for one in found if one.role == role])
    os.kill(victim.pid, signal.SIGKILL)  # checked a moment ago to be of this family, and pids are not reused so soon
    return True


def chain(scene: Scene, aims: Iterator[Aim], lasts_s: float, chance: random.Random, most: int) -> Counter[str]:
    """Makes up to `most` kills, half of them aimed; the last command is not killed."""
    counts: Counter[str] = Counter()
    while counts["kills"] < most and not scene.done:
        aim = next(aims) if chance.random() < 0.5 else None
        family, pid = scene.start(aim)
        with closing(family):
            hit = aim is None and kill_at_random(family, pid, lasts_s, chance)
            scene.ended(family, pid)
            hit = hit or bool(notes(family.log, "killed"))
            counts.update(kills=hit, aimed=hit and aim is not None)
    family, pid = scene.start()
    with closing(family):
        assert scene.ended(family, pid) == 0, scene.screen.read_text()
    scene.check()
    return counts + Counter(chains=1)


def main(argv: list[str]) -> None:
    folder, kills, seed, share, of = Path(argv[0]), *map(int, argv[1:5])
    store = _make_store(folder) if "tracked" in argv else None
    for module in (run, watch_sweep):  # forks inherit it
        module.LOOK_S = LOOK_S
    counts: Counter[str] = Counter()
    chance = random.Random(seed)
    lasts_s, aims = {}, {}
    for what in ("sweep", "single"):
        every, lasts_s[what] = kinds_of(Scene(folder / what, what, store))
        aims[what] = _endless(every[share::of], chance)
        counts["kinds"] += len(every[share::of])
    while counts["kills"] < kills:
        what = "single" if counts["chains"] % 3 == 2 else "sweep"
        scene = Scene(folder / f"chain{counts['chains']}", what, store)
        try:
            counts += chain(scene, aims[what], lasts_s[what], chance, min(4, kills - counts["kills"]))
        except BaseException:
            print(f"chain {counts['chains']} of {' '.join(argv)}, in {scene.folder}", file=sys.stderr)
            raise
    print(json.dumps(counts))


def _make_store(folder: Path) -> Path:
    """Creates an empty store, which takes MLflow seconds; trackers are then forks of a process that imported MLflow."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # MLflow reads it when it is imported
    import mlflow

    path = folder / "empty.db"
    mlflow.MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


def _endless(every: list[Aim], chance: random.Random) -> Iterator[Aim]:
    """Yields each kind once in a random order, at a random count up to its last, and then starts again."""
    while True:
        for last in chance.sample(every, len(every)):
            yield Aim(last.change, chance.randint(1, last.count))


if __name__ == "__main__":
    main(sys.argv[1:])
