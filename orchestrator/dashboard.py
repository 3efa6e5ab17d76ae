"""Opens MLflow's own server on the store of an output folder, on the loopback interface, without telemetry."""

from __future__ import annotations

import argparse
import os
import socket
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from orchestrator import chart_view
from orchestrator.loopback import family, in_url, loopback
from orchestrator.paths import DEFAULT_OUTPUT, OUTPUT, program, shown
from orchestrator.record import artifacts_path, store_path
from orchestrator.screen import Screen

FIRST_PORT = 5000


def main(argv: Sequence[str]) -> int:
    """The exit code of `zlab ui`, which otherwise ends with the server."""
    about = "Opens the dashboard on the runs of an output folder."
    parser = argparse.ArgumentParser(prog=f"{program()} ui", description=about)
    default = os.environ.get(OUTPUT, DEFAULT_OUTPUT)
    parser.add_argument("output", type=Path, nargs="?", default=Path(default), help=f"default: {default}")
    parser.add_argument("--port", type=int, default=None, help=f"default: the first free one from {FIRST_PORT}")
    asked = parser.parse_args(argv)
    return serve(asked.output, asked.port)


def serve(output: Path, port: int | None) -> int:
    """Becomes the server, until Ctrl-C; 2 where there is no store yet."""
    screen = Screen()
    store = store_path(output.absolute())
    if not store.exists():
        made_by = "a run without tracking=none makes it"
        screen.say(f"error: there is no {shown(store)}: {made_by}, or give the folder of one: {program()} ui FOLDER")
        return 2
    host = loopback()
    chosen = port or free_port(host)
    for name, link in links(store, chosen, host):
        screen.say(f"{name}: {link}")
    screen.say("The page answers after about 10 s. Ctrl-C ends it.")
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
    quiet["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"  # a process more, for things that we do not use
    command = server_command(output.absolute(), chosen, host)
    os.execve(command[0], command, {**os.environ, **quiet})
    return 1  # never reached: the process is the server now


def server_command(output: Path, port: int, host: str) -> list[str]:
    """What runs the dashboard."""
    stores = ["--backend-store-uri", f"sqlite:///{store_path(output)}"]
    artifacts = ["--default-artifact-root", artifacts_path(output).as_uri()]
    where = ["--host", host, "--port", str(port), "--workers", "1"]
    return [sys.executable, "-m", "mlflow", "server", *stores, *artifacts, *where]


def links(store: Path, port: int, host: str) -> list[tuple[str, str]]:
    """Each experiment and the address of its chart page, newest first. Read without importing mlflow."""
    asked = "SELECT experiment_id, name FROM experiments WHERE lifecycle_stage = 'active' ORDER BY experiment_id DESC"
    with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as connection:
        found = [(number, name) for number, name in connection.execute(asked) if name != "Default"]
    page = f"runs?workflowType=machine_learning&viewStateShareKey={chart_view.KEY}&compareRunsMode=CHART"
    return [(name, f"http://{in_url(host)}:{port}/#/experiments/{number}/{page}") for number, name in found]


def free_port(host: str) -> int:
    """The first port from FIRST_PORT on that nobody listens on."""
    for port in range(FIRST_PORT, FIRST_PORT + 100):
        with socket.socket(family(host)) as probe:
            if probe.connect_ex((host, port)) != 0:
                return port
    raise OSError(f"no free port from {FIRST_PORT} to {FIRST_PORT + 99}; say which with --port")
