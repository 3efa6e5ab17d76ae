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

from orchestrator import wings
from orchestrator.commands.named_sweep import find_sweep, standings_now
from orchestrator.commands.verb_parser import VerbParser, add_json, add_output, add_threshold, with_flags
from orchestrator.compose import arguments
from orchestrator.config.near import did_you_mean
from orchestrator.config.strict import Refusal
from orchestrator.launch.cluster import cluster_of
from orchestrator.planning.point import retry_states
from orchestrator.records import sweep_record
from orchestrator.records.record_file import BadRecord, EventTail, read_or_warn, require_json, warn_once
from orchestrator.records.record_shapes import JOB, STATE, SWEEP
from orchestrator.records.run_record import AttemptPaths
from orchestrator.records.run_state import RETRIED, RunState
from orchestrator.records.sweep_record import Standing, SweepPaths
from orchestrator.report import comparison, ranking, sweep_table
from orchestrator.report.progress import step_line
from orchestrator.report.summary import Row
from orchestrator.text.paths import program, shown, verb
from orchestrator.text.streams import complain
from orchestrator.text.units import many, size
from orchestrator.tracking.feed import complete_left_behind

FOLLOW_S = 0.3
LOG_BYTES = 64 << 20  # of a larger log, only the end is shown
PROPOSED = "(a batch that a program proposed)"  # shown for a sweep that has no command


def main(argv: Sequence[str]) -> int:
    """The exit code of `zlab VERB ...`."""
    arguments = parser().parse_args(with_flags(argv))
    complete_left_behind(Path(arguments.output).absolute())
    verb: Callable[[argparse.Namespace], int] = arguments.verb
    return verb(arguments)


def parser() -> VerbParser:
    """The parser of all verbs of this module."""
    parser = VerbParser(prog=program())
    verbs = parser.add_subparsers(required=True)

    def add(name: str, verb: Callable[[argparse.Namespace], int], text: str, no_json: str = "") -> VerbParser:
        command = verbs.add_parser(name, help=text, description=text)
        command.set_defaults(verb=verb)
        add_output(command)
        if name != "list":
            command.add_argument("sweep", nargs="?", default="last", help="default: last")
        add_json(command, no_json)
        return command

    add("list", _list, "The sweeps of an output folder, the newest first.")
    add("status", _status, "The state of every point of a sweep.")
    add("watch", _watch, "The live table of a sweep, and its comparison at the end. --json: its current state.")
    logs = add("logs", _logs, "The log of a point's rank.", "a log is text as it was written; status --json has paths")
    logs.add_argument("point", nargs="?", help="its label; default: the one that runs, else the first that failed")
    logs.add_argument("--rank", type=int, default=None, help="default: the rank to blame, else 0")
    logs.add_argument("-f", "--follow", action="store_true", help="also its steps, until the point has ended")
    report = add("report", _report, "The comparison of the points that have ended, in files and pictures.")
    report.add_argument("--against", metavar="BASELINE", help="also compare with this sweep; exit 1 if it was better")
    add_threshold(report)
    cancel = add("cancel", _cancel, "Ends a sweep, or some of its points. What was measured stays.")
    cancel.add_argument("points", nargs="*", help="labels; default: all")
    resume = add("resume", _resume, "The same command again: points with an answer are kept, all others are run.")
    retry = add("retry", _retry, "Runs failed points again.")
    for again in (resume, retry):
        again.add_argument("--detach", action="store_true", help="leave the sweep running and return")
    retry.add_argument("--retry", default="error,hang,timeout", metavar="STATES", help=f"of {','.join(RETRIED)}")
    return parser


def find_point(standings: Sequence[Standing], label: str | None) -> Standing:
    """The point with this label; without a label the running one, else the first without an answer, else the first."""
    if label is None:
        tried = [point for point in standings if point.attempt is not None]
        if not tried:
            raise Refusal(["no point of this sweep was started, so none has a log"])
        return min(tried, key=lambda point: (point.state is not RunState.running, point.state.answered))
    exact = [point for point in standings if point.label == label]
    if not exact:
        hint = did_you_mean(label, [point.label for point in standings])
        points = " ".join(point.label for point in standings)
        raise Refusal([f"there is no point '{label}'.{hint}      points: {points}"])
    return exact[0]


