"""The `ui` command prints an address, writes the server's output to a file, and ends together with the server."""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
import threading
import time
from pathlib import Path

import pytest

from orchestrator import cli
from orchestrator.commands import ui as dashboard
from orchestrator.records.run_record import store_path


@pytest.fixture
def output(tmp_path: Path) -> Path:
    with sqlite3.connect(store_path(tmp_path)) as store:
        store.execute("CREATE TABLE experiments (experiment_id INTEGER, name TEXT, lifecycle_stage TEXT)")
        store.execute("CREATE TABLE experiment_tags (key TEXT, value TEXT, experiment_id INTEGER)")
        store.execute("INSERT INTO experiments VALUES (3, 'zlab/tiny', 'active')")
    return tmp_path


def serve(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces MLflow's server with a Python process that runs this code."""
    monkeypatch.setattr(dashboard, "server_command", lambda *_: [sys.executable, "-S", "-c", code])


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_or_termination_ends_the_server_quietly_with_code_0(
    by: signal.Signals, output: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code = f"import os, time; print('noise', flush=True); open({str(output / 'pid')!r}, 'w').write(str(os.getpid()))"
    serve(f"{code}\ntime.sleep(600)", monkeypatch)
    began = output / "pid"

    def interrupt() -> None:
        while not (began.exists() and began.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), by)

    threading.Thread(target=interrupt, daemon=True).start()
    assert cli.main(["ui", "--output", str(output)]) == 0
    shown = capfd.readouterr()
    assert "http://127.0.0.1:" in shown.out
    assert ("noise" in shown.out + shown.err, shown.err) == (False, "")
    assert (output / dashboard.LOG).read_text() == "noise\n"
    with pytest.raises(ProcessLookupError):
        os.kill(int(began.read_text()), 0)


@pytest.mark.parametrize("content", [b"", b"SQLite format 3\0" + b"\xff" * 4096, b"text"])
def test_a_file_that_is_not_an_mlflow_store_is_refused_and_left_unchanged(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store_path(tmp_path).write_bytes(content)
    assert cli.main(["ui", "--output", str(tmp_path)]) == 2
    assert "mlflow.db: expected a store of MLflow's, found: " in capsys.readouterr().err
    assert store_path(tmp_path).read_bytes() == content


def test_a_server_that_ends_by_itself_is_an_error_with_its_last_output(
    output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve("raise SystemExit('the port is taken')", monkeypatch)
    assert cli.main(["ui", "--output", str(output)]) == 1
    shown = capsys.readouterr().out
    assert "the port is taken" in shown
    assert "the server ended by itself with code 1" in shown
