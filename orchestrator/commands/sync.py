"""`zlab sync`: writes what an MLflow store lacks of the records of an output folder, as after its server was down."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from orchestrator.commands.named_sweep import find_sweep, standings_now
from orchestrator.commands.verb_parser import VerbParser, add_json, add_output, verb_parser, with_flags
from orchestrator.config.strict import Refusal
from orchestrator.exit_codes import FAILED, OK
from orchestrator.launch.verdict import end_of
from orchestrator.records.run_record import tracker_log_path
from orchestrator.records.sweep_record import SweepPaths, is_on_cluster
from orchestrator.text.paths import shown
from orchestrator.text.units import many
from orchestrator.tracking.feed import start_sync


def main(argv: Sequence[str]) -> int:
    """The exit code of `zlab sync`. 0: the store has everything. 1: something could not be written."""
    asked = parser().parse_args(with_flags(argv))
    output = Path(asked.output).absolute()
    sweeps = [find_sweep(asked.output, asked.sweep)] if asked.sweep else []
    if not sweeps and not output.is_dir():
        raise Refusal([f"there is no folder '{asked.output}'      give the folder of the runs: --output FOLDER"])
    for sweep in sweeps:
        if is_on_cluster(sweep):
            standings_now(sweep)  # records the ends of its jobs
    lines = list(synced(output, sweeps, asked.uri, (lambda line: None) if asked.json else _say))
    if asked.json:
        print(json.dumps(lines, ensure_ascii=False))
    else:
        _conclude(lines)
    return FAILED if any(_failed(line) for line in lines) else OK


def parser() -> VerbParser:
    parser = verb_parser("sync", "Writes to MLflow what it lacks of the records. A second time nothing is missing.")
    parser.add_argument("sweep", nargs="?", default="", help="default: all sweeps and single runs of the folder")
    add_output(parser)
    parser.add_argument("--uri", default="", help="the store to write to; default: that of each run's configuration")
    add_json(parser)
    return parser


def synced(
    output: Path, sweeps: Sequence[SweepPaths], uri: str = "", tell: Callable[[dict[str, Any]], None] | None = None
) -> Iterator[dict[str, Any]]:
    """Carries it out in a child process, which imports MLflow. Yields a line for each sweep, see `sync.Synced`."""
    process = start_sync(output, sweeps, uri, heard=True)
    try:
        assert process.stdout is not None
        for text in process.stdout:
            line = _line(text)
            if line is not None:
                if tell is not None:
                    tell(line)
                yield line
        process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if process.returncode:
        log = tracker_log_path(output)
        why = "".join(end_of(log)[-1:])
        yield {
            "what": "sync",
            "added": 0,
            "completed": 0,
            "missing": 0,
            "failed": True,
            "again": True,
            "left": f"{why}; see {shown(log)}",
        }


def _line(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:  # printed by some library
        return None
    return line if isinstance(line, dict) and "what" in line else None


def _failed(line: dict[str, Any]) -> bool:
    return bool(line.get("failed"))


def _say(line: dict[str, Any]) -> None:
    if line["added"] or line["completed"]:
        print(f"{line['what']}: added {many(line['added'], 'run')}, completed {line['completed']}")
    if line["left"]:
        print(f"{line['what']}: {'error: ' if _failed(line) else ''}{line['left']}")


def _conclude(lines: Sequence[dict[str, Any]]) -> None:
    for line in lines:
        if line["what"] == "sync":
            _say(line)
    added, completed, missing = (sum(line[key] for line in lines) for key in ("added", "completed", "missing"))
    failed = [line for line in lines if _failed(line)]
    done = "nothing was written" if failed else "nothing was missing"
    if added or completed:
        done = f"added {many(added, 'run')}, completed {completed}"
    if failed:
        done += f"; up to {many(missing, 'run')} may be missing" if missing else ""
        done += "; try again" if any(line["again"] for line in failed) else ""
    print(f"sync: {done}")
