"""A sweep as rows of text: its plan before anything starts, and the state of each point afterwards. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.records.record_file import EventTail
from orchestrator.records.run_state import RunState
from orchestrator.records.sweep_record import Planned, Standing, SweepPaths
from orchestrator.report import comparison, ranking
from orchestrator.report.summary import Row, Table
from orchestrator.text.paths import verb
from orchestrator.text.units import ABSENT, digits, many, size

STYLES = {
    RunState.ok: "green",
    RunState.tight: "yellow",
    RunState.cached: "green",
    RunState.running: "bold",
    RunState.starting: "bold",
    RunState.oom: "yellow",
    RunState.oom_host: "yellow",
    RunState.refused: "dim",
    RunState.pruned: "dim",
    RunState.queued: "dim",
    RunState.cancelled: "dim",
}
REASONS_SHOWN = 60
PLAN_REASONS = 8
STATES = ("params", "grads", "optimizer")
PLAN_HEADER = ("point", "decision", *STATES, "activations", "needs/rank")
NAMED = 4  # points of a decision that are listed by name


def plan_table(planned: Sequence[Planned]) -> Table:
    """Every point with its decision. The reasons are in `plan_rows`."""
    return Table(PLAN_HEADER, tuple(_plan_row(one) for one in planned), names=2)


def _plan_row(one: Planned) -> tuple[str, ...]:
    known = one.predicted.get("activations")
    sizes = [one.predicted.get(name) for name in (*STATES, "needed")]
    *states, needed = map(size, sizes)
    return (one.label, word(one.decision), *states, size(known["kept"]) if known else ABSENT, needed)


def word(state: RunState) -> str:
    """The text for a decision."""
    return "to run" if state is RunState.queued else state.value


def plan_rows(planned: Sequence[Planned]) -> list[Row]:
    """Counts the points of each decision, with the reason: next to the count if there is one, else in separate rows."""
    rows = []
    for state in RunState:
        found = [one for one in planned if one.decision is state]
        if not found:
            continue
        reasons = Counter(one.reason for one in found if one.reason)
        names = ", ".join(one.label for one in found[:NAMED])
        names += f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
        reason = f": {next(iter(reasons))}" if len(reasons) == 1 else ""
        rows.append(Row(word(state), f"{len(found)}   {names}{reason}"))
        rows += _reason_rows(found) if len(reasons) > 1 else []
    unknown = Counter(
        one.predicted["activations_unknown"] for one in planned if one.predicted.get("activations_unknown")
    )
    rows += [Row("unknown", f"activations of {count} points: {reason}") for reason, count in unknown.items()]
    return rows


def _reason_rows(found: Sequence[Planned]) -> list[Row]:
    by_reason: dict[str, list[str]] = {}
    for one in found:
        by_reason.setdefault(one.reason, []).append(one.label)
    told = [Row("", f"    {', '.join(labels)}: {reason}") for reason, labels in by_reason.items() if reason]
    more = len(told) - PLAN_REASONS
    return told if more <= 0 else [*told[:PLAN_REASONS], Row("", f"    and {more} more; --json tells them all")]


HEADER = ("point", "state", "slots", "states/rank", "peak/rank", "tokens/s", "note")


def standing_table(standings: Sequence[Standing]) -> Table:
    """One row per point, in the order of the sweep."""
    return Table(HEADER, tuple(standing_row(one) for one in standings), names=3)


def standing_row(one: Standing) -> tuple[str, ...]:
    result = one.result()
    speed = digits(result["throughput"]["tokens_per_second"]["median"]) if result else ABSENT
    states = ranking.states_bytes(result) if result else one.planned.predicted_bytes
    peak = size(ranking.peak_bytes(result)) if result else ABSENT
    return (one.label, one.state.value, ",".join(one.slots) or ABSENT, size(states), peak, speed, note(one))


def note(one: Standing) -> str:
    """A short note: the progress of a running point, else the reason for its state."""
    if one.state is RunState.running and one.attempt is not None:
        return progress(EventTail.of_the_end(one.attempt.metrics).read_new(), one.planned.config)
    text = " ".join(one.message.split())
    return text if len(text) <= REASONS_SHOWN else text[: REASONS_SHOWN - 1] + "…"


def progress(events: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> str:
    """The progress of a run, such as "warm-up 3/5" or "measuring 12/25"."""
    steps = [event for event in events if event["event"] == "step"]
    if not steps:
        return "building" if not events else "ready"
    warmup, counted = config["measure"]["warmup_steps"], config["measure"]["steps"]
    done = steps[-1]["step"]
    if steps[-1]["warmup"]:
        return f"warm-up {done}/{warmup}"
    if any(event["event"] == "validation" for event in events) or done >= warmup + counted:
        return "ending"
    return f"measuring {done - warmup}/{counted}"


def counts(standings: Sequence[Standing]) -> str:
    """The number of points in each state, such as "2 ok, 1 oom, 1 running, 2 queued"."""
    found = Counter(one.state for one in standings)
    return ", ".join(f"{found[state]} {state.value}" for state in RunState if state in found) or "no points"


def next_row(sweep: SweepPaths, found: Sequence[Standing], *, runs: bool) -> Row:
    """A useful next command: watch a running sweep, resume one, retry failed points, or measure the best longer."""
    failed = sorted({one.state.value for one in found if not one.state.answered and one.state.kept})
    left = [one for one in found if not one.state.answered and not one.state.kept]
    if runs:
        return Row("next", verb("watch", sweep.root))
    if left:
        return Row("next", f"{verb('resume', sweep.root)}     ({many(len(left), 'point')} left)")
    if failed:
        return Row("next", f"{verb('retry', sweep.root)} --retry {','.join(failed)}")
    return Row("next", ranking.next_after_sweep(comparison.ranked(sweep)))


def document(sweep: SweepPaths, found: Sequence[Standing], *, runs: bool) -> str:
    """The state of the sweep as one JSON document, the same for every verb and for the sweep's own command."""
    ranked = {one.entry.label: one for one in comparison.ranked(sweep)}
    points = [
        {**as_json(one), "place": ranked[one.label].place, "tied": ranked[one.label].tied}
        if one.label in ranked
        else as_json(one)
        for one in found
    ]
    metric = next((one.metric for one in ranked.values()), None)
    files = {"report": str(sweep.report), "numbers": str(sweep.results)}
    whole = {"sweep": sweep.name, "running": runs, "rank_by": metric, "points": points, **files}
    return json.dumps(whole, ensure_ascii=False)


def as_json(one: Standing) -> dict[str, Any]:
    """A point as JSON data."""
    return {
        "label": one.label,
        "state": one.state.value,
        "message": one.message,
        "overrides": list(one.planned.overrides),
        "point": one.planned.point,
        "attempt": str(one.attempt.root) if one.attempt else None,
        "slots": list(one.slots),
        "job": one.job or None,
        "predicted_states_bytes": one.planned.predicted_bytes,
        "predicted": one.planned.predicted,
        "result": one.result(),
    }
