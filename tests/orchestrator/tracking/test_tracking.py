"""A real tracker logs runs to MLflow in a real SQLite store, and problems of MLflow do not affect runs."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pwd
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from harness.patience import wait_until
from points import STUB, make_config, make_point
from rich.console import Console
from stub_worker import make_result, step_event

from orchestrator.commands import ui as dashboard
from orchestrator.commands.run import run_point
from orchestrator.config.schema import TrackingKind, to_dict
from orchestrator.records.record_file import append_event, require_json, write_json_atomic
from orchestrator.records.run_record import Attempt, new_attempt, store_path, tracking_path
from orchestrator.records.run_state import RunState
from orchestrator.records.sweep_record import Planned, SweepPaths, open_sweep, tell
from orchestrator.report import comparison
from orchestrator.report.screen import Screen
from orchestrator.tracking import chart_page, followed_run, left, names, process, sync
from orchestrator.tracking import feed as tracking_feed
from orchestrator.tracking.feed import Tracker, complete_left_behind, start_tracker
from orchestrator.tracking.sync import complete_left
from zero_runtime.process_identity import mark

HERE = Path(__file__).parents[1]
SINGLE = "zlab/tiny"  # the experiment of runs in no sweep


class Scene:
    """One output folder with a sweep and its store, and MLflow's own client to inspect the store.

    `tracker`: the one that created the store. A tracker takes seconds to import MLflow, so the first tests share it."""

    tracker: Tracker
    sweep: SweepPaths

    def __init__(self, output: Path, name: str = "zero") -> None:
        self.output = output
        self.config = make_config(output, tracking=TrackingKind.mlflow)
        planned = [
            Planned(label, (f"zero=stage{stage}",), RunState.queued, label, to_dict(self.config))
            for stage, label in enumerate(("good", "failed", "left"))
        ]
        self.sweep = open_sweep(output, name, planned, {"command": ["-m", "zero=stage0,stage1,stage2"]})
        self.experiment = f"zlab/{self.sweep.name}"

    @cached_property
    def client(self) -> Any:
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # read when mlflow is imported
        from mlflow import MlflowClient

        return MlflowClient(f"sqlite:///{store_path(self.output)}")

    def begin(self, label: str) -> Attempt:
        attempt = new_attempt(self.output, to_dict(self.config), label, "cpu")
        tell(self.sweep, "started", label=label, attempt=str(attempt.paths.root), slots=[])
        attempt.move(RunState.starting)
        attempt.move(RunState.running)
        append_event(attempt.paths.metrics, {"event": "ready", "parameters": 1, "data_hash": "c0ffee"})
        append_event(attempt.paths.metrics, {**step_event(1, 2), "time": 1.7e9})
        return attempt

    def run(self, label: str) -> Any:
        """The run of that name in the sweep's experiment, or None."""
        experiment = self.client.get_experiment_by_name(self.experiment)
        if experiment is None:
            return None
        found = self.client.search_runs([experiment.experiment_id], f"attributes.run_name = '{label}'")
        return found[0] if found else None


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    output = tmp_path_factory.mktemp("outputs")
    found = Scene(output)
    tracker = start_tracker(found.config, output, found.sweep)
    tracker.wait_for_store()
    assert store_path(output).exists()
    found.tracker = tracker
    yield found
    tracker.close()


def test_a_run_is_visible_while_it_runs_and_complete_when_it_has_ended(scene: Scene) -> None:
    tracker = scene.tracker
    attempt = scene.begin("good")

    def seen() -> Any:
        run = scene.run("good")
        return run if run is not None and run.data.metrics else None

    live = wait_until(seen)
    assert live.info.status == "RUNNING"
    assert live.data.metrics["train/loss"] == pytest.approx(5.99)
    append_event(attempt.paths.metrics, {**step_event(2, 2), "time": 1.7e9 + 1})
    write_json_atomic(attempt.paths.result, make_result(scene.config))
    attempt.move(RunState.ok)
    wait_until(lambda: scene.run("good").info.status == "FINISHED")
    assert tracker.warnings() == []
    run = scene.run("good")
    history = scene.client.get_metric_history(run.info.run_id, "throughput/tokens_per_second")
    assert [(one.step, one.value) for one in history] == [(1, 9401.0), (2, 9402.0)]
    assert run.data.metrics["tokens_per_second"] == 9412.0
    assert run.data.params["zero.stage"] == "2"
    assert run.data.params["precision.param"] == "bf16"
    assert run.data.params["zero"] == "stage0", "the setting that varies, as it was typed"
    wanted = {names.OUTCOME: "ok", names.SWEEP: scene.sweep.name, names.POINT: attempt.point, names.KIND: "point"}
    assert wanted.items() <= run.data.tags.items()
    artifacts = {one.path for one in scene.client.list_artifacts(run.info.run_id)}
    assert {"config.json", "result.json"} <= artifacts


