"""One bad record in an output folder is named, and every verb and every sweep answers for all the others."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from harness.attack_counts import Tally
from harness.corruptions import CORRUPTIONS
from points import make_config, make_point
from stub_worker import make_result, step_event

from orchestrator import cli, comparison, deciding, slurm_sweep, sweep_record, verbs
from orchestrator.deciding import Wishes
from orchestrator.point import Point
from orchestrator.record import Attempt, AttemptPaths, new_attempt
from orchestrator.record_file import BadRecord, append_event, read_json, write_json_atomic
from orchestrator.run_state import RunState
from orchestrator.schema import to_dict
from orchestrator.sweep_record import Planned, SweepPaths

HARDWARE = "cpu"
VERBS = (["list"], ["list", "--json"], ["status"], ["status", "--json"], ["report"], ["watch"], ["logs"])


class Scene:
    """An output folder with two sweeps that have ended: of three points measured and one failed, and of one point."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.points = tuple(_point(output, stage) for stage in range(4))
        self.other = self._sweep("other", self.points[:1])
        time.sleep(0.01)  # `last` is by the time of writing
        self.sweep = self._sweep("torn", self.points)
        self.first = AttemptPaths(Path(self.plan()[0].attempt))
        self.failed = self.attempt(self.points[3])
        self._copy = output.with_name("copy")
        shutil.copytree(output, self._copy, copy_function=shutil.copy2)

    def attempt(self, point: Point) -> AttemptPaths:
        (found,) = (one for one in self.output.glob("points/*/attempts/01") if f'"label": "{point.label}"' in text(one))
        return AttemptPaths(found)

    def restore(self) -> None:
        shutil.rmtree(self.output)
        shutil.copytree(self._copy, self.output, copy_function=shutil.copy2)

    def plan(self, wishes: Wishes | None = None) -> list[Planned]:
        """What the same line again would do."""
        return deciding.decide(self.points, self.output, lambda config: HARDWARE, wishes or Wishes(), {})

    def _sweep(self, name: str, points: tuple[Point, ...]) -> SweepPaths:
        planned = deciding.decide(points, self.output, lambda config: HARDWARE, Wishes(), {})
        facts = {"command": ["zero=stage1"], "folder": str(self.output), "rank_by": "", "on_cluster": False}
        sweep = sweep_record.open_sweep(self.output, name, planned, facts)
        for one, point in zip(planned, points, strict=True):
            if one.decision is RunState.queued:
                attempt = _ended(self.output, point)
                where = {"label": one.label, "attempt": str(attempt.paths.root), "slots": ["0"]}
                sweep_record.tell(sweep, "started", **where)
                sweep_record.tell(sweep, "ended", **where)
        sweep_record.tell(sweep, "end")
        sweep_record.ask(sweep, "detach")
        write_json_atomic(sweep.controller, {"pid": 2**22 + 1, "started": "gone"})
        for file in (sweep.report, sweep.results, sweep.log):
            file.write_text("text\n")
        return sweep


def text(attempt: Path) -> str:
    return (attempt / "state.json").read_text()


def _point(output: Path, stage: int) -> Point:
    point = make_point(make_config(output, stage=stage))
    return replace(point, label=f"stage{stage}")


def _ended(output: Path, point: Point) -> Attempt:
    attempt = new_attempt(output, to_dict(point.config), point.label, HARDWARE)
    paths = attempt.paths
    attempt.move(RunState.starting)
    attempt.move(RunState.running)
    for step in range(1, 4):
        append_event(paths.metrics, step_event(step, 2))
    for rank in range(2):
        record = {"rank": rank, "pid": 2**22 + 1, "started": "gone", "state": "ok", "time": 1.0}
        write_json_atomic(paths.rank_record(rank), record)
        paths.rank_log(rank).write_text("a line\n")
    write_json_atomic(paths.exits, {str(rank): {"code": 0, "time": 1.0} for rank in range(2)})
    if point.config.zero.stage == 3:
        attempt.move(RunState.error, rank=1, message="why")
    else:
        write_json_atomic(paths.result, make_result(point.config, 9000.0 + point.config.zero.stage))
        attempt.move(RunState.ok)
    return attempt


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("scene") / "outputs")


