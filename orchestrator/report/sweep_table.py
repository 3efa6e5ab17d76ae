"""A sweep as rows of text: its plan before anything starts, and the state of each point afterwards. Pure."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.config.lossy import lossy_words
from orchestrator.records.record_file import EventTail, read_or_warn
from orchestrator.records.record_shapes import SWEEP
from orchestrator.records.run_state import RunState
from orchestrator.records.sweep_record import Planned, Standing, SweepPaths, still_runs
from orchestrator.report import extras, ranking
from orchestrator.report.progress import StepProgress, progress
from orchestrator.report.summary import Row, Table
from orchestrator.text.paths import program, verb
from orchestrator.text.units import ABSENT, digits, duration, grouped, many, size

STYLES = {
    **dict.fromkeys((RunState.ok, RunState.cached), "green"),
    **dict.fromkeys((RunState.tight, RunState.oom, RunState.oom_host), "yellow"),
    **dict.fromkeys((RunState.running, RunState.starting), "bold"),
    **dict.fromkeys((RunState.refused, RunState.pruned, RunState.queued, RunState.cancelled), "dim"),
}
REASONS_SHOWN = 100
PLAN_REASONS = 8
STATES = ("params", "grads", "optimizer")
PLAN_HEADER = ("point", "decision", *STATES, "activations", "needs/rank")
NAMED = 4  # points of a decision that are listed by name


def plan_table(planned: Sequence[Planned]) -> Table:
    """Every point with its decision, its predicted speed if one is known, and what is lossy if something is. The
    reasons are in `plan_rows`."""
    header: tuple[str, ...] = PLAN_HEADER
    rows = [_plan_row(point) for point in planned]
    speeds = [(point.predicted.get("speed") or {}).get("text") for point in planned]
    if any(speeds):
        header, rows = (*header, "tokens/s"), [(*row, one or ABSENT) for row, one in zip(rows, speeds, strict=True)]
    lossy = [", ".join(lossy_words(point.config)) for point in planned]
    if any(lossy):
        header, rows = (*header, "lossy"), [(*row, text or "exact") for row, text in zip(rows, lossy, strict=True)]
    return Table(header, tuple(rows), names=2, drops=(*STATES, "activations"))


def _plan_row(point: Planned) -> tuple[str, ...]:
    known = point.predicted.get("activations")
    sizes = [point.predicted.get(name) for name in (*STATES, "needed")]
    *states, needed = map(size, sizes)
    return (point.label, word(point.decision, "to run"), *states, size(known["kept"]) if known else ABSENT, needed)


def word(state: RunState, queued: str = "queued") -> str:
    """The text for a state or a decision in tables and reports. Records, --json and csv files have `state.value`."""
    return {RunState.queued: queued, RunState.cached: "reused"}.get(state, state.value)


def plan_rows(planned: Sequence[Planned]) -> list[Row]:
    """Counts the points of each decision, with the reason: next to the count if there is one, else in separate rows."""
    rows = []
    for state in RunState:
        points = [point for point in planned if point.decision is state]
        if not points:
            continue
        reasons = Counter(point.reason for point in points if point.reason)
        names = ", ".join(point.label for point in points[:NAMED])
        names += f" and {len(points) - NAMED} more" if len(points) > NAMED else ""
        reason = f": {next(iter(reasons))}" if len(reasons) == 1 else ""
        rows.append(Row(word(state, "to run"), f"{len(points)}   {names}{reason}"))
        rows += _reason_rows(points) if len(reasons) > 1 else []
    rows += extras.places().costs([point.config for point in planned if point.decision is RunState.queued])
    needless = [f"{point.label}: {text}" for point in planned if (text := point.predicted.get("offload_needless"))]
    rows += [Row("note", text) for text in needless[:NAMED]]
    for key, what in (("unknown", "the memory"), ("activations_unknown", "activations"), ("attention", "attention")):
        told = Counter(point.predicted[key] for point in planned if point.predicted.get(key))
        name = "note" if key == "attention" else "unknown"
        rows += [Row(name, f"{what} of {many(count, 'point')}: {text}") for text, count in told.items()]
    return rows


def hardware_rows(planned: Sequence[Planned]) -> list[Row]:
    """A row for each kind of nodes that points describe, with the number of its points if there are others."""
    kinds = Counter(text for point in planned if (text := _hardware_text(point.config)))
    all_alike = set(kinds.values()) == {len(planned)}
    texts = [text if all_alike else f"{text} ({many(count, 'point')})" for text, count in kinds.items()]
    return [Row("" if number else "hardware", text) for number, text in enumerate(texts)]


def _hardware_text(config: Mapping[str, Any]) -> str:
    """The nodes that a point describes; empty if it is to run on this machine, or was refused."""
    node, resources = config.get("hardware") or {}, config.get("resources") or {}
    if not node.get("gpus"):
        return ""
    memory = f"{size(node['memory_mib'] << 20)} each" if node["memory_mib"] else "memory not known"
    nodes = f"{many(resources['nodes'], 'node')} of {many(node['gpus'], 'GPU')}"
    return f"{node['name']}, as described: {many(resources['ranks'], 'rank')} on {nodes}, {memory}"


def _reason_rows(points: Sequence[Planned]) -> list[Row]:
    by_reason = grouped((point.reason, point.label) for point in points)
    rows = [Row("", f"    {', '.join(labels)}: {reason}") for reason, labels in by_reason.items() if reason]
    more = len(rows) - PLAN_REASONS
    return rows if more <= 0 else [*rows[:PLAN_REASONS], Row("", f"    and {more} more; --json lists all of them")]


HEADER = ("point", "state", "slots", "states/rank", "peak/rank", "tokens/s", "note")
DROPS = ("slots", "states/rank", "peak/rank")


def standing_table(standings: Sequence[Standing]) -> Table:
    """One row per point, in the order of the sweep."""
    rows = tuple(map(standing_row, standings))
    unknown = [name for at, name in enumerate(HEADER) if name in DROPS and all(row[at] == ABSENT for row in rows)]
    return Table(HEADER, rows, names=3, drops=tuple(dict.fromkeys((*unknown, *DROPS))), texts=("note",))


def standing_row(point: Standing) -> tuple[str, ...]:
    """A point as cells. The speed of a running one is that of its latest steps."""
    result, running = point.result, progress_of(point)
    speed = ABSENT if running is None else digits(running.tokens_per_second)
    speed = digits(ranking.tokens_per_second(result)) if result else speed
    states = ranking.states_bytes(result) if result else point.planned.predicted_bytes
    peak = size(ranking.peak_bytes(result)) if result else ABSENT
    notes = (f"job {point.job}" if point.job else "", shortened(point.message) if running is None else running.text)
    note = ", ".join(filter(None, notes))
    return (point.label, word(point.state), ",".join(point.slots) or ABSENT, size(states), peak, speed, note)


def progress_of(point: Standing) -> StepProgress | None:
    """How far a running point is; None if it does not run."""
    if point.state is not RunState.running or point.attempt is None:
        return None
    return progress(EventTail.of_the_end(point.attempt.metrics).read_new(), point.planned.config)


def running_text(standings: Sequence[Standing]) -> str:
    """The progress of the running points in one line, which stays short where many of them wait for their turns."""
    running = [(point, found) for point in standings if (found := progress_of(point)) is not None]
    at_work = [
        f"{point.label} {found.text}, {digits(found.tokens_per_second)} tokens/s"
        for point, found in running
        if not found.waits
    ]
    waiting = len(running) - len(at_work)
    turns = [f"{waiting} wait for their turns", left_text(standings)] if waiting else []
    return "; ".join([*at_work, *filter(None, turns)])


def left_text(standings: Sequence[Standing]) -> str:
    """The time of the steps that are left of points that take turns, on the slots that have the most of it; empty if no
    point waits for its turn."""
    running = [(point.slots, found) for point in standings if (found := progress_of(point)) is not None]
    left_s = [sum(other.left_s or 0.0 for at, other in running if at == slots) for slots, _ in running]
    return f"{duration(max(left_s))} of steps left in all" if any(found.waits for _, found in running) else ""


def shortened(message: str) -> str:
    """The beginning of a message in one line."""
    text = " ".join(message.split())
    return text if len(text) <= REASONS_SHOWN else text[: REASONS_SHOWN - 1] + "…"


def counts(standings: Sequence[Standing]) -> str:
    """The number of points in each state, such as "2 ok, 1 oom, 1 running, 2 queued"."""
    numbers = Counter(point.state for point in standings)
    return ", ".join(f"{numbers[state]} {word(state)}" for state in RunState if state in numbers) or "no points"


def next_row(sweep: SweepPaths, standings: Sequence[Standing], *, runs: bool) -> Row:
    """A useful next command: watch a running sweep, resume one, retry failed points, or measure the best longer."""
    failed = sorted({point.state.value for point in standings if not point.state.answered and point.state.kept})
    left = [point for point in standings if not point.state.answered and not point.state.kept]
    if runs:
        return Row("next", verb("watch", sweep.root))
    if left:
        return Row("next", f"{verb('resume', sweep.root)}     # {many(len(left), 'point')} left")
    if failed:
        return Row("next", f"{verb('retry', sweep.root)} --retry {','.join(failed)}")
    from orchestrator.report import comparison  # imported here: it draws, and the screen needs this file at its start

    ranked = comparison.ranked(sweep)
    command = (read_or_warn(sweep.sweep, SWEEP) or {}).get("command")
    are_unranked = sum(row.is_measured and not row.apart for row in ranked) > 1
    are_unranked = are_unranked and all(row.place != 1 for row in ranked)
    if command and are_unranked and not (ranking.evaluates(ranked) or ranking.trains(ranked)):
        is_judged = not any(row.more_rounds for row in ranked)
        longer = ranking.standard(command) if is_judged else ranking.with_more_rounds(command, ranked)
        return Row("next", f"{program()} {shlex.join(longer)}")
    if len({row.entry.config["resources"].get("code") for row in ranked if row.is_measured}) > 1:
        return Row("next", f"{verb('compare', sweep.root)} --by resources.code")
    return Row("next", ranking.next_after_sweep(ranked))


def document(sweep: SweepPaths, standings: Sequence[Standing]) -> str:
    """The state of the sweep as one JSON document, the same for every verb and for the sweep's own command."""
    from orchestrator.report import comparison

    ranked = {row.entry.label: row for row in comparison.ranked(sweep)}
    points = [
        {**as_json(point), **_standing(ranked[point.label])} if point.label in ranked else as_json(point)
        for point in standings
    ]
    metric = next((row.metric for row in ranked.values()), None)
    runs = still_runs(sweep, standings)
    files = {"report": str(sweep.report), "page": str(sweep.page), "numbers": str(sweep.results)}
    content = {"sweep": sweep.name, "running": runs, "rank_by": metric, "points": points, **files}
    return json.dumps(content, ensure_ascii=False)


def _standing(row: ranking.Ranked) -> dict[str, Any]:
    named = {name: text for name, text in (("apart", row.apart), ("table", row.table)) if text}
    return {"place": row.place, "tied": row.tied, **named}


def as_json(point: Standing) -> dict[str, Any]:
    """A point as JSON data."""
    return {
        "label": point.label,
        "state": point.state.value,
        "message": point.message,
        "overrides": list(point.planned.overrides),
        "point": point.planned.point,
        "config": point.planned.config,
        "attempt": str(point.attempt.root) if point.attempt else None,
        "differs": point.planned.differs,
        "slots": list(point.slots),
        "job": point.job or None,
        "predicted_states_bytes": point.planned.predicted_bytes,
        "predicted": point.planned.predicted,
        "result": point.result,
    }
