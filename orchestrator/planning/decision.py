"""Decides about each point that breaks no rule: run it, keep its answer, or leave it out because it cannot fit.

Apart from its arguments, a decision depends only on the records and on the contents of the files that a point reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from orchestrator.config.schema import RunConfig, to_dict
from orchestrator.planning.point import Point, Refused, Wishes
from orchestrator.planning.predictor import Prediction
from orchestrator.records import contents, versions
from orchestrator.records.record_file import read_or_warn
from orchestrator.records.record_shapes import STATE
from orchestrator.records.run_record import (
    AttemptPaths,
    all_attempts,
    attempts_at,
    is_answer,
    point_id,
    result_of,
    settle,
)
from orchestrator.records.run_state import RunState
from orchestrator.records.sweep_record import Planned
from orchestrator.rounds.recorded import is_ranked, used_rounds


def decide(
    points: Sequence[Point | Refused],
    output: Path,
    name_of: Callable[[RunConfig], str],
    wishes: Wishes,
    predictions: Mapping[str, Prediction],
) -> list[Planned]:
    """The plan, in the order of the points.

    name_of: the name of the hardware that a configuration is measured on. predictions: by label; points may lack one.
    """
    planned = []
    known: contents.Known = {}
    for point in points:
        if isinstance(point, Refused):
            reason = "; ".join(map(str, point.broken))
            planned.append(Planned(point.label, point.overrides, RunState.refused, reason=reason))
        else:
            plan = _identified(point, name_of(point.config), known, predictions.get(point.label))
            planned.append(_decided(plan, output, wishes, predictions.get(point.label)))
    planned = _anchored(planned, output, wishes.anchor)
    return _pruned_by_family(planned) if wishes.prune else planned


def _anchored(planned: list[Planned], output: Path, label: str) -> list[Planned]:
    """The plan with its anchor, if points are measured today and others are kept from an earlier day: a kept point that
    is measured once more, whose change ties the rows of that day to those of today.

    It is the first kept point, or one that was measured again today. Points without enough rounds show no change.
    label: the point that is the anchor, whenever it was measured; empty if none is named.
    """
    if label:
        return [_again(point, "named by --anchor") if point.label == label else point for point in planned]
    today = _date(time.time())
    kept = [point for point in planned if point.decision is RunState.cached]
    dated = [(point, result) for point in kept if is_ranked(result := result_of(AttemptPaths(Path(point.attempt))))]
    days = {point.label: _date(result["measured_at"]) for point, result in dated if result.get("measured_at")}
    # An anchor ties rows of two days together: there must be rows of both.
    if not any(point.decision is RunState.queued for point in planned) or set(days.values()) <= {today}:
        return planned
    # A point that was measured on both days is an anchor already, and nothing has to be measured again.
    for point in (one for one in kept if days.get(one.label) == today):
        if earlier := _of_an_earlier_day(point, output, today):
            return [replace(one, anchor=earlier) if one is point else one for one in planned]
    anchor = next(point for point in kept if days.get(point.label, today) != today)
    again = _again(anchor, f"measured on {days[anchor.label]}")
    return [again if one is anchor else one for one in planned]


def _again(point: Planned, why: str) -> Planned:
    """A point whose answer is kept, as an anchor; any other as it is."""
    if point.decision is not RunState.cached:
        return point
    reason = f"the anchor: {why}, and measured once more to see what changed since"
    return replace(point, decision=RunState.queued, reason=reason, attempt="", anchor=point.attempt, differs={})


def _of_an_earlier_day(point: Planned, output: Path, today: str) -> str:
    """The folder of the newest attempt at a point that measured it before today; empty if there is none."""
    for attempt in attempts_at(output, point.point):
        result = read_or_warn(attempt.result) or {}
        if is_ranked(result) and _date(result.get("measured_at", time.time())) != today:
            return str(attempt.root)
    return ""


def _date(when: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(when))


def _identified(point: Point, hardware: str, known: contents.Known, prediction: Prediction | None) -> Planned:
    config = to_dict(point.config)
    # By contents, not by path: changed data would be answered with old measurements. The code is no part of the
    # identity, or every edit would measure everything again, unasked.
    held = contents.of(config, known)
    identity = point_id(config, point.config.resources.ranks, hardware, held)
    plan = Planned(point.label, point.overrides, RunState.queued, identity, config, contents=held)
    if prediction is None:
        return plan
    return replace(plan, predicted_bytes=prediction.states_bytes, predicted=prediction.record)


def _decided(plan: Planned, output: Path, wishes: Wishes, prediction: Prediction | None) -> Planned:
    kept = None if wishes.fresh else _kept(output, plan.point, plan.config["measure"]["rounds"])
    # Records come before predictions: what was measured is not left out because it is predicted not to fit.
    if kept is not None and kept[1] not in wishes.retry:
        attempt, state = kept
        differs = versions.differing(attempt, plan.config)
        return replace(
            plan,
            decision=RunState.cached if state.measured else state,
            attempt=str(attempt.root),
            reason=_when(attempt, state, versions.words(differs)),
            differs=differs,
        )
    if wishes.prune and prediction is not None and prediction.cannot_fit:
        return replace(plan, decision=RunState.pruned, reason=prediction.cannot_fit)
    return plan if wishes.fresh or kept is not None else replace(plan, reason=_why_again(plan, output))


def _kept(output: Path, identity: str, rounds: int) -> tuple[AttemptPaths, RunState] | None:
    """The newest valid measurement of the point, else its newest other answer; None if there is neither.

    A sweep that was stopped may leave a result with some of its rounds, which is no answer.
    """
    attempts = [(attempt, settle(attempt)) for attempt in attempts_at(output, identity)]
    measured = (answer for answer in attempts if answer[1].measured and _is_complete(answer[0], rounds))
    answers = (answer for answer in attempts if answer[1].kept and not answer[1].measured)
    # A failure after an edit or an upgrade does not take back what was measured before.
    return next(chain(measured, answers), None)


def _is_complete(attempt: AttemptPaths, rounds: int) -> bool:
    if not is_answer(attempt):
        return False
    result = result_of(attempt)
    # One round: every result has it, also that of an evaluation, which records none.
    return rounds == 1 or len(used_rounds(result)) >= min(rounds, result["throughput"]["steps_counted"])


def _why_again(plan: Planned, output: Path) -> str:
    """Why an earlier measurement of the same configuration is not reused; empty if there is none."""
    for attempt in all_attempts(output, plan.point) if plan.contents else ():
        facts = read_or_warn(attempt.state, STATE)
        if facts is None or not settle(attempt).measured:
            continue
        before = facts["contents"]
        changed = [
            contents.place(name, plan.config) for name in plan.contents if plan.contents[name] != before.get(name)
        ]
        return f"{' and '.join(changed)} changed since it was measured on {_day(facts)}"
    return ""


def _day(facts: Mapping[str, Any]) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(facts.get("time", 0)))


def _when(attempt: AttemptPaths, state: RunState, differs: str) -> str:
    """Since when there is this answer, and with what it was made that a run of now would not be."""
    facts = read_or_warn(attempt.state, STATE) or {}
    if not state.measured:
        made = f"on {_day(facts)} with {differs}; --retry {state.value} to run it again"
        return "; ".join(filter(None, (str(facts.get("message", "")), made if differs else "")))
    commit = ((read_or_warn(attempt.result) or {}).get("environment") or {}).get("git")
    code = f", code {commit}" if commit else ""
    other = f", {differs}" if differs else ""
    return f"measured on {_day(facts)}{code}{other}; --fresh to measure again"


def family(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that points of one family share: all but the batch, that is, the amount computed at a time."""
    return {key: value for key, value in config.items() if key != "batch"}


