"""A real MLflow server on PostgreSQL: a sweep survives its restarts, and a browser shows the sweep's page."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness.browser import CHROMIUM, WHY_NOT, Browser
from harness.mlflow_server import MlflowServer, why_not
from harness.patience import wait_until
from made_sweep import write_sweep
from points import make_config, make_point
from store_contents import contents
from sweep_runs import the_sweep

from orchestrator import cli
from orchestrator.commands.run import run_point
from orchestrator.commands.ui import Page
from orchestrator.config.schema import TrackingKind
from orchestrator.config.strict import Refusal
from orchestrator.records import sweep_record
from orchestrator.tracking import chart_page, schema_version

pytestmark = [pytest.mark.full, pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")]

HERE = Path(__file__).parents[1]
SWEEP = """
import sys
sys.path[:0] = {path!r}
from dataclasses import replace
from pathlib import Path
from orchestrator.commands.sweep import SweepRequest, run_sweep
from orchestrator.config.schema import Tracking, TrackingKind
from orchestrator.machine import hardware
from points import STUB
from sweep_runs import points
tracking = Tracking(TrackingKind.mlflow, {uri!r})
found = [replace(one, config=replace(one.config, tracking=tracking)) for one in points(Path({output!r}), {micros})]
request = SweepRequest("batch", tuple(found), ("-m", "batch.micro=1,2"), predicts=False, entry=STUB)
raise SystemExit(run_sweep(request, hardware.detect()))
"""
# MLflow's own page asks for the user of a server that has none.
EXPECTED = "users/current"


@pytest.fixture(scope="module")
def server() -> Iterator[MlflowServer]:
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # read when mlflow is imported
    folder = Path(tempfile.mkdtemp(prefix="zlab-server"))  # PostgreSQL's user must be able to enter it
    folder.chmod(0o755)
    running = MlflowServer(folder)
    try:
        running.start()
        yield running
    finally:
        running.close()
        shutil.rmtree(folder)


def client_of(server: MlflowServer) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(server.address)


def start_sweep(server: MlflowServer, output: Path, micros: list[int]) -> subprocess.Popen[str]:
    path = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
    program = SWEEP.format(path=path, uri=server.address, output=str(output), micros=micros)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "STUB_STEP_S": "1.5"}
    return subprocess.Popen([sys.executable, "-c", program], env=environ, stdout=subprocess.PIPE, text=True)


def outcomes(server: MlflowServer, sweep: str) -> dict[str, tuple[str, int]]:
    """The status of each run of the sweep, and the number of steps in its history."""
    found = {key: run for key, run in contents(client_of(server)).items() if key.startswith(f"zlab/{sweep}: ")}
    return {
        key.rpartition(" ")[0].partition(": ")[2]: (run["status"], len(run["metrics"].get("train/loss", [])))
        for key, run in found.items()
    }


def test_a_sweep_survives_restarts_of_the_server_and_sync_adds_what_is_missing_once(
    server: MlflowServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = start_sweep(server, tmp_path, [1, 2, 4])
    wait_until(lambda: sweep_record.all_sweeps(tmp_path))
    sweep = the_sweep(tmp_path)

    def live() -> bool:
        found = client_of(server).search_runs(
            [one.experiment_id for one in client_of(server).search_experiments()], "attributes.status = 'RUNNING'"
        )
        return any("train/loss" in run.data.metrics for run in found)

    wait_until(live, every_s=0.5)  # histories are live
    server.stop()  # in the middle of the sweep
    wait_until(lambda: any(one.state.measured for one in sweep_record.standings(sweep)))
    server.start()
    wait_until(lambda: all(one.state.measured for one in sweep_record.standings(sweep)))
    server.stop()  # and again before its end is written
    out, _ = command.communicate()
    assert command.returncode == 0, out
    server.start()
    capsys.readouterr()
    assert cli.main(["sync", "--output", str(tmp_path)]) == 0
    expected = {f"micro{micro}": ("FINISHED", 6) for micro in (1, 2, 4)}
    assert outcomes(server, sweep.name) == expected | {f"summary of {sweep.name}": ("FINISHED", 0)}
    there = contents(client_of(server))
    capsys.readouterr()
    assert cli.main(["sync", "--output", str(tmp_path)]) == 0
    assert "nothing was missing" in capsys.readouterr().out
    assert contents(client_of(server)) == there


def test_a_database_of_another_version_is_refused_and_stays_as_it_is(server: MlflowServer, tmp_path: Path) -> None:
    import sqlalchemy

    uri = server.database.replace("/postgres", "/earlier")
    admin = sqlalchemy.create_engine(server.database, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(sqlalchemy.text("CREATE DATABASE earlier"))
    earlier = sqlalchemy.create_engine(uri, isolation_level="AUTOCOMMIT")
    with earlier.connect() as connection:
        connection.execute(sqlalchemy.text("CREATE TABLE alembic_version (version_num TEXT)"))
        connection.execute(sqlalchemy.text("INSERT INTO alembic_version VALUES ('f5a4f2784254')"))
    config = make_config(tmp_path, tracking=TrackingKind.mlflow)
    point = make_point(replace(config, tracking=replace(config.tracking, uri=uri)))
    with pytest.raises(Refusal, match="its tables have version f5a4f2784254"):
        run_point(point)
    assert schema_version.problem(server.database) is None
    with earlier.connect() as connection:
        tables = connection.execute(sqlalchemy.text("SELECT tablename FROM pg_tables WHERE schemaname = 'public'"))
        assert [row[0] for row in tables] == ["alembic_version"]


@pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)
def test_the_page_shows_speed_memory_loss_and_settings_of_thirty_points(server: MlflowServer, tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, 30, failed=[29])
    assert cli.main(["sync", sweep.name, "--output", str(tmp_path), "--uri", server.address]) == 0
    experiment = client_of(server).get_experiment_by_name(f"zlab/{sweep.name}")
    page = Page(sweep.name, experiment.experiment_id, chart_page.key_of(sweep.name))
    labels = [point.label for point in sweep_record.plan_of(sweep)]
    with Browser(1600, 3000) as browser:
        browser.open(page.address(server.address))
        browser.wait_for("document.querySelectorAll('.plotly .barlayer .point').length >= 4 * 29")
        browser.wait_for("document.querySelectorAll('.plotly .scatterlayer .point').length >= 29")
        browser.wait_for("document.querySelectorAll('.plotly').length >= 5")
        text = browser.text()
        assert "share key is invalid" not in text
        for title in ("Speed, memory and loss", "Speed against memory", "Settings", "During the run", "train/loss"):
            assert title in text
        for metric in ("tokens_per_second", "peak_mib", "states_measured_mib"):
            assert metric in text
        assert [label for label in labels[:29] if label not in text] == []
        assert f"summary of {sweep.name}" not in text, "the summary is not among the points"
        assert [error for error in browser.errors if EXPECTED not in error] == []
        assert {url for url in browser.requests if not url.startswith((server.address, "data:", "blob:"))} == set()