@pytest.fixture
def scene(pristine: Scene) -> Scene:
    pristine.restore()
    return pristine


FILES: dict[str, Callable[[Scene], Path]] = {
    "state.json": lambda scene: scene.first.state,
    "state.json of a failure": lambda scene: scene.failed.state,
    "result.json": lambda scene: scene.first.result,
    "metrics.jsonl": lambda scene: scene.first.metrics,
    "rank0.json": lambda scene: scene.failed.rank_record(0),
    "rank1.log": lambda scene: scene.failed.rank_log(1),
    "exits.json": lambda scene: scene.failed.exits,
    "config.json": lambda scene: scene.first.config,
    "provenance.json": lambda scene: scene.first.provenance,
    "config.json of the point": lambda scene: scene.first.root.parents[1] / "config.json",
    "identity.json": lambda scene: scene.first.root.parents[1] / "identity.json",
    "job.json": lambda scene: scene.first.job,
    "heartbeat.json": lambda scene: scene.first.heartbeat,
    "sweep.json": lambda scene: scene.sweep.sweep,
    "plan.json": lambda scene: scene.sweep.plan,
    "events.jsonl": lambda scene: scene.sweep.events,
    "requests.jsonl": lambda scene: scene.sweep.requests,
    "controller.json": lambda scene: scene.sweep.controller,
    "controller.log": lambda scene: scene.sweep.log,
    "report.md": lambda scene: scene.sweep.report,
    "results.csv": lambda scene: scene.sweep.results,
}
Capture = pytest.CaptureFixture[bytes]
SHORT = ("half", "other digits", "a folder")  # no JSON, contents that changed, no file


def printed(capture: Capture) -> tuple[str, str]:
    """stdout and stderr; `logs` shows the bytes of a log as they are."""
    out, err = capture.readouterr()
    return out.decode(errors="replace"), err.decode(errors="replace")


def go_on(scene: Scene, file: str, corruption: str, capture: Capture, verbs: list[list[str]]) -> None:
    path = FILES[file](scene)
    results = {one: read_json(one) for one in scene.output.glob("points/*/attempts/*/result.json") if one != path}
    CORRUPTIONS[corruption](path)
    for verb in verbs:
        code = cli.main([*verb, "--output", str(scene.output)])
        out, err = printed(capture)
        assert code in (0, 1, 2, 3), out + err
        assert code != 2 or err.startswith("error: "), err
        if verb == ["list"]:
            assert scene.other.name in out
    assert cli.main(["status", scene.other.name, "--output", str(scene.output)]) in (0, 1)
    planned = scene.plan()
    assert [one.decision for one in planned[1:3]] == [RunState.cached] * 2
    for one, point in zip(planned, scene.points, strict=True):
        if one.decision is RunState.queued:
            _ended(scene.output, point)
    again = sweep_record.open_sweep(scene.output, "torn", scene.plan(), {})
    assert again.log.is_file() or not again.log.exists()
    states = [one.state for one in sweep_record.standings(again)]
    assert states == [RunState.cached] * 3 + [RunState.error]
    assert cli.main(["status", "--output", str(scene.output)]) == 1
    assert {one: read_json(one) for one in results} == results


@pytest.mark.parametrize("file", FILES)
def test_the_same_line_goes_on_whatever_became_of_one_file(file: str, scene: Scene, capsysbinary: Capture) -> None:
    for number, corruption in enumerate(SHORT):
        scene.restore()
        go_on(scene, file, corruption, capsysbinary, [list(VERBS[number % len(VERBS)]), ["list"]])


@pytest.mark.full
@pytest.mark.parametrize("corruption", CORRUPTIONS)
@pytest.mark.parametrize("file", FILES)
def test_every_verb_answers_whatever_became_of_one_file(
    file: str, corruption: str, scene: Scene, capsysbinary: Capture, tally: Tally
) -> None:
    go_on(scene, file, corruption, capsysbinary, [list(verb) for verb in VERBS])
    tally("torn records", commands=len(VERBS) + 2, tracebacks=0, wrong_exit_codes=0, results_lost=0)


