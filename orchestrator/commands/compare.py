"""Compares two sweeps, or points of one, so that a change of the code, of a library or of a setting can be judged by a
program."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.commands.named_sweep import find_sweep, standings_now
from orchestrator.commands.verb_parser import VerbParser, add_json, add_output, add_threshold, verb_parser, with_flags
from orchestrator.config.strict import Refusal
from orchestrator.exit_codes import FAILED, INCOMPLETE, OK
from orchestrator.records.record_file import BadRecord, require_json
from orchestrator.records.record_shapes import COMPARED
from orchestrator.records.sweep_record import SweepPaths
from orchestrator.report import changes, extras
from orchestrator.report.changes import Changes, Measured
from orchestrator.report.entry import Entry
from orchestrator.report.screen import Screen

LAST = "last"


def main(argv: Sequence[str]) -> int:
    """0: no regression. 1: at least one. 2: not comparable. 3: no point could be judged."""
    asked = parser().parse_args(with_flags(argv))
    try:
        found = _found(asked)
    except BadRecord as error:  # not the exit code of a regression
        raise Refusal([str(error)]) from error
    if asked.json:
        print(json.dumps(changes.document(found), ensure_ascii=False))
    else:
        show(found, Screen())
    return exit_code(found)


def _found(asked: Namespace) -> Changes:
    if asked.by is None:
        if asked.before is None:
            raise Refusal(["expected the sweep to compare with, or --by KEY, found neither"])
        return compared(asked.output, asked.before, asked.after or LAST, asked.threshold)
    if asked.after is not None:
        raise Refusal([f"--by compares points of one sweep, found two: {asked.before} and {asked.after}"])
    _, points = _side(asked.output, asked.before or LAST)
    if not any(changes.has_setting(point, asked.by) for point in points):
        raise Refusal([f"--by: expected a setting or a group, such as zero or resources.code, found {asked.by}"])
    return changes.by_setting(points, asked.by, asked.threshold)


def parser() -> VerbParser:
    parser = verb_parser(
        "compare",
        "Compares the points of two sweeps, or with --by those of one: time per token with its range between rounds, "
        "memory, settings and versions. Exit code 1 if one became slower or larger by the threshold, 3 if none could "
        "be judged.",
    )
    parser.add_argument("before", nargs="?", help="a sweep, its folder, or a file made by report --json")
    parser.add_argument("after", nargs="?", help=f"the same; default: {LAST}")
    parser.add_argument(
        "--by",
        metavar="KEY",
        help="compare points of one sweep that differ in this setting or group alone, each with the first of them",
    )
    add_threshold(parser)
    add_output(parser)
    add_json(parser)
    return parser


def compared(output: str, before: str, after: str, threshold: float) -> Changes:
    """The changes between two sides, given as in the command. Refusal if one cannot be found."""
    sides = [_side(output, name) for name in (before, after)]
    names = (sides[0][0], sides[1][0])
    return changes.changes(sides[0][1], sides[1][1], threshold, names)


def _side(output: str, name: str) -> tuple[str, list[Measured]]:
    path = Path(name)
    if path.is_file():
        points = require_json(path, COMPARED)["points"]
        found = [
            Measured(one["label"], one["point"], one.get("config") or {}, one.get("result"), one["state"])
            for one in points
        ]
        return name, _with_places(found)
    is_folder = path.is_dir() and SweepPaths(path).plan.is_file()
    sweep = SweepPaths(path.absolute()) if is_folder else find_sweep(output, name)
    points = standings_now(sweep)
    measured = [
        Measured(one.label, one.planned.point, one.planned.config, one.result, one.state.value) for one in points
    ]
    return sweep.name, _with_places(measured)


def _with_places(points: Sequence[Measured]) -> list[Measured]:
    """The points, of which those that have no place beside the others say so."""
    apart = extras.places().apart([Entry(one.label, one.state, one.result, config=one.config) for one in points])
    return [replace(one, apart=apart.get(one.label, "")) for one in points]


def show(found: Changes, screen: Screen) -> None:
    """Prints the comparison."""
    before, after = found.names
    screen.say(f"before: {before}   after: {after}", "bold")
    if found.points:
        screen.table(changes.table(found))
    for line in changes.notes(found):
        screen.say(line)
    screen.say(changes.conclusion(found), "bold red" if found.regressions else "bold")


def exit_code(found: Changes) -> int:
    """See `main`."""
    if found.regressions:
        return FAILED
    return OK if found.is_judged else INCOMPLETE
