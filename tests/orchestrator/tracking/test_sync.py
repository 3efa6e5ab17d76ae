"""`sync` writes what a store lacks, from the records alone, a second time nothing; kept points are marked copies."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_sweep import write_sweep
from points import make_config
from store_contents import contents
from stub_worker import make_result, step_event

from orchestrator import cli
from orchestrator.config.schema import TrackingKind, to_dict
from orchestrator.machine.processes import started
from orchestrator.records import sweep_record
from orchestrator.records.record_file import append_event, write_json_atomic
from orchestrator.records.run_record import new_attempt
from orchestrator.records.run_state import RunState
from orchestrator.records.sweep_record import SweepPaths
from orchestrator.tracking import names
from orchestrator.tracking.store import MlflowStore
from orchestrator.tracking.sync import SINGLE, Synced, sync

EARLIER = "cc1f77228345"  # a version of the tables between the first and the newest


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SweepPaths]:
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # read when mlflow is imported
    output = tmp_path_factory.mktemp("outputs")
    return output, write_sweep(output, 4, failed=[3])


def client_of(output: Path) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(names.local_uri(output))


def done(output: Path, *sweeps: SweepPaths) -> dict[str, Synced]:
    lines = list(sync(output, names.local_uri(output), sweeps))
    assert not [line for line in lines if line.failed]
    return {line.what: line for line in lines}


@pytest.mark.full
def test_a_second_sync_adds_nothing(made: tuple[Path, SweepPaths]) -> None:
    output, sweep = made
    first = done(output)[sweep.name]
    assert (first.added, first.completed) == (5, 0), "three points that were measured, one that failed, the summary"
    there = contents(client_of(output))
    assert [line.added + line.completed for line in done(output).values()] == [0, 0]
    assert contents(client_of(output)) == there
    points = [run["tags"] for run in there.values() if run["tags"][names.KIND] == "point"]
    assert len({tags[names.COLOUR] for tags in points}) == len(points)
    steps = [len(run["metrics"]["train/loss"]) for run in there.values() if "train/loss" in run["metrics"]]
    assert steps == [30, 30, 30]


def test_a_run_that_the_store_lost_or_has_half_is_completed(made: tuple[Path, SweepPaths]) -> None:
    output, sweep = made
    done(output)
    client = client_of(output)
    runs = [key for key in contents(client) if sweep.name in key and "summary" not in key]
    client.delete_run(runs[0].split()[-1])
    client.update_run(runs[1].split()[-1], status="RUNNING")
    again = done(output)[sweep.name]
    assert (again.added, again.completed) == (1, 1)


def test_a_kept_answer_is_a_marked_copy_with_the_label_that_it_has_in_this_sweep(made: tuple[Path, SweepPaths]) -> None:
    output, first = made
    kept = next(point for point in sweep_record.standings(first) if point.state is RunState.ok)
    assert kept.attempt is not None
    planned = replace(
        kept.planned,
        label="mb4",
        overrides=("batch.micro=4",),
        decision=RunState.cached,
        attempt=str(kept.attempt.root),
    )
    other = replace(planned, label="mb8", overrides=("batch.micro=8",), decision=RunState.pruned, attempt="", point="")
    sweep = sweep_record.open_sweep(output, "micro", [planned, other], {"command": ["-m", "batch.micro=4,8"]})
    assert done(output, sweep)[sweep.name].added == 2
    runs = {key: run for key, run in contents(client_of(output)).items() if key.startswith(f"zlab/{sweep.name}: mb4")}
    ((key, run),) = runs.items()
    assert f"zlab/{sweep.name}: mb4 (reused)" in key
    assert len(run["tags"][names.KEPT]) == len("2026-11-23")
    assert run["params"]["batch.micro"] == "2" or run["params"]["batch.micro"] == "4"
    assert run["metrics"]["tokens_per_second"]


def test_a_sweep_that_runs_is_left_to_its_tracker(made: tuple[Path, SweepPaths]) -> None:
    output, sweep = made
    write_json_atomic(sweep.controller, {"pid": os.getpid(), "started": started(os.getpid())})
    try:
        line = done(output, sweep)[sweep.name]
        assert "runs, and its own tracker writes it" in line.left
        assert line.experiment, "so that its page can be opened"
    finally:
        sweep.controller.unlink()


def test_runs_in_no_sweep_are_written_too(tmp_path: Path) -> None:
    config = make_config(tmp_path, tracking=TrackingKind.mlflow)
    attempt = new_attempt(tmp_path, to_dict(config), "alone", "cpu")
    attempt.move(RunState.starting)
    append_event(attempt.paths.metrics, {**step_event(1, 0), "time": 1.7e9})
    write_json_atomic(attempt.paths.result, make_result(config))
    attempt.move(RunState.ok)
    assert [done(tmp_path)[SINGLE].added for _ in range(2)] == [1, 0]
    (key,) = contents(client_of(tmp_path))
    assert key.startswith("zlab/tiny: alone ")


def test_a_store_that_cannot_be_opened_is_said_and_other_sweeps_are_written(made: tuple[Path, SweepPaths]) -> None:
    output, sweep = made
    lines = list(sync(output, "postgresql+psycopg://nobody@127.0.0.1:9/none", [sweep]))
    assert [line.failed for line in lines] == [True]
    assert "does not answer" in lines[0].left


def test_a_store_whose_creation_is_interrupted_is_created_when_it_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from alembic import command

    upgrade = command.upgrade

    def interrupted(config: Any, to: str) -> None:
        upgrade(config, EARLIER)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(command, "upgrade", interrupted)
        with pytest.raises(KeyboardInterrupt):
            MlflowStore(names.local_uri(tmp_path), tmp_path)
    assert MlflowStore(names.local_uri(tmp_path), tmp_path).experiment("again")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mlflow.lock", "mlflow.db"]


@pytest.mark.parametrize(
    ("version", "advice"), [(EARLIER, ""), (None, "; try again")], ids=["another version", "no answer"]
)
def test_sync_says_how_many_runs_may_be_missing_and_to_try_again_if_it_can_help(
    version: str | None, advice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_sweep(tmp_path, 4, failed=[3])
    uri = "postgresql+psycopg://nobody@127.0.0.1:9/none"
    if version is not None:
        uri = names.local_uri(tmp_path)
        with closing(sqlite3.connect(tmp_path / "mlflow.db")) as connection, connection:
            connection.execute("CREATE TABLE alembic_version (version_num TEXT)")
            connection.execute("INSERT INTO alembic_version VALUES (?)", (version,))
    assert cli.main(["sync", "--output", str(tmp_path), "--uri", uri]) == 1
    told = capsys.readouterr().out.splitlines()[-1]
    assert told == f"sync: nothing was written; up to 5 runs may be missing{advice}"