def _list(asked: argparse.Namespace) -> int:
    rows = []
    for sweep in sweep_record.all_sweeps(asked.output):
        facts = read_or_warn(sweep.sweep, SWEEP)
        command = "(its record cannot be read)" if facts is None else " ".join(facts.get("command") or [])
        try:
            standings = sweep_record.standings(sweep)
            points, alive = sweep_table.counts(standings), sweep_record.still_runs(sweep, standings)
        except (BadRecord, OSError) as error:
            warn_once(str(error))
            points, alive = "its plan cannot be read", False
        found = "" if alive else _conclusion(sweep)
        rows.append({"sweep": sweep.name, "running": alive, "points": points, "command": command, "found": found})
    if asked.json:
        print(json.dumps(rows, ensure_ascii=False))
        return 0
    if not rows:
        print(f"no sweeps in '{asked.output}'      start one: {program()} sweeps=stages")
    for row in rows:
        print(
            f"{row['sweep']}{'  (runs)' if row['running'] else ''}  {row['points']}\n    {row['command'] or PROPOSED}"
            + (f"\n    {row['found']}" if row["found"] else "")
        )
    return 0


def _conclusion(sweep: SweepPaths) -> str:
    """The best point of a sweep that has ended; empty if none was measured or its records cannot be read."""
    try:
        ranked = comparison.ranked(sweep)
        return ranking.conclusion(ranked) if any(row.is_measured for row in ranked) else ""
    except (BadRecord, OSError):
        return ""


def _status(asked: argparse.Namespace) -> int:
    sweep = find_sweep(asked.output, asked.sweep)
    standings = standings_now(sweep)
    code = comparison.exit_code(standings)
    if asked.json:
        print(sweep_table.document(sweep, standings))
        return code
    from orchestrator.report.screen import Screen

    screen = Screen()
    screen.say(f"{sweep.name}   {sweep_table.counts(standings)}", "bold")
    screen.table(sweep_table.standing_table(standings))
    for point in standings:
        if point.message and len(point.message) > sweep_table.REASONS_SHOWN:
            screen.say(f"{point.label}: {point.state.value}: {point.message}")
    screen.closing([sweep_table.next_row(sweep, standings, runs=sweep_record.still_runs(sweep, standings))])
    return code


def _watch(asked: argparse.Namespace) -> int:
    sweep = find_sweep(asked.output, asked.sweep)
    if asked.json:
        return _status(asked)
    from orchestrator.commands.sweep import watch
    from orchestrator.report.screen import Screen

    return watch(sweep, Screen(), attached=False)


def _report(asked: argparse.Namespace) -> int:
    from orchestrator.commands import compare
    from orchestrator.commands.watch_sweep import conclude
    from orchestrator.report import changes
    from orchestrator.report.screen import Screen

    sweep, screen = find_sweep(asked.output, asked.sweep), Screen()
    standings = standings_now(sweep)  # for a sweep on a cluster, this updates the records
    found = compare.compared(asked.output, asked.against, str(sweep.root), asked.threshold) if asked.against else None
    if asked.json:
        comparison.write(sweep, with_png=True)
        document = json.loads(sweep_table.document(sweep, standings))
        against = {} if found is None else {"against": changes.document(found)}
        print(json.dumps({**document, **against}, ensure_ascii=False))
        return comparison.exit_code(standings) if found is None else compare.exit_code(found)
    code = conclude(sweep, screen, with_png=True)
    if found is not None:
        screen.say("")
        compare.show(found, screen)
        code = compare.exit_code(found)
    rows = [Row("report", shown(sweep.report)), Row("page", shown(sweep.page)), Row("picture", shown(sweep.picture))]
    rows.append(Row("numbers", shown(sweep.results)))
    screen.closing([*rows, sweep_table.next_row(sweep, standings, runs=sweep_record.still_runs(sweep, standings))])
    return code


def _logs(asked: argparse.Namespace) -> int:
    sweep = find_sweep(asked.output, asked.sweep)
    point = find_point(standings_now(sweep), asked.point)
    if point.attempt is None:
        why = f"{point.state.value}: {point.message}"
        raise Refusal([f"'{point.label}' was never started ({why}), so it has no log"])
    blamed = (read_or_warn(point.attempt.state, STATE) or {}).get("rank") or 0
    rank = asked.rank if asked.rank is not None else int(blamed)
    log = point.attempt.rank_log(rank)
    if not log.is_file() and not asked.follow:
        # SLURM's own log of the job has the setup lines, and is the only one if no rank has written any.
        log = Path((read_or_warn(point.attempt.job, JOB) or {}).get("log") or log)
    if not log.is_file() and not asked.follow:
        there = sorted(path.name for path in point.attempt.root.glob("rank*.log"))
        raise Refusal([f"'{point.label}' has no log of rank {rank}; there are: {' '.join(there) or 'none'}"])
    complain(f"== {point.label}: {point.state.value}, rank {rank}: {shown(log)}")
    steps = sum(point.planned.config.get("measure", {}).get(key) or 0 for key in ("warmup_steps", "steps"))
    _print_log(log, point.attempt, steps, follow=asked.follow)
    return 0


