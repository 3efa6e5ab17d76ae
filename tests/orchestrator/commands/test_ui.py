"""The `ui` command prints an address, writes the server's output to a file, and ends together with the server."""

from __future__ import annotations

import os
import signal
import socket
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
    assert "/#/experiments/" in shown.out
    assert ("noise" in shown.out + shown.err, shown.err) == (False, "")
    assert (output / dashboard.LOG).read_text() == "noise\n"
    with pytest.raises(ProcessLookupError):
        os.kill(int(began.read_text()), 0)


@pytest.mark.parametrize(("client", "name"), [("", "zlab.localhost"), ("10.0.0.1 22 10.0.0.2 22", "127.0.0.1")])
def test_a_browser_of_this_machine_gets_a_name_at_which_mlflow_opens_no_assistant(
    client: str, name: str, output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    if client:
        monkeypatch.setenv("SSH_CONNECTION", client)
    monkeypatch.setattr(dashboard, "loopback", lambda: "127.0.0.1")
    serve("import os; print(os.environ['MLFLOW_SERVER_ALLOWED_HOSTS'])", monkeypatch)
    assert cli.main(["ui", "--output", str(output), "--port", "5999"]) == 1
    assert f"http://{name}:5999/#/experiments/3/" in capsys.readouterr().out
    assert f"{name}:5999," in (output / dashboard.LOG).read_text()


def test_a_host_for_others_is_served_under_the_names_of_this_machine_with_a_warning(
    output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []
    code = (
        "import os; print(os.environ['MLFLOW_SERVER_ALLOWED_HOSTS'], os.environ['MLFLOW_SERVER_CORS_ALLOWED_ORIGINS'])"
    )
    monkeypatch.setattr(dashboard, "server_command", lambda *words: asked.append(words) or [sys.executable, "-c", code])
    monkeypatch.setattr(dashboard, "own_names", lambda host: ["node7", "fd00::2"])
    monkeypatch.delenv("MLFLOW_SERVER_ALLOWED_HOSTS", raising=False)
    monkeypatch.setenv("MLFLOW_SERVER_CORS_ALLOWED_ORIGINS", "https://mine")
    assert cli.main(["ui", "--output", str(output), "--host", "0.0.0.0", "--port", "5999"]) == 1
    shown = capsys.readouterr().out
    assert [words[2:] for words in asked] == [(5999, "0.0.0.0")]
    assert "http://node7:5999/#/experiments/3/" in shown
    assert "warning: without a password, whoever reaches node7 can read, change and delete these runs" in shown
    assert (output / dashboard.LOG).read_text() == "node7:5999,[fd00::2]:5999,localhost:*,127.0.0.1:* https://mine\n"


@pytest.mark.parametrize(("host", "first"), [("0.0.0.0", "node-7"), ("::", "node-7"), ("10.1.2.3", "10.1.2.3")])
def test_the_first_name_is_the_host_or_this_machines_in_lower_case(
    host: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard.socket, "gethostname", lambda: "Node-7")
    found = dashboard.own_names(host)
    assert (found[0], "node-7" in found, "0.0.0.0" in found) == (first, True, False)
    assert len(set(found)) == len(found)


def test_the_servers_command_has_the_host_and_the_port() -> None:
    words = dashboard.server_command("sqlite:///x", Path("/outputs"), 5999, "0.0.0.0")
    assert words[words.index("--host") :][:4] == ["--host", "0.0.0.0", "--port", "5999"]


def test_a_host_that_is_not_of_this_machine_is_refused(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ui", "--output", str(output), "--host", "192.0.2.77"]) == 2
    assert "--host: expected an address of this machine, or 0.0.0.0 for all of them, found '192.0.2.77'" in (
        capsys.readouterr().err
    )


def test_a_busy_port_is_refused_before_anything_is_shown(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["ui", "--output", str(output), "--port", str(port)]) == 2
    shown = capsys.readouterr()
    assert f"--port {port}: expected a free port of 127.0.0.1; choose another, or leave it out; found: " in shown.err
    assert "http" not in shown.out


def test_several_pages_are_shown_by_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    pages = [dashboard.Page(f"sweep{number}", "3", "key") for number in range(dashboard.PAGES_SHOWN + 2)]
    dashboard._show(pages, "http://127.0.0.1:5000", dashboard.Screen())
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("http://127.0.0.1:5000: runs of sweep0, sweep1, ")
    assert "sweep12" not in first
    assert "ui SWEEP; 2 earlier ones: " in second


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