def mutated(data: bytes, chance: random.Random) -> bytes:
    """One to four small changes at random places: another byte, bytes left out, doubled or moved."""
    for _ in range(chance.randint(1, 4)):
        start = chance.randrange(len(data) + 1)
        end = min(len(data), start + chance.randint(1, 40))
        middle = chance.choice(
            (chance.randbytes(1), b"", data[start:end] * 2, data[start:end][::-1], b"null", b"1e999")
        )
        data = data[:start] + middle + data[end:]
    return data


@pytest.mark.full
@pytest.mark.parametrize("seed", range(8))
def test_random_damage_is_answered(seed: int, scene: Scene, capsysbinary: Capture, tally: Tally) -> None:
    chance = random.Random(seed)
    files = [path for find in FILES.values() if (path := find(scene)).exists()]
    for _ in range(250):
        path = chance.choice(files)
        whole = path.read_bytes()
        path.write_bytes(mutated(whole, chance))
        verb = list(chance.choice(VERBS))
        code = cli.main([*verb, "--output", str(scene.output)])
        assert code in (0, 1, 2, 3), printed(capsysbinary)
        printed(capsysbinary)  # else it grows
        assert len(scene.plan()) == len(scene.points)
        for one in (scene.sweep.report, scene.sweep.results):  # verbs write them
            one.write_text("text\n")
        path.write_bytes(whole)


def test_another_users_output_is_told_in_one_line(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("list", "status"):
        assert cli.main([verb, "--output", str(scene.output)]) in (0, 1)  # imports what it needs, as this user
        capsys.readouterr()
        with as_another_user(scene.output):
            assert cli.main([verb, "--output", str(scene.output)]) == 1
        shown = capsys.readouterr()
        assert shown.out == ""
        assert re.fullmatch(
            r"error: .*: Permission denied; it belongs to another user: give output=FOLDER .*\n", shown.err
        ), shown.err


@contextlib.contextmanager
def as_another_user(output: Path) -> Iterator[None]:
    """Root becomes a user whom nothing belongs to; anybody else loses the right to look into the folder."""
    if os.geteuid() == 0:
        os.seteuid(65534)
    else:
        (output / "sweeps").chmod(0)
    try:
        yield
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
        (output / "sweeps").chmod(0o700)


def test_of_a_huge_log_the_end_is_shown(
    scene: Scene, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verbs, "LOG_BYTES", 4)
    assert cli.main(["logs", "--output", str(scene.output)]) == 0
    out, err = capsys.readouterr()
    assert out == "ine\n"
    assert "rank1.log has 7 bytes, of which the last 4 follow" in err


def test_a_report_that_cannot_be_written_is_still_shown(
    scene: Scene,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(path: Path, text: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(comparison, "write_text_atomic", refused)
    assert cli.main(["report", "--output", str(scene.output)]) == 1  # as ever: one point failed
    assert "stage2" in capsys.readouterr().out
    assert f"warning: {scene.sweep.report} could not be written: Read-only file system" in caplog.text


def test_a_sweep_of_which_no_record_says_so_is_a_clusters_where_its_points_have_jobs(scene: Scene) -> None:
    assert not slurm_sweep.is_on_cluster(scene.sweep)
    scene.sweep.sweep.write_text("{")
    assert not slurm_sweep.is_on_cluster(scene.sweep)
    sweep_record.tell(scene.sweep, "started", label="stage0", attempt=str(scene.first.root), slots=[], job="7")
    assert slurm_sweep.is_on_cluster(scene.sweep)


def test_the_plan_of_an_earlier_version_is_read(scene: Scene) -> None:
    plan = sweep_record.plan_of(scene.sweep)
    scene.sweep.plan.write_text(json.dumps([one.to_dict() for one in plan]))
    assert sweep_record.plan_of(scene.sweep) == plan
    assert sweep_record.open_sweep(scene.output, "torn", plan, {}).root == scene.sweep.root
    assert not list(scene.sweep.root.glob("*.bad"))
    scene.sweep.plan.write_text("[]\n")
    with pytest.raises(BadRecord, match="in place of an object"):
        sweep_record.plan_of(scene.sweep)