def _print_log(log: Path, attempt: AttemptPaths, steps: int, *, follow: bool) -> None:
    """Prints the log, or the end of a huge one; with `follow`, also new output and the steps of all ranks, until the
    attempt has ended. steps: of the whole run."""
    events = EventTail.of_the_end(attempt.metrics)
    length = log.stat().st_size if log.is_file() else 0
    read = max(0, length - LOG_BYTES)
    if read:
        complain(f"warning: {shown(log)} has {size(length)}, of which the last {size(LOG_BYTES)} follow")
    while True:
        over = not follow or RunState((read_or_warn(attempt.state, STATE) or {"state": "lost"})["state"]).final
        if log.is_file():
            with log.open("rb") as file:
                file.seek(read)
                shutil.copyfileobj(file, sys.stdout.buffer)
                read = file.tell()
            sys.stdout.flush()
        for event in events.read_new() if follow else ():
            if event["event"] == "step" and not event.get("earlier"):
                print(step_line(event, steps), flush=True)
        if over:
            return
        time.sleep(FOLLOW_S)


def _cancel(asked: argparse.Namespace) -> int:
    sweep = find_sweep(asked.output, asked.sweep)
    standings = standings_now(sweep)
    labels = [find_point(standings, label).label for label in asked.points] or None
    moving = [point for point in standings if not point.state.final and (labels is None or point.label in labels)]
    if not moving or not sweep_record.still_runs(sweep, standings):
        _say(asked, sweep, f"no point of {sweep.name} runs or waits: {sweep_table.counts(standings)}")
        return 0
    cluster_of(sweep).cancel(sweep, labels)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        now = {point.label: point.state for point in standings_now(sweep)}
        if all(now[point.label].final for point in moving):
            done = f"cancelled {many(len(moving), 'point')} of {sweep.name}, none of them is left running"
            _say(asked, sweep, f"{done}\nnext      {verb('resume', sweep.root)}")
            return 0
        time.sleep(FOLLOW_S)
    print(f"error: they have not ended within 30 s; see {shown(sweep.log)}, or ask again", file=sys.stderr)
    return 1


def _say(asked: argparse.Namespace, sweep: SweepPaths, text: str) -> None:
    """Prints the text, or with --json the current state of the sweep."""
    standings = standings_now(sweep) if asked.json else []
    print(sweep_table.document(sweep, standings) if asked.json else text)


def _resume(asked: argparse.Namespace) -> int:
    return _again(asked, [])


def _retry(asked: argparse.Namespace) -> int:
    retry_states(asked.retry)  # refuses what cannot be retried
    return _again(asked, ["--retry", asked.retry])


def _again(asked: argparse.Namespace, more: Sequence[str]) -> int:
    """Runs the command that created the sweep, in the folder where it was typed."""
    sweep = find_sweep(asked.output, asked.sweep)
    from orchestrator.commands import typed  # imported here: a table of sweeps needs none of the modules that run them

    facts = require_json(sweep.sweep, SWEEP)
    folder, command = facts.get("folder") or "", facts.get("command")
    if not Path(folder).is_dir():
        raise Refusal([f"{sweep.name} was started in {folder}, which no longer exists"])
    if not command:
        raise Refusal([f"{sweep.name} is a batch that a program proposed: run that again, and answers are kept"])
    where = "" if Path(folder) == Path.cwd() else f"in {folder}: "
    os.chdir(folder)
    flags = [f"--{flag}" for flag in ("detach", "json") if getattr(asked, flag) and f"--{flag}" not in command]
    command = [*command, *more, *flags]
    complain(f"{where}{program()} {shlex.join(command)}")
    if command[0] in wings.VERBS:
        return int(wings.load(wings.VERBS[command[0]]).main(command[1:]))
    return typed.answer(arguments.split(command))
