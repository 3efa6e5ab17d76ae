"""A database of another version is told apart before a sweep starts, in one line, and is not touched."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from points import make_config, make_point

from orchestrator import cli
from orchestrator.commands.run import run_point
from orchestrator.config.schema import TrackingKind
from orchestrator.config.strict import Refusal
from orchestrator.records.run_record import store_path
from orchestrator.text.extras import install_line
from orchestrator.tracking import names, schema_version
from orchestrator.tracking.store import MlflowStore, StoreError

EARLIER = "f5a4f2784254"  # of MLflow 2.8


def write_store(output: Path, version: str) -> bytes:
    """A database of that version, which has fewer tables than the installed MLflow expects."""
    with closing(sqlite3.connect(store_path(output))) as connection, connection:
        connection.execute("CREATE TABLE alembic_version (version_num TEXT)")
        connection.execute("CREATE TABLE experiments (experiment_id INTEGER, name TEXT, lifecycle_stage TEXT)")
        connection.execute("INSERT INTO alembic_version VALUES (?)", (version,))
    return store_path(output).read_bytes()


def test_the_newest_version_is_the_one_that_mlflow_expects() -> None:
    from mlflow.store.db.utils import _get_latest_schema_revision

    assert schema_version._newest(schema_version._known()) == _get_latest_schema_revision()


@pytest.mark.parametrize(("version", "advice"), [(EARLIER, "mlflow db upgrade"), ("0123456789ab", "a later MLflow")])
def test_nothing_starts_and_the_database_is_not_touched(
    tmp_path: Path, version: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = write_store(tmp_path, version)
    line = ["-m", "zero=stage1,stage2", "resources.device=cpu", "data=synthetic", f"output={tmp_path}"]
    assert cli.main(line) == 2
    (told,) = (text for text in capsys.readouterr().err.splitlines() if text.startswith("error: "))
    assert f"its tables have version {version}, the installed MLflow" in told
    assert advice in told
    assert "tracking=none" in told
    with pytest.raises(Refusal, match=version):
        run_point(make_point(make_config(tmp_path, tracking=TrackingKind.mlflow)))
    with pytest.raises(StoreError, match=version):
        MlflowStore(names.local_uri(tmp_path), tmp_path)
    assert cli.main(["ui", "--output", str(tmp_path)]) == 2
    assert store_path(tmp_path).read_bytes() == before
    assert not list(tmp_path.glob("points/*")), "nothing was started"


def test_stores_without_a_version_and_servers_are_left_to_mlflow(tmp_path: Path) -> None:
    assert schema_version.problem(names.local_uri(tmp_path)) is None
    store_path(tmp_path).write_text("this is no database")
    assert schema_version.problem(names.local_uri(tmp_path)) is None
    assert schema_version.problem("http://127.0.0.1:9") is None


@pytest.mark.parametrize("uri", ["postgresql+psycopg2://me:secret@db/runs", "postgresql+nodriver://me:secret@db/runs"])
def test_a_missing_driver_is_told_without_the_password(uri: str) -> None:
    told = schema_version.problem(uri)
    assert told is not None
    assert "fix: tracking.uri=postgresql+psycopg://me:***@db/runs" in told or install_line("postgres") in told
    assert "secret" not in told
