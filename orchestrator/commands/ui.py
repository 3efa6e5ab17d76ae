"""`zlab ui`: the prepared page of a sweep in MLflow, whose server runs without telemetry.

It listens on the loopback interface, or on another one where that is asked for. A store that is a server has its own:
only the addresses are printed.
"""

from __future__ import annotations

import os
import socket
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import psutil

from orchestrator.commands import sync
from orchestrator.commands.named_sweep import find_sweep
from orchestrator.commands.verb_parser import VerbParser, add_json, add_output, verb_parser, with_flags
from orchestrator.config.schema import from_dict
from orchestrator.config.strict import Refusal
from orchestrator.exit_codes import FAILED, OK
from orchestrator.launch.verdict import end_of
from orchestrator.machine import children, processes
from orchestrator.machine.loopback import family, in_url, loopback
from orchestrator.records.record_file import BadRecord
from orchestrator.records.run_record import artifacts_path, store_path
from orchestrator.records.sweep_record import SweepPaths, all_sweeps, plan_of
from orchestrator.report.screen import Screen
from orchestrator.text.paths import program, shown
from orchestrator.tracking import chart_page, names, schema_version
from orchestrator.tracking.feed import complete_left_behind, mlflow_environment, store_uri

FIRST_PORT = 5000
LOG, LINES_SHOWN = "dashboard.log", 5
PAGES_SHOWN = 12
# Browsers take it for this machine without asking a name server (RFC 6761). At localhost, 127.0.0.1 and ::1 MLflow's
# page opens its Assistant over a quarter of the window, at no other name.
OWN_NAME = "zlab.localhost"


class Page(NamedTuple):
    """A prepared page: what it shows, the number of its experiment, and its key there."""

    name: str
    experiment: str
    key: str

    def address(self, server: str) -> str:
        """The page on a server such as http://127.0.0.1:5000."""
        words = f"workflowType=machine_learning&viewStateShareKey={quote(self.key)}&compareRunsMode=CHART"
        return f"{server.rstrip('/')}/#/experiments/{self.experiment}/runs?{words}"


def main(argv: Sequence[str]) -> int:
    """The exit code of `zlab ui`. Returns when the server has ended."""
    asked = parser().parse_args(with_flags(argv))
    sweep = find_sweep(asked.output, asked.sweep) if asked.sweep else None
    return serve(Path(asked.output), asked.port, sweep, asked.host)


def parser() -> VerbParser:
    parser = verb_parser("ui", "The page of a sweep in MLflow: speed, memory, loss and settings of its points.")
    parser.add_argument("sweep", nargs="?", default="", help="last, or the name of a sweep; default: all pages")
    add_output(parser)
    parser.add_argument("--port", type=int, default=None, help=f"default: the first free one from {FIRST_PORT}")
    parser.add_argument(
        "--host",
        default="",
        help="who can reach it; 0.0.0.0: every machine of the network; default: this machine alone",
    )
    add_json(parser, "ui is a server for a browser; status --json and results.csv have the numbers")
    return parser


def serve(output: Path, port: int | None, sweep: SweepPaths | None = None, host: str = "") -> int:
    """Runs the server until Ctrl-C. 0: Ctrl-C, or the store has a server. 1: the server ended unexpectedly, or the
    sweep could not be written. Refusal: there is no readable store, or nothing can listen at the host."""
    screen, output = Screen(), output.absolute()
    if host or port:
        _check_place(host or loopback(), port or 0)
    uri = _uri(output, sweep)
    is_local = uri == names.local_uri(output)
    if is_local and sweep is None and not store_path(output).exists():
        made_by = "a run without tracking=none creates it"
        where = shown(store_path(output))
        raise Refusal([f"there is no {where}: {made_by}, or give the folder of one: {program()} ui --output FOLDER"])
    if problem := schema_version.problem(uri):
        raise Refusal([problem])
    if is_local and store_path(output).exists() and (wrong := _wrong_store(store_path(output))):
        raise Refusal([wrong])
    # A store that is no file here is asked by the process that writes to it.
    shown_sweep = sweep or (None if is_local else next(iter(all_sweeps(output)), None))
    if shown_sweep is None:
        complete_left_behind(output)
        pages = links(store_path(output))
    elif (page := _page_of(shown_sweep, screen)) is not None:
        pages = [page]
    else:
        return FAILED
    if not schema_version.is_database(uri):
        _show(pages, uri, screen)
        if host or port:
            screen.say("warning: --host and --port have no effect, because the store is a server already")
        return OK
    return _listen(uri, output, host, port, pages, screen)


