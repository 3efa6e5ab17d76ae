"""The verbs that read and control sweeps from any terminal: list, status, watch, logs, report, cancel, resume, retry.

Everything is read from records. A sweep is named by `last`, its folder's name, or a unique part of that name.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from orchestrator.commands.verb_parser import VerbParser, add_json
from orchestrator.compose import arguments
from orchestrator.config.strict import nearest
from orchestrator.exit_codes import BAD_USAGE
from orchestrator.plan import decision
from orchestrator.records import sweep_record
from orchestrator.records.record_file import BadRecord, read_or_warn, require_json, warn_once
from orchestrator.records.record_shapes import STATE, SWEEP
from orchestrator.records.run_record import AttemptPaths
from orchestrator.records.run_state import RETRIED, RunState
from orchestrator.records.sweep_record import Standing, SweepPaths
from orchestrator.report import comparison, sweep_table
from orchestrator.report.summary import Row
from orchestrator.slurm import sweep as slurm_sweep
from orchestrator.text.paths import DEFAULT_OUTPUT, OUTPUT, program, shown, verb
from orchestrator.text.streams import complain
from orchestrator.text.units import many
from orchestrator.tracking.feed import complete_left_behind

FOLLOW_S = 0.3
LOG_BYTES = 64 << 20  # of a larger log, only the end is shown
PROPOSED = "(a batch that a program proposed)"  # shown for a sweep that has no command


class VerbError(ValueError):
    """The request cannot be carried out, for example an unknown sweep; the message names the alternatives."""


def main(argv: Sequence[str]) -> int:
    """The exit code of `zlab VERB ...`."""
    found = parser().parse_args(argv)
    complete_left_behind(Path(found.output).absolute())
    verb: Callable[[argparse.Namespace], int] = found.verb
    try:
        return verb(found)
    except (VerbError, BadRecord) as error:
        complain(f"error: {error}")
        return BAD_USAGE


def parser() -> VerbParser:
    """The parser of all verbs of this module."""
    parser = VerbParser(prog=program())
    verbs = parser.add_subparsers(required=True)

    def add(name: str, verb: Callable[[argparse.Namespace], int], text: str, no_json: str = "") -> VerbParser:
        one = verbs.add_parser(name, help=text, description=text)
        one.set_defaults(verb=verb)
        one.add_argument("--output", default=os.environ.get(OUTPUT, DEFAULT_OUTPUT), help="default: outputs")
        if name != "list":
            one.add_argument("sweep", nargs="?", default="last", help="default: last")
        add_json(one, no_json)
        return one

    add("list", _list, "The sweeps of an output folder, the newest first.")
    add("status", _status, "How every point of a sweep stands.")
    add("watch", _watch, "The live table of a sweep, and its comparison at the end. --json: how it stands now.")
    logs = add("logs", _logs, "The log of a point's rank.", "a log is text as it was written; status --json has paths")
    logs.add_argument("point", nargs="?", help="its label; default: the one that runs, else the first that failed")
    logs.add_argument("--rank", type=int, default=None, help="default: the rank to blame, else 0")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the point ends")
    add("report", _report, "The comparison of the points that have ended, and where it lies as a file.")
    cancel = add("cancel", _cancel, "Ends a sweep, or some of its points. What was measured stays.")
    cancel.add_argument("points", nargs="*", help="labels; default: all")
    add("resume", _resume, "The same command again: what has an answer is kept, the rest is run.")
    retry = add("retry", _retry, "Runs again what ended badly.")
    retry.add_argument("--retry", default="error,hang,timeout", metavar="STATES", help=f"of {','.join(RETRIED)}")
    return parser


def find_sweep(output: str, name: str) -> SweepPaths:
    """The sweep with this name. VerbError if no sweep or several match."""
    sweeps = sweep_record.all_sweeps(output)
    if not sweeps:
        single = " (the records of single runs lie in its folder points/)" if (Path(output) / "points").is_dir() else ""
        raise VerbError(
            f"there is no sweep in '{output}'{single}; give --output FOLDER, or start one: {program()} sweeps=stages"
        )
    if name == "last":
        return sweeps[0]
    exact = [one for one in sweeps if one.name == Path(name).name]
    found = exact or [one for one in sweeps if name in one.name]
    if len(found) == 1:
        return found[0]
    if found:
        raise VerbError(f"'{name}' is a part of several: {' '.join(one.name for one in found)}")
    near = nearest(name, [one.name for one in sweeps])
    hint = f" Did you mean '{near}'?" if near else ""
    raise VerbError(f"there is no sweep '{name}'.{hint}      see: {program()} list")


def find_point(found: Sequence[Standing], label: str | None) -> Standing:
    """The point with this label; without a label the running one, else the first without an answer, else the first."""
    if label is None:
        order = (lambda one: one.state is RunState.running, lambda one: not one.state.answered, lambda one: True)
        tried = [one for one in found if one.attempt is not None]
        if not tried:
            raise VerbError("no point of this sweep was started, so none has a log")
        return next(one for wanted in order for one in tried if wanted(one))
    exact = [one for one in found if one.label == label]
    if not exact:
        near = nearest(label, [one.label for one in found])
        hint = f" Did you mean '{near}'?" if near else ""
        raise VerbError(f"there is no point '{label}'.{hint}      points: {' '.join(one.label for one in found)}")
    return exact[0]


def _standings(sweep: SweepPaths) -> list[Standing]:
    """The current state of the points; for a sweep on a cluster, the scheduler is asked first."""
    if slurm_sweep.is_on_cluster(sweep):
        return slurm_sweep.ClusterView(sweep).look()
    return sweep_record.standings(sweep)


def _list(asked: argparse.Namespace) -> int:
    rows = []
    for sweep in sweep_record.all_sweeps(asked.output):
        facts = read_or_warn(sweep.sweep, SWEEP)
        command = "(its record cannot be read)" if facts is None else " ".join(facts.get("command") or [])
        try:
            found = sweep_record.standings(sweep)
            points, alive = sweep_table.counts(found), slurm_sweep.still_runs(sweep, found)
        except (BadRecord, OSError) as error:
            warn_once(str(error))
            points, alive = "its plan cannot be read", False
        rows.append({"sweep": sweep.name, "running": alive, "points": points, "command": command})
    if asked.json:
        print(json.dumps(rows, ensure_ascii=False))
        return 0
    if not rows:
        print(f"no sweeps in '{asked.output}'      start one: {program()} sweeps=stages")
    for row in rows:
        print(
            f"{row['sweep']}{'  (runs)' if row['running'] else ''}  {row['points']}\n    {row['command'] or PROPOSED}"
        )
    return 0


def _status(asked: argparse.Namespace) -> int:
    sweep = find_sweep(asked.output, asked.sweep)
    found = _standings(sweep)
    code = comparison.exit_code(found)
    if asked.json:
        print(sweep_table.document(sweep, found, runs=slurm_sweep.still_runs(sweep, found)))
        return code
    from orchestrator.report.screen import Screen

    screen = Screen()
    screen.say(f"{sweep.name}   {sweep_table.counts(found)}", "bold")
    screen.table(sweep_table.standing_table(found))
    for one in found:
        if one.message and len(one.message) > sweep_table.REASONS_SHOWN:
            screen.say(f"{one.label}: {one.state.value}: {one.message}")
    screen.closing([sweep_table.next_row(sweep, found, runs=slurm_sweep.still_runs(sweep, found))])
    return code


def _watch(asked: argparse.Namespace) -> int:
    sweep = find_sweep(asked.output, asked.sweep)
    if asked.json:
        return _status(asked)
    from orchestrator.commands.sweep import watch
    from orchestrator.report.screen import Screen

    return watch(sweep, Screen(), attached=False)


def _report(asked: argparse.Namespace) -> int:
    from orchestrator.commands.watch_sweep import conclude
    from orchestrator.report.screen import Screen

    sweep, screen = find_sweep(asked.output, asked.sweep), Screen()
    found = _standings(sweep)  # for a sweep on a cluster, this updates the records
    if asked.json:
        comparison.write(sweep)
        print(sweep_table.document(sweep, found, runs=slurm_sweep.still_runs(sweep, found)))
        return comparison.exit_code(found)
    code = conclude(sweep, screen)
    rows = [Row("report", shown(sweep.report)), Row("numbers", shown(sweep.results))]
    screen.closing([*rows, sweep_table.next_row(sweep, found, runs=slurm_sweep.still_runs(sweep, found))])
    return code


def _logs(asked: argparse.Namespace) -> int:
    sweep = find_sweep(asked.output, asked.sweep)
    one = find_point(_standings(sweep), asked.point)
    if one.attempt is None:
        raise VerbError(f"'{one.label}' was never started ({one.state.value}: {one.message}), so it has no log")
    blamed = (read_or_warn(one.attempt.state, STATE) or {}).get("rank") or 0
    rank = asked.rank if asked.rank is not None else int(blamed)
    log = one.attempt.rank_log(rank)
    if not log.is_file() and not asked.follow:
        log = slurm_sweep.log_of(one.attempt) or log
    if not log.is_file() and not asked.follow:
        there = sorted(path.name for path in one.attempt.root.glob("rank*.log"))
        raise VerbError(f"'{one.label}' has no log of rank {rank}; there are: {' '.join(there) or 'none'}")
    complain(f"== {one.label}: {one.state.value}, rank {rank}: {shown(log)}")
    _print_log(log, one.attempt, follow=asked.follow)
    return 0


def _print_log(log: Path, attempt: AttemptPaths, *, follow: bool) -> None:
    """Prints the log, or the end of a huge one; with `follow`, also new output until the attempt has ended."""
    size = log.stat().st_size if log.is_file() else 0
    read = max(0, size - LOG_BYTES)
    if read:
        complain(f"warning: {shown(log)} has {size:,} bytes, of which the last {LOG_BYTES:,} follow")
    while True:
        over = not follow or RunState((read_or_warn(attempt.state, STATE) or {"state": "lost"})["state"]).final
        if log.is_file():
            with log.open("rb") as file:
                file.seek(read)
                shutil.copyfileobj(file, sys.stdout.buffer)
                read = file.tell()
            sys.stdout.flush()
        if over:
            return
        time.sleep(FOLLOW_S)


def _cancel(asked: argparse.Namespace) -> int:
    sweep = find_sweep(asked.output, asked.sweep)
    found = _standings(sweep)
    labels = [find_point(found, label).label for label in asked.points] or None
    moving = [one for one in found if not one.state.final and (labels is None or one.label in labels)]
    if not moving or not slurm_sweep.still_runs(sweep, found):
        _say(asked, sweep, f"nothing of {sweep.name} runs or waits: {sweep_table.counts(found)}")
        return 0
    if slurm_sweep.is_on_cluster(sweep):
        slurm_sweep.cancel(sweep, [one.label for one in moving])
    else:
        sweep_record.ask(sweep, "cancel", labels=labels)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        now = {one.label: one.state for one in _standings(sweep)}
        if all(now[one.label].final for one in moving):
            done = f"cancelled {many(len(moving), 'point')} of {sweep.name}, nothing of it is left running"
            _say(asked, sweep, f"{done}\nnext      {verb('resume', sweep.root)}")
            return 0
        time.sleep(FOLLOW_S)
    print(f"error: they have not ended within 30 s; see {shown(sweep.log)}, or ask again", file=sys.stderr)
    return 1


def _say(asked: argparse.Namespace, sweep: SweepPaths, text: str) -> None:
    """Prints the text, or with --json the current state of the sweep."""
    found = _standings(sweep) if asked.json else []
    print(sweep_table.document(sweep, found, runs=slurm_sweep.still_runs(sweep, found)) if asked.json else text)


def _resume(asked: argparse.Namespace) -> int:
    return _again(find_sweep(asked.output, asked.sweep), ["--json"] if asked.json else [])


def _retry(asked: argparse.Namespace) -> int:
    try:
        decision.retry_states(asked.retry)
    except ValueError as error:
        raise VerbError(str(error)) from None
    more = ["--json"] if asked.json else []
    return _again(find_sweep(asked.output, asked.sweep), ["--retry", asked.retry, *more])


def _again(sweep: SweepPaths, more: Sequence[str]) -> int:
    """Runs the command that created the sweep, in the folder where it was typed."""
    from orchestrator.commands import line  # imported here: a table of sweeps needs none of the modules that run them

    facts = require_json(sweep.sweep, SWEEP)
    folder, command = facts.get("folder") or "", facts.get("command")
    if not Path(folder).is_dir():
        raise VerbError(f"{sweep.name} was started in {folder}, which is gone")
    if not command:
        raise VerbError(f"{sweep.name} is a batch that a program proposed: run that again, and answers are kept")
    where = "" if Path(folder) == Path.cwd() else f"in {folder}: "
    os.chdir(folder)
    command = [*command, *more]
    complain(f"{where}{program()} {shlex.join(command)}")
    return line.answer(arguments.split(command))
