"""`zlab choose engine=all`: which engine and stage is the fastest with the same work, at one batch and at its limit.

No model predicts another engine's speed. So the best of each engine is confirmed by a run: of its stages that fit the
one that sends the least by our count of the stage's messages, and of equal ones the one that needs the least memory.
Then the two fastest run with the largest micro-batch that fits, each with the stage that allows the largest.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator import wings
from orchestrator.commands.experiment_file import write_experiment
from orchestrator.commands.sweep import SweepRequest, swept
from orchestrator.compose import arguments
from orchestrator.compose.line import composed
from orchestrator.config.engine import EngineKind
from orchestrator.config.strict import Refusal
from orchestrator.exit_codes import FAILED, OK
from orchestrator.machine.provenance import version_of
from orchestrator.planning.point import Point
from orchestrator.planning.points import judged
from orchestrator.planning.rules.scene import here
from orchestrator.report import comparison, ranking
from orchestrator.report.ranking import Ranked
from orchestrator.report.screen import Screen, make_console
from orchestrator.report.summary import Row, Table
from orchestrator.text.paths import program, shown
from orchestrator.text.streams import complain
from orchestrator.text.units import digits, many, size
from orchestrator.wings.engines.equality import REFERENCE
from orchestrator.wings.engines.places import AT_ITS_LIMIT, AT_SAME_BATCH
from orchestrator.wings.predict import choose_page
from orchestrator.wings.predict.point_prediction import PointPrediction
from orchestrator.wings.predict.prediction import Predictions

RUNS, AT_LIMIT = 6, 2  # most real runs, and of them most at the limit
ALL, STAGES = "all", "zero=stage0,stage1,stage2,stage3"
HEADER = ("table", "point", "micro", "tokens/s", "needs/rank", "because")


@dataclass(frozen=True)
class EnginePoint:
    """A point that fits. needed: bytes of a rank; sent: bytes of a rank and step, as our count of such messages."""

    point: Point
    needed: int
    sent: int

    @property
    def kind(self) -> str:
        return str(self.point.config.engine.kind)

    @property
    def micro(self) -> int:
        return self.point.config.batch.micro


def least(one: EnginePoint) -> tuple[int, ...]:
    return one.sent, one.needed


def largest(one: EnginePoint) -> tuple[int, ...]:
    return -one.micro, one.sent, one.needed


def best_of_each(found: Sequence[EnginePoint], order: Callable[[EnginePoint], tuple[int, ...]]) -> list[EnginePoint]:
    """The first of each engine in this order, itself in this order."""
    best: dict[str, EnginePoint] = {}
    for one in sorted(found, key=order):
        best.setdefault(one.kind, one)
    return list(best.values())


def main(words: Sequence[str], runs: int | None, *, as_json: bool) -> int:
    """words: those of `choose`, with an engine. Returns 0, or 1 if nothing fits or did the same work."""
    runs = RUNS if runs is None else runs
    if runs < 1:
        raise Refusal([f"choose with other engines needs runs: nothing predicts their speed      fix: --runs {RUNS}"])
    screen = Screen(make_console(on_stderr=as_json))
    asked = [word.partition("=")[2] for word in words if word.startswith("engine=")][-1]
    left = [word for word in words if not word.startswith("engine=")]
    names = {word.partition("=")[0] for word in left}
    left += [] if "zero" in names else [STAGES]
    left += [] if "measure" in names else ["measure=standard"]
    ways = _Ways(left, screen)
    engines = installed() if asked == ALL else asked.split(",")
    first = best_of_each(ways.fitting(engines), least)[:runs]
    if not first:
        complain("error: nothing fits, or no engine can train these settings      see: the same line with -m --plan")
        return FAILED
    tables = {AT_SAME_BATCH: (first, ways.measured(first))}
    if "batch.global_size" in names:
        fastest = [row.entry.label for row in tables[AT_SAME_BATCH][1] if row.place or row.may_be]
        kinds = [one.kind for label in fastest for one in first if one.point.label == label][:AT_LIMIT]
        larger = best_of_each(ways.fitting(kinds, "batch.at_limit=true"), largest) if kinds else []
        larger = [one for one in larger if one.micro > first[0].micro][: runs - len(first)]
        if larger:
            tables[AT_ITS_LIMIT] = (larger, ways.measured(larger))
    chosen = {name: one for name, (tried, rows) in tables.items() if (one := best_of(tried, rows)) is not None}
    if not chosen:
        complain("error: no row has a place, as is said above      fix: measure=standard, if it has too few rounds")
        return FAILED
    _show(tables, chosen, screen, as_json=as_json)
    return OK


def installed() -> list[str]:
    """The engines whose packages are here, ours first, without the reference."""
    others = [kind for kind in wings.ENGINES if kind != REFERENCE]
    here_ = [kind for kind in others if all(version_of(name) for name in wings.load(wings.ENGINES[kind]).PACKAGES)]
    return [EngineKind.zero.value, *here_]


class _Ways:
    """The points of a line, with what is predicted of them, and their runs."""

    def __init__(self, words: Sequence[str], screen: Screen) -> None:
        self._words, self._screen, self._scene = words, screen, here()
        self._references: dict[str, Point] = {}

    def fitting(self, engines: Sequence[str], *more: str) -> list[EnginePoint]:
        """The points of these engines that are predicted to fit."""
        line = ["--multirun", *self._words, f"engine={','.join(engines)}", *more]
        found, _ = judged(composed(arguments.split(line)), self._scene)
        points = [one for one in found if isinstance(one, Point)]
        self._references |= {one.label: one for one in points if one.config.engine.kind == REFERENCE}
        points = [one for one in points if one.config.engine.kind != REFERENCE]
        configs = [one.config for one in points]
        predictions = Predictions(configs, configs, partial(self._screen.say, style="dim"))
        known = [(point, predictions.of(point.config)) for point in points]
        fit = [
            EnginePoint(point, one.needed_bytes, predictions.sent_bytes(point.config))
            for point, one in known
            if isinstance(one, PointPrediction) and not one.cannot_fit
        ]
        self._screen.say(f"{many(len(found), 'point')} of {', '.join(engines)}: {len(fit)} are predicted to fit")
        return fit

    def measured(self, tried: Sequence[EnginePoint]) -> list[Ranked]:
        """Runs the points beside their reference. The rows, the fastest first."""
        points = (*self._references.values(), *(one.point for one in tried))
        self._screen.say(f"confirming {many(len(tried), 'point')} by runs", "bold")
        _, sweep = swept(SweepRequest("choose", points, command=()), self._scene.hardware, self._screen)
        return [] if sweep is None else comparison.ranked(sweep)


def best_of(tried: Sequence[EnginePoint], rows: Sequence[Ranked]) -> EnginePoint | None:
    """The fastest of those that did the same work; of a tie, the one that needs the least memory."""
    first = {row.entry.label for row in rows if 1 in (row.place, row.may_be)}
    return min((one for one in tried if one.point.label in first), key=lambda one: one.needed, default=None)


def _show(
    tables: Mapping[str, tuple[Sequence[EnginePoint], Sequence[Ranked]]],
    chosen: Mapping[str, EnginePoint],
    screen: Screen,
    *,
    as_json: bool,
) -> None:
    rows = [row for name, (tried, ranked) in tables.items() for row in _rows(name, tried, ranked, chosen.get(name))]
    folder = Path(next(iter(chosen.values())).point.config.output).absolute() / "chosen"
    files = {name: write_experiment(folder, one.point.overrides, name) for name, one in chosen.items()}
    if as_json:
        print(json.dumps(_document(tables, chosen, folder, files), ensure_ascii=False))
        return
    screen.console.print()
    screen.table(Table(HEADER, tuple(rows), names=2, texts=("because",)))
    said = [Row(name, f"{one.kind}, {one.point.label}, micro-batch {one.micro}") for name, one in chosen.items()]
    command = [program(), shlex.join(["--config-dir", shown(folder), f"experiment={next(reversed(files.values()))}"])]
    screen.closing([*said, Row("next", " ".join(command))])


def _document(
    tables: Mapping[str, tuple[Sequence[EnginePoint], Sequence[Ranked]]],
    chosen: Mapping[str, EnginePoint],
    folder: Path,
    files: Mapping[str, str],
) -> dict[str, Any]:
    """That of `choose --json` for the last table, whose winner is the next command, with the rows of all tables and the
    winner of each."""
    name, best = list(chosen.items())[-1]
    placed = {row.entry.label: row.place for row in tables[name][1] if row.place or row.may_be}
    second = next((label for label in placed if label != best.point.label), None)
    tied = [label for label, place in placed.items() if place == 1]
    rows = [
        {"table": table, "engine": one.kind, "needs_bytes_per_rank": one.needed}
        | choose_page.row_document(one.point.config, one.point.label, one.point.overrides, None, _speed(one, ranked))
        for table, (tried, ranked) in tables.items()
        for one in tried
    ]
    winners = {table: {"chosen": one.point.label, "experiment": files[table]} for table, one in chosen.items()}
    ends = (best.point.label, second, tied)
    found = choose_page.document(best.point.config, ends, choose_page.FASTEST, (folder, files[name]), rows)
    return {**found, "tables": winners}


def _speed(one: EnginePoint, ranked: Sequence[Ranked]) -> float | None:
    """The measured tokens per second; None if its run has no result."""
    results = [row.entry.result for row in ranked if row.entry.label == one.point.label and row.entry.result]
    return ranking.METRICS[ranking.DEFAULT_METRIC].read(results[0]) if results else None


def _rows(
    name: str, tried: Sequence[EnginePoint], ranked: Sequence[Ranked], chosen: EnginePoint | None
) -> list[tuple[str, ...]]:
    by_label = {row.entry.label: row for row in ranked}
    found: list[tuple[str, ...]] = []
    for one in tried:
        row = by_label.get(one.point.label)
        why = "chosen" if one is chosen else ""
        if row is not None and one is not chosen:
            told = {row.place == 1 or row.tied: "a tie", row.may_be is not None: "not told apart"}
            why = row.apart or told.get(True, row.entry.message)
        cells = (str(one.micro), digits(_speed(one, ranked)), size(one.needed), why)
        found.append((name, one.point.label, *cells))
    return found
