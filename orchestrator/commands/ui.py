"""`zlab ui`: runs MLflow's server on the store of an output folder, on the loopback interface, without telemetry."""

from __future__ import annotations

import os
import socket
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from orchestrator.commands.verb_parser import VerbParser, add_json, verb_parser
from orchestrator.launch.verdict import end_of
from orchestrator.machine import children, processes
from orchestrator.machine.loopback import family, in_url, loopback
from orchestrator.records.run_record import artifacts_path, store_path
from orchestrator.report.screen import Screen
from orchestrator.text.paths import DEFAULT_OUTPUT, OUTPUT, program, shown
from orchestrator.tracking import chart_page, names
from orchestrator.tracking.feed import complete_left_behind

FIRST_PORT = 5000
LOG, LINES_SHOWN = "dashboard.log", 5


def main(argv: Sequence[str]) -> int:
    """The exit code of `zlab ui`. Returns when the server has ended."""
    arguments = parser().parse_args(argv)
    return serve(arguments.output, arguments.port)


def parser() -> VerbParser:
    parser = verb_parser("ui", "Opens the dashboard on the runs of an output folder.")
    default = os.environ.get(OUTPUT, DEFAULT_OUTPUT)
    parser.add_argument("output", type=Path, nargs="?", default=Path(default), help=f"default: {default}")
    parser.add_argument("--port", type=int, default=None, help=f"default: the first free one from {FIRST_PORT}")
    add_json(parser, "ui is a server for a browser; status --json and results.csv have the numbers")
    return parser


def serve(output: Path, port: int | None) -> int:
    """Runs the server until Ctrl-C. 0: Ctrl-C. 1: the server ended unexpectedly. 2: there is no readable store."""
    screen = Screen()
    store = store_path(output.absolute())
    if not store.exists():
        made_by = "a run without tracking=none creates it"
        screen.say(f"error: there is no {shown(store)}: {made_by}, or give the folder of one: {program()} ui FOLDER")
        return 2
    complete_left_behind(output.absolute())
    host = loopback()
    chosen = port or free_port(host)
    try:
        pages = links(store, chosen, host)
    except sqlite3.Error as error:
        advice = "restore a copy, or move it away: the next run creates one, and results are in the records of runs too"
        screen.say(f"error: {shown(store)}: expected a store of MLflow's, found: {error}; {advice}")
        return 2
    for name, link in pages:
        screen.say(f"{name}: {link}")
    log = output.absolute() / LOG
    screen.say(f"The page answers after about 10 s. Ctrl-C ends it. Its log is {shown(log)}.")
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
    quiet["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"  # starts another process, for features that are not used
    return _until_interrupt(server_command(output.absolute(), chosen, host), quiet, log, screen)


def _until_interrupt(command: list[str], environ: Mapping[str, str], log: Path, screen: Screen) -> int:
    """Runs the server in a separate session: only this process gets Ctrl-C, so no traceback reaches the terminal."""
    log.unlink(missing_ok=True)
    # The server's child processes import from the folder /, where nobody puts files.
    process = children.start(command, {**os.environ, **environ}, log, folder="/")
    try:
        with processes.signals_interrupt():
            process.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        processes.end_session(process.pid)
        process.wait()
    for line in end_of(log)[-LINES_SHOWN:]:
        screen.say(line)
    screen.say(f"error: the server ended by itself with code {process.returncode}: see {shown(log)}")
    return 1


def server_command(output: Path, port: int, host: str) -> list[str]:
    """The command that runs the dashboard."""
    stores = ["--backend-store-uri", names.local_uri(output)]
    artifacts = ["--default-artifact-root", artifacts_path(output).as_uri()]
    where = ["--host", host, "--port", str(port), "--workers", "1"]
    return children.words("mlflow", "server", *stores, *artifacts, *where)


def links(store: Path, port: int, host: str) -> list[tuple[str, str]]:
    """Each experiment with the address of its chart page, newest first. Read without importing mlflow."""
    query = "SELECT experiment_id, name FROM experiments WHERE lifecycle_stage = 'active' ORDER BY experiment_id DESC"
    with closing(sqlite3.connect(f"{store.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        experiments = [(number, name) for number, name in connection.execute(query) if name != "Default"]
    page = f"runs?workflowType=machine_learning&viewStateShareKey={chart_page.KEY}&compareRunsMode=CHART"
    return [(name, f"http://{in_url(host)}:{port}/#/experiments/{number}/{page}") for number, name in experiments]


def free_port(host: str) -> int:
    """The first port at or above FIRST_PORT on which nothing listens."""
    for port in range(FIRST_PORT, FIRST_PORT + 100):
        with socket.socket(family(host)) as probe:
            if probe.connect_ex((host, port)) != 0:
                return port
    raise OSError(f"no free port from {FIRST_PORT} to {FIRST_PORT + 99}; choose one with --port")