def _listen(
    uri: str, output: Path, asked_host: str, asked_port: int | None, pages: Sequence[Page], screen: Screen
) -> int:
    """Runs a server on the store; without a host or a port that was asked for, on the loopback and a free one."""
    host = asked_host or loopback()
    port = asked_port or free_port(host)
    # Over SSH the browser is on another machine, whose name server may be asked.
    own_name = [] if "SSH_CONNECTION" in os.environ else [OWN_NAME]
    reached = own_names(host) if asked_host else [*own_name, host]
    _show(pages, f"http://{in_url(reached[0])}:{port}", screen)
    log = output / LOG
    screen.say(f"The page answers after about 10 s. Ctrl-C ends it. Its log is {shown(log)}.")
    if asked_host:
        screen.say(f"warning: without a password, whoever reaches {reached[0]} can read, change and delete these runs")
    elif "SSH_CONNECTION" in os.environ:
        screen.say(f"On your own machine: ssh -N -L {port}:{in_url(host)}:{port} {socket.gethostname()}")
    # Job execution starts another process, for features that are not used.
    own = {**mlflow_environment(output), "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    own |= admitted(reached, port)
    return _until_interrupt(server_command(uri, output, port, host), own, log, screen)


def _uri(output: Path, sweep: SweepPaths | None) -> str:
    """The store of the sweep, by default of the newest one; without a sweep, that of the folder."""
    for one in [sweep] if sweep is not None else all_sweeps(output)[:1]:
        try:
            config = next((point.config for point in plan_of(one) if point.config), None)
        except (BadRecord, OSError):
            config = None
        if config is not None:
            return store_uri(from_dict(config), output, os.environ)
    return os.environ.get("MLFLOW_TRACKING_URI") or names.local_uri(output)


def _wrong_store(store: Path) -> str:
    """Why the file is no store of MLflow's; empty if it is one."""
    advice = "restore a copy, or move it away: the next run creates one, and results are in the records of runs too"
    try:
        links(store)
    except sqlite3.Error as error:
        return f"{shown(store)}: expected a store of MLflow's, found: {error}; {advice}"
    return ""


def _page_of(sweep: SweepPaths, screen: Screen) -> Page | None:
    """The page of the sweep, after the store has everything of it; None if it could not be written."""
    screen.say(f"bringing {sweep.name} up to date in MLflow", "dim")
    page = None
    for line in sync.synced(sweep.output, [sweep]):
        if line.get("experiment"):
            page = Page(sweep.name, line["experiment"], chart_page.key_of(sweep.name))
        if line["left"]:
            screen.say(f"{'error: ' if line.get('failed') else ''}{line['left']}")
    return page


def _show(pages: Sequence[Page], server: str, screen: Screen) -> None:
    if len(pages) == 1:
        screen.say(f"{pages[0].name}: {pages[0].address(server)}")
        return
    screen.say(f"{server}: runs of {', '.join(page.name for page in pages[:PAGES_SHOWN]) or 'no sweep'}")
    more = f"; {len(pages) - PAGES_SHOWN} earlier ones: {program()} list" if len(pages) > PAGES_SHOWN else ""
    screen.say(f"The prepared page of a sweep: {program()} ui SWEEP{more}")


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


def server_command(uri: str, output: Path, port: int, host: str) -> list[str]:
    """The command that runs the dashboard."""
    stores = ["--backend-store-uri", uri]
    artifacts = ["--default-artifact-root", artifacts_path(output).as_uri()]
    where = ["--host", host, "--port", str(port), "--workers", "1"]
    return children.words("mlflow", "server", *stores, *artifacts, *where)


def own_names(host: str) -> list[str]:
    """The names and addresses under which others may ask for what listens at `host`, the best one to type first: those
    of this machine, after the host itself unless that is 0.0.0.0 or ::, which mean all. In lower case, as browsers."""
    entries = [entry for entries in psutil.net_if_addrs().values() for entry in entries]
    numbers = [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
    first = [] if host in ("0.0.0.0", "::") else [host]
    found = [*first, socket.gethostname(), socket.getfqdn(), *(number.partition("%")[0] for number in numbers)]
    return list(dict.fromkeys(name.lower() for name in found))


def admitted(names_of_host: Sequence[str], port: int) -> dict[str, str]:
    """The variables with which MLflow's server answers browsers that ask for these names; without them it refuses every
    name but localhost, and what a page sends from elsewhere. Those that are set already stay as they are."""
    places = [f"{in_url(name)}:{port}" for name in names_of_host]
    found = {
        "MLFLOW_SERVER_ALLOWED_HOSTS": ",".join([*places, "localhost:*", "127.0.0.1:*"]),
        "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": ",".join(f"http://{place}" for place in places),
    }
    return {name: value for name, value in found.items() if name not in os.environ}


def links(store: Path) -> list[Page]:
    """The pages of sweeps and of other experiments in an SQLite file, newest first. Read without importing mlflow."""
    query = (
        "SELECT e.experiment_id, e.name, t.key FROM experiments e LEFT JOIN experiment_tags t "
        "ON t.experiment_id = e.experiment_id AND t.key LIKE ? "
        "WHERE e.lifecycle_stage = 'active' ORDER BY e.experiment_id DESC, t.key DESC"
    )
    prefix = chart_page.tag_of("x").removesuffix("x")
    with closing(sqlite3.connect(f"{store.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        rows = connection.execute(query, (f"{prefix}%",)).fetchall()
    sweeps = [(number, name, (tag or "").removeprefix(prefix)) for number, name, tag in rows if name != "Default"]
    return [Page(sweep or name, str(number), chart_page.key_of(sweep)) for number, name, sweep in sweeps]


def _check_place(host: str, port: int) -> None:
    """Refusal if nothing can listen there."""
    try:
        socket.create_server((host, port), family=family(host)).close()
    except (OSError, OverflowError) as error:
        expected = f"--host: expected an address of this machine, or 0.0.0.0 for all of them, found '{host}'"
        if port:
            expected = f"--port {port}: expected a free port of {host}; choose another, or leave it out; found"
        raise Refusal([f"{expected}: {error}"]) from None


def free_port(host: str) -> int:
    """The first port at or above FIRST_PORT on which nothing listens."""
    for port in range(FIRST_PORT, FIRST_PORT + 100):
        with socket.socket(family(host)) as probe:
            if probe.connect_ex((host, port)) != 0:
                return port
    raise OSError(f"no free port from {FIRST_PORT} to {FIRST_PORT + 99}; choose one with --port")
