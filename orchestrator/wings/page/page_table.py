"""The table of the page: a row for each point, a column for each setting that varies. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from orchestrator.records.run_state import RunState
from orchestrator.report import extras, ranking, sweep_table
from orchestrator.report.extras import ExtraColumn
from orchestrator.report.varied import Varied
from orchestrator.text.units import ABSENT, change_text, difference, digits, loss, size
from orchestrator.wings.page.report_points import ReportPoint, is_finite

Cell = tuple[object, str]  # the value to sort by, "" for none, and the text
Read = Callable[[ReportPoint], float | None]
NOTHING: Cell = ("", ABSENT)


class Column(NamedTuple):
    """A column. falls: its first click sorts the largest first. number: it is aligned to the right."""

    title: str
    cell: Callable[[ReportPoint], Cell]
    number: bool = True
    falls: bool = False


def _place(point: ReportPoint) -> Cell:
    return (point.number, point.place) if point.place else (point.number, ABSENT)


def _speed(point: ReportPoint) -> Cell:
    return NOTHING if point.speed is None else (point.speed, digits(point.speed))


def _range(point: ReportPoint) -> Cell:
    if point.speed_range is None:
        return NOTHING
    low, high = point.speed_range
    return high - low, f"{digits(low)}-{digits(high)}"


def _of_result(read: Read, text: Callable[[float], str]) -> Callable[[ReportPoint], Cell]:
    def cell(point: ReportPoint) -> Cell:
        value = None if point.result is None else read(point)
        return NOTHING if value is None else (value, text(value))

    return cell


def _difference(point: ReportPoint) -> Cell:
    predicted = point.predicted_components
    if not predicted:
        return NOTHING
    held = sum(point.components[name] for name in predicted)
    total = sum(predicted.values())
    return (held / total - 1 if total else 0.0), difference(held, total)


def _measured_at(point: ReportPoint) -> Cell:
    when = point.entry.measured_at
    if when is None or point.result is None:
        return NOTHING
    reused = ["reused", *ranking.made_with(point.entry)] if point.entry.is_reused else []
    return when, ", ".join([time.strftime("%Y-%m-%d %H:%M", time.localtime(when)), *reused])


def state_of(point: ReportPoint) -> str:
    """The word for the state of a point."""
    return sweep_table.word(RunState(point.entry.state))


def columns(points: Sequence[ReportPoint], settings: Sequence[Varied]) -> list[Column]:
    """All columns, in their order. Those of wings only where some point has one."""
    best = ranking.fastest([point.ranked for point in points])
    found = [
        Column("place", _place),
        Column("point", lambda point: (point.label, point.label), number=False),
        Column("state", lambda point: (state_of(point), state_of(point)), number=False),
        *(Column(setting.name, _setting(setting), number=False) for setting in settings),
        Column("tokens/s", _speed, falls=True),
        Column("range", _range),
        Column("vs best", _against(best), falls=True),
        Column("step [ms]", _of_result(lambda point: ranking.step_ms(point.result or {}), digits)),
        Column("states/rank", _of_result(lambda point: ranking.states_bytes(point.result or {}), size)),
        Column("tensors/rank", _of_result(lambda point: sum(point.components.values()), size)),
        Column("tensors vs predicted", _difference),
        Column("peak/rank", _of_result(lambda point: ranking.peak_bytes(point.result or {}), size)),
        Column("sent/step", _of_result(lambda point: ranking.sent_bytes(point.result or {}), size)),
        Column("loss last", _of_result(lambda point: (point.result or {})["loss"]["last"], loss)),
        Column("loss held out", _of_result(lambda point: (point.result or {})["loss"]["validation"], loss)),
    ]
    found += map(_extra, extras.columns([point.entry for point in points]))
    others = _of_result(lambda point: point.entry.others_share, lambda share: f"{100 * share:.0f} %")
    return [*found, Column("other load", others), Column("measured", _measured_at, number=False)]


def _extra(extra: ExtraColumn) -> Column:
    def cell(point: ReportPoint) -> Cell:
        value = extra.values[point.number]
        return ("" if value is None else value), extra.texts[point.number]

    return Column(extra.title, cell)


def _setting(setting: Varied) -> Callable[[ReportPoint], Cell]:
    return lambda point: (setting.values[point.number], setting.values[point.number])


def _against(best: Mapping[str, float]) -> Callable[[ReportPoint], Cell]:
    def cell(point: ReportPoint) -> Cell:
        if point.speed is None or not point.ranked.has_speed or not is_finite(best[point.ranked.table]):
            return NOTHING
        share = point.speed / best[point.ranked.table] - 1
        return share, "best" if share == 0 else change_text(1 + share)

    return cell