def test_a_failed_run_ends_as_failed_and_a_run_whose_command_died_ends_as_killed(scene: Scene) -> None:
    tracker = scene.tracker
    failed = scene.begin("failed")
    failed.move(RunState.error, rank=1, message="why")
    disown(scene.begin("left"))
    comparison.write(scene.sweep, with_png=True)
    tracker.close()  # closes its stdin, as a kill of the command does
    assert tracker.warnings() == []
    assert list(tracking_path(scene.output).iterdir()) == []
    assert (scene.run("failed").info.status, scene.run("left").info.status) == ("FAILED", "KILLED")
    assert scene.run("failed").data.tags[names.OUTCOME] == "error"
    assert "tokens_per_second" not in scene.run("failed").data.metrics
    summary = scene.run(f"summary of {scene.sweep.name}")
    assert summary.info.status == "FINISHED"
    assert "| good |" in summary.data.tags[names.NOTE]
    assert summary.data.tags[names.COMMAND] == "-m zero=stage0,stage1,stage2"
    assert summary.data.tags[names.COUNTS] == "1 ok, 1 error, 1 lost"
    assert summary.data.params == {"zero": "stage0, stage1, stage2"}
    found = {one.path for one in scene.client.list_artifacts(summary.info.run_id)}
    assert found == {"report.html", "report.png", "report.md", "results.csv", "pictures"}
    described = scene.client.get_experiment_by_name(scene.experiment).tags[names.NOTE]
    assert described.startswith("`-m zero=stage0,stage1,stage2`: 1 ok, 1 error, 1 lost")


def disown(attempt: Attempt) -> None:
    """Changes the record as if the process that owns the attempt had ended."""
    facts = require_json(attempt.paths.state)
    write_json_atomic(attempt.paths.state, {**facts, "owner": {**facts["owner"], "started": "0@an earlier boot"}})


def die(output: Path, root: Path) -> Path:
    """Changes the file of a tracker as if its command had ended."""
    (note,) = tracking_path(output).glob(f"*.{hashlib.sha256(str(root).encode()).hexdigest()[:8]}")
    dead = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    gone = note.with_name(note.name.replace(mark(), mark(dead.pid)))
    dead.kill()
    dead.wait()
    return note.rename(gone)


def uri_of(scene: Scene) -> str:
    return f"sqlite:///{store_path(scene.output)}"


def recorded(scene: Scene, label: str, state: RunState) -> Attempt:
    """An attempt that ended without being reported to MLflow."""
    attempt = new_attempt(scene.output, to_dict(scene.config), label, "cpu")
    attempt.move(RunState.starting)
    for step in (1, 2):
        append_event(attempt.paths.metrics, {**step_event(step, 2), "time": 1.7e9 + step})
    write_json_atomic(attempt.paths.result, make_result(scene.config))
    attempt.move(state)
    return attempt


def assert_is_whole(scene: Scene, label: str) -> None:
    """The run matches the records, and nothing is logged twice."""
    run = scene.run(label)
    assert (run.info.status, run.data.tags[names.OUTCOME]) == ("FINISHED", "ok")
    assert run.data.metrics["tokens_per_second"] == 9412.0
    history = scene.client.get_metric_history(run.info.run_id, "train/loss")
    assert [one.step for one in history] == [1, 2]
    assert {"config.json", "result.json"} <= {one.path for one in scene.client.list_artifacts(run.info.run_id)}
    experiment = scene.client.get_experiment_by_name(scene.experiment).experiment_id
    assert len(scene.client.search_runs([experiment], f"attributes.run_name = '{label}'")) == 1