def is_larger(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether `one` has a larger micro-batch or sequence length than `other`, and neither is smaller."""
    left, right = one["batch"], other["batch"]
    pairs = [(left[key], right[key]) for key in ("micro", "seq")]
    return all(a >= b for a, b in pairs) and any(a > b for a, b in pairs)


def outgrown(planned: Planned, failed: Mapping[str, Any]) -> bool:
    """Whether the point is a larger one of the same family as the configuration `failed`."""
    # With all else equal only the batch grows, and no part of a step's memory becomes smaller by that.
    return bool(planned.config) and is_larger(planned.config, failed) and family(planned.config) == family(failed)


def _pruned_by_family(planned: Sequence[Planned]) -> list[Planned]:
    out_of_memory = [point for point in planned if point.decision in (RunState.oom, RunState.oom_host)]
    done = []
    for point in planned:
        smaller = [other for other in out_of_memory if outgrown(point, other.config)]
        if point.decision is RunState.queued and smaller:
            point = replace(point, decision=RunState.pruned, reason=smaller_failed(smaller[0].label))
        done.append(point)
    return done


def smaller_failed(label: str) -> str:
    """The reason why a point is pruned after a smaller point of its family was out of memory."""
    return f"{label}, which is smaller, was out of memory; --prune off runs it anyway"