@pytest.mark.parametrize("begun", [False, True])
def test_what_a_dead_tracker_left_is_completed_once_and_what_a_living_one_follows_is_not(
    scene: Scene, begun: bool
) -> None:
    scene = Scene(scene.output, f"dead-{begun}")
    attempt = recorded(scene, "left", RunState.ok)
    tell(scene.sweep, "started", label="left", attempt=str(attempt.paths.root), slots=[])
    left.note(scene.output, scene.sweep.root)
    assert left.behind(scene.output) == [], "this process lives"
    note = die(scene.output, scene.sweep.root)
    follower = process.Follower(uri_of(scene), scene.output, scene.sweep, 1)
    if begun:
        follower.tick()
    assert left.behind(scene.output) == [note]
    complete_left(scene.output)
    assert_is_whole(scene, "left")
    assert not note.exists()
    follower.finish()  # the dead command's own tracker does it only now
    assert_is_whole(scene, "left")


def test_completion_is_tried_three_times_if_the_store_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("the store is away")

    scene = Scene(tmp_path)
    monkeypatch.setattr(sync, "MlflowStore", refuse)
    attempt = recorded(scene, "refused", RunState.ok)
    left.note(tmp_path, attempt.paths.root)
    die(tmp_path, attempt.paths.root)
    for count in (1, 1, 1, 1, 0):
        assert len(left.behind(tmp_path)) == count
        complete_left(tmp_path)
    assert capsys.readouterr().err.count(str(attempt.paths.root)) == 3


@pytest.mark.full
def test_after_a_kill_of_the_tracker_nothing_is_missing_or_duplicated(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    tracker = start_tracker(scene.config, scene.output, scene.sweep)
    ended, live = scene.begin("good"), scene.begin("failed")
    wait_until(lambda: store_path(tmp_path).exists() and scene.run("failed") is not None)
    assert tracker.pid is not None
    os.kill(tracker.pid, signal.SIGKILL)
    for attempt in (ended, live):
        append_event(attempt.paths.metrics, {**step_event(2, 2), "time": 1.7e9 + 1})
        write_json_atomic(attempt.paths.result, make_result(scene.config))
        attempt.move(RunState.ok)
    assert any("was killed by SIGKILL" in one for one in wait_until(tracker.warnings))
    tracker.close()
    assert tracker.warnings() == []
    die(tmp_path, scene.sweep.root)
    assert complete_left_behind(tmp_path).wait() == 0  # type: ignore[union-attr]
    assert_is_whole(scene, "good")
    assert_is_whole(scene, "failed")
    assert list(tracking_path(tmp_path).iterdir()) == []


def test_a_summary_that_a_killed_tracker_began_is_completed_by_its_successor(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = open_sweep(scene.output, "cut", [Planned("one", ("zero=stage1",), RunState.pruned)], {"command": ["-m"]})
    experiment = f"zlab/{other.name}"
    first, successor = (process.Follower(uri_of(scene), scene.output, other, os.getpid()) for _ in range(2))

    def killed(run: str, path: str, *where: str) -> None:
        raise OSError("here it was killed")

    def summaries() -> list[Any]:
        found = scene.client.get_experiment_by_name(experiment)
        return list(scene.client.search_runs([found.experiment_id], f"attributes.run_name = 'summary of {other.name}'"))

    comparison.write(other)
    assert first.open()
    monkeypatch.setattr(first._store.client, "log_artifact", killed)  # type: ignore[union-attr]
    first.finish()
    assert [one.info.status for one in summaries()] == ["RUNNING"]
    successor.finish()
    (summary,) = summaries()
    assert summary.info.status == "FINISHED"
    assert "report.md" in [one.path for one in scene.client.list_artifacts(summary.info.run_id)]


def test_a_tracker_that_dies_is_told_once() -> None:
    words = [sys.executable, "-c", "raise SystemExit(3)"]
    tracker = Tracker(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE), makes_store=True)
    tracker.wait_for_store()
    (told,) = tracker.warnings()
    assert told.startswith("MLflow: its process ended with exit code 3; the next command completes what is missing.")
    tracker.close()
    assert tracker.warnings() == []


def test_a_user_without_a_name_is_recorded_by_user_id(monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr("getpass.getuser", nameless)
    assert followed_run.command_tags(os.getpid())["mlflow.user"] == str(os.getuid())


def test_a_user_without_a_home_has_one_in_the_processes_of_mlflow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """MLflow asks for the home when it is imported."""
    started: list[dict[str, str]] = []

    def unknown(_: int) -> None:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tracking_feed.children, "start", lambda _command, environ, *_, **__: started.append(environ))
    monkeypatch.setattr(dashboard, "_until_interrupt", lambda _command, environ, *_: started.append(environ) or 0)
    with pytest.raises(RuntimeError):
        Path.home()
    tracking_feed.start_sync(tmp_path)
    monkeypatch.setattr(dashboard, "_wrong_store", lambda _: "")
    monkeypatch.setattr(dashboard, "links", lambda _: [])
    store_path(tmp_path).touch()
    dashboard.serve(tmp_path, 5000)
    assert [environ["HOME"] for environ in started] == [str(tmp_path)] * 2
    monkeypatch.setenv("HOME", "/someone")
    assert "HOME" not in tracking_feed.mlflow_environment(tmp_path)


def test_the_sweep_has_its_page_and_the_dashboard_links_to_it(scene: Scene) -> None:
    experiment = scene.client.get_experiment_by_name(scene.experiment)
    view = json.loads(experiment.tags[chart_page.tag_of(scene.sweep.name)])
    sections = {one["uuid"] for one in view["compareRunSections"]}
    assert {one["metricSectionId"] for one in view["compareRunCharts"]} == sections
    assert f"tags.`zlab.sweep` = '{scene.sweep.name}'" in view["searchFilter"]
    assert "params.`zero`" in view["selectedColumns"]
    page = next(one for one in dashboard.links(store_path(scene.output)) if one.name == scene.sweep.name)
    address = page.address("http://127.0.0.1:5000")
    assert f"/experiments/{experiment.experiment_id}/runs" in address
    assert f"viewStateShareKey=zlab-{scene.sweep.name}" in address


@pytest.mark.full
def test_a_broken_store_causes_a_warning_and_the_run_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    store_path(tmp_path).write_text("this is no database")
    out = io.StringIO()
    point = make_point(make_config(tmp_path, tracking=TrackingKind.mlflow))
    screen = Screen(Console(file=out, width=200))
    assert run_point(point, entry=STUB, screen=screen) == 0
    assert "warning: MLflow: " in out.getvalue()
    assert "tracking=none" in out.getvalue()
    assert list(tmp_path.glob("points/*/attempts/01/result.json"))


def test_without_tracking_no_process_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **named: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    attempt = new_attempt(tmp_path, to_dict(make_config(tmp_path)), "a", "cpu")
    tracker = start_tracker(make_config(tmp_path), tmp_path, attempt.paths)
    tracker.wait_for_store()
    tracker.close()
    assert tracker.warnings() == []


def test_the_commands_process_imports_neither_torch_nor_mlflow_nor_numpy() -> None:
    heavy = "{'torch', 'mlflow', 'numpy', 'transformers'}"
    text = f"import sys, orchestrator.commands.run, orchestrator.wings.torchrun.join; print({heavy} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=HERE.parents[1])
    assert answer.stdout.strip() == "set()"


class Away:
    """A client whose store answers nothing until it is back; then that of a real store."""

    def __init__(self, client: Any) -> None:
        self.client, self.is_back = client, False

    def __getattr__(self, name: str) -> Any:
        if not self.is_back:
            raise OSError("connection refused")
        return getattr(self.client, name)


def test_what_a_store_that_is_away_did_not_take_is_written_when_it_is_back(
    tmp_path: Path, scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt = recorded(scene, "away", RunState.ok)
    follower = process.Follower(uri_of(scene), scene.output, attempt.paths, os.getpid())
    assert follower.open()
    store: Any = follower._store
    store.client = away = Away(store.client)
    for _ in range(2):
        follower.tick()
    assert capsys.readouterr().out.count("connection refused") == 1, "one warning"
    away.is_back = True
    follower.tick()
    experiment = scene.client.get_experiment_by_name(SINGLE).experiment_id
    (run,) = scene.client.search_runs([experiment])
    assert (run.info.run_name, run.info.status, run.data.tags[names.OUTCOME]) == ("away", "FINISHED", "ok")
