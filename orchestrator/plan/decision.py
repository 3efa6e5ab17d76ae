"""Decides about each point before anything starts: run it, keep its existing answer, prune it, or refuse it.

Apart from its arguments, a decision depends only on the records and on the contents of the files that a point reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from orchestrator.config.schema import RunConfig, to_dict
from orchestrator.config.strict import Broken
from orchestrator.plan import fit
from orchestrator.plan.moments import on_device, worst
from orchestrator.plan.point import Point
from orchestrator.plan.speed import Speed
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
from orchestrator.records.run_state import RETRIED, RunState
from orchestrator.records.sweep_record import Planned
from orchestrator.rounds.recorded import is_ranked, used_rounds
from orchestrator.text.units import size
from zero_runtime.memory.activation_count import ActivationBytes
from zero_runtime.memory.counted_unit import OPTIMIZER
from zero_runtime.memory.device_overhead import NO_OVERHEAD, DeviceOverhead
from zero_runtime.memory.model import StateBytes
from zero_runtime.memory.outside_step import MomentBytes
from zero_runtime.memory.step_memory import Peak

# Parts of a peak, where no table shows what they are parts of.
IN_FULL = {
    fit.STATES[OPTIMIZER]: "optimizer states and masters",
    fit.BLOCKS: "activations of the blocks",
    fit.OUTSIDE: "embedding, head and loss",
    fit.BACKWARD: "gradients of activations",
}
STEP = "a step"  # the name of its moment


@dataclass(frozen=True)
class Wishes:
    """What the user asks for. fresh: run all points again. retry: run points again whose kept answer is one of these
    states. prune: leave out points that cannot fit into memory. anchor: the label of a point that is measured once more
    if its answer is kept; empty: the first one of an earlier day, if there is one."""

    fresh: bool = False
    retry: frozenset[RunState] = frozenset()
    prune: bool = True
    anchor: str = ""


@dataclass(frozen=True)
class Refused:
    """A point that breaks rules, and the rules that it breaks."""

    label: str
    overrides: tuple[str, ...]
    broken: tuple[Broken, ...]


@dataclass(frozen=True)
class Prediction:
    """The predicted memory of one rank in bytes, and the limit for a rank or for all ranks together.

    limit_bytes: None if it is not known. activations: None if they cannot be counted; `unknown` says
    why. overhead: the memory of CUDA, NCCL and cuBLAS. peak: the worst moment of a step, if the activations
    were traced. speed: of a step, if what it needs was measured here. remedies: overrides with which the point fits, if
    they were searched for (`advised`). host_bytes: of a rank's host memory in a step. outside: the moments outside of
    steps that the run meets. on_host: the ranks compute in host memory. ranks_per_node, host_limit_bytes: ranks of a
    node, and the host memory for them; None if it is not known, or is what the ranks compute in.
    """

    states: StateBytes
    limit_bytes: int | None
    ranks_share: int = 1  # ranks that share the limit
    activations: ActivationBytes | None = None
    unknown: str = ""
    overhead: DeviceOverhead = NO_OVERHEAD
    peak: Peak | None = None
    speed: Speed | None = None
    remedies: tuple[str, ...] = ()
    advised: bool = False
    host_bytes: int = 0
    outside: tuple[MomentBytes, ...] = ()
    on_host: bool = False
    ranks_per_node: int = 1
    host_limit_bytes: int | None = None

    @property
    def moments(self) -> list[MomentBytes]:
        """The worst moment of a step, if the activations were traced, and those outside of steps."""
        if self.peak is None:
            return []
        return [MomentBytes(STEP, self.peak.total, self.host_bytes, self.peak.when), *self.outside]

    @property
    def worst(self) -> MomentBytes | None:
        """The moment that decides about the memory that the ranks compute in."""
        return worst(self.moments, shared=self.on_host)

    @property
    def _most_bytes(self) -> int:
        """At the worst moment; only of model states if the activations are not counted."""
        found = self.worst
        return self.states.total if found is None else on_device(found, shared=self.on_host)

    @property
    def needed_bytes(self) -> int:
        """The bytes that a rank holds at the worst moment that the run meets, with the least that libraries take; only
        of model states if the activations are not counted."""
        return self._most_bytes + self.overhead.least

    @property
    def ceiling_bytes(self) -> int | None:
        """The same with the most that libraries take, but without the buffers of kernels; None if the activations are
        not counted."""
        return None if self.peak is None else self._most_bytes + self.overhead.most

    @property
    def host_needed(self) -> MomentBytes | None:
        """The moment with the most bytes in a rank's host memory, where that is separate."""
        return None if self.on_host else max(self.moments, key=lambda one: one.host, default=None)

    @property
    def cannot_fit(self) -> bool:
        too_large = self.limit_bytes is not None and self.needed_bytes * self.ranks_share > self.limit_bytes
        return too_large or self.host_lacks

    @property
    def host_lacks(self) -> bool:
        """Whether a node has not enough host memory for its ranks."""
        host = self.host_needed
        limit = self.host_limit_bytes
        return host is not None and limit is not None and host.host * self.ranks_per_node > limit

    def to_dict(self) -> dict[str, Any]:
        """The prediction as plain data, for records and other programs."""
        states = {name: size for name, size in asdict(self.states).items() if name != "padding"}
        return {
            **states,
            "activations": asdict(self.activations) if self.activations else None,
            "activations_unknown": self.unknown,
            "needed": self.needed_bytes,
            "at_most": self.ceiling_bytes,
            **({"peak": asdict(self.peak)} if self.peak is not None else {}),
            **({"moments": [asdict(one) for one in self.moments]} if self.peak is not None else {}),
            **({"speed": self.speed.to_dict()} if self.speed is not None else {}),
            "limit": self.limit_bytes,
            "ranks_share": self.ranks_share,
            **({"device_overhead": asdict(self.overhead)} if self.overhead.most else {}),
        }


def retry_states(text: str) -> frozenset[RunState]:
    """The states in a text such as "error,oom". ValueError names the states that can be retried."""
    words = [word.strip() for word in text.split(",")]
    if unknown := [word for word in words if word not in RETRIED]:
        raise ValueError(f"--retry {','.join(unknown)}: expected some of {','.join(RETRIED)}")
    return frozenset(RunState(word) for word in words)


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
    if not any(point.decision is RunState.queued for point in planned) or set(days.values()) <= {today}:
        return planned
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
    held = contents.of(config, known)
    identity = point_id(config, point.config.resources.ranks, hardware, held)
    plan = Planned(point.label, point.overrides, RunState.queued, identity, config, contents=held)
    if prediction is None:
        return plan
    return replace(plan, predicted_bytes=prediction.states.total, predicted=prediction.to_dict())


def _decided(plan: Planned, output: Path, wishes: Wishes, prediction: Prediction | None) -> Planned:
    kept = None if wishes.fresh else _kept(output, plan.point, plan.config["measure"].get("rounds", 1))
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
        return replace(plan, decision=RunState.pruned, reason=cannot_fit(prediction))
    return plan if wishes.fresh or kept is not None else replace(plan, reason=_why_again(plan, output))


def cannot_fit(prediction: Prediction) -> str:
    """The reason why a point is pruned: its predicted bytes and the limit, and settings that would fit."""
    share = f"{prediction.ranks_share} x " if prediction.ranks_share > 1 else ""
    states, limit = prediction.states, size(prediction.limit_bytes)
    overhead = _overhead_text(prediction.overhead)
    text = f"the model states alone, {share}{size(states.total)}, are more than {limit}"
    if overhead and states.total <= (prediction.limit_bytes or 0):
        text = f"the model states, {size(states.total)}, with {overhead} are more than {limit}"
    if prediction.worst is not None:
        text = _too_large(prediction, share, limit)
    if not prediction.advised:
        return text
    would = (
        f"would fit: {'   or   '.join(prediction.remedies[:3])}" if prediction.remedies else "no single setting fits"
    )
    return f"{text}; {would}"


def _too_large(prediction: Prediction, share: str, limit: str) -> str:
    """The worst moment of a run that is too large, and what its bytes are."""
    peak, moment, host = prediction.peak, prediction.worst, prediction.host_needed
    assert peak is not None
    assert moment is not None
    if host is not None and prediction.host_lacks:
        of_node = f"{prediction.ranks_per_node} x {size(host.host)}"
        return f"needs {of_node} of host memory {_at(host)}, more than a node's {size(prediction.host_limit_bytes)}"
    needs = f"needs {share}{size(prediction.needed_bytes)} {_at(moment)}, more than {limit}"
    if moment.name != STEP:
        return needs
    large = [(name, count) for name, count in fit.parts(peak) if count * 100 >= peak.total]
    listed = [f"{IN_FULL.get(name, name)} {size(count)}" for name, count in large]
    listed += [f"host buffers of offload {size(moment.host)}"] * (prediction.on_host and moment.host > 0)
    overhead = _overhead_text(prediction.overhead)
    return f"{needs}: {', '.join([*listed, *[overhead] * bool(overhead)])}"


def _at(moment: MomentBytes) -> str:
    """When a moment is, as the end of a sentence."""
    return moment.why if moment.name == STEP else f"while {moment.name} ({moment.why})"


def expected(prediction: Prediction) -> str:
    """The prediction of a single run in one line; what it could not include is said."""
    peak, overhead, limit = prediction.peak, prediction.overhead, prediction.limit_bytes
    libraries = f", CUDA, cuBLAS and NCCL {size(overhead.least)} to {size(overhead.most)}" if overhead.most else ""
    shared = f" for {prediction.ranks_share} ranks" if prediction.ranks_share > 1 else ""
    room = f"; the limit is {size(limit)}{shared}" if limit is not None else "; the limit is not known"
    if peak is None:
        unknown = f"activations are not predicted: {prediction.unknown}"
        return f"{size(prediction.states.total)} of model states a rank{libraries}{room}; {unknown}"
    moment = prediction.worst
    assert moment is not None
    nbytes = on_device(moment, shared=prediction.on_host)
    return f"a peak of {size(nbytes)} of tensors a rank, {_at(moment)}{libraries}{room}"


def _overhead_text(overhead: DeviceOverhead) -> str:
    if not overhead.most:
        return ""
    return f"an allowance of {size(overhead.least)} for CUDA, cuBLAS and {overhead.communicators} NCCL communicators"


def _kept(output: Path, identity: str, rounds: int) -> tuple[AttemptPaths, RunState] | None:
    """The newest valid measurement of the point, else its newest other answer; None if there is neither.

    A sweep that was stopped may leave a result with some of its rounds, which is no answer.
    """
    attempts = [(attempt, settle(attempt)) for attempt in attempts_at(output, identity)]
    measured = (answer for answer in attempts if answer[1].measured and _is_complete(answer[0], rounds))
    answers = (answer for answer in attempts if answer[1].kept and not answer[1].measured)
    return next(chain(measured, answers), None)


def _is_complete(attempt: AttemptPaths, rounds: int) -> bool:
    if not is_answer(attempt):
        return False
    result = result_of(attempt)
    # One round: every result has it, also those that were written before there were rounds.
    return rounds == 1 or len(used_rounds(result)) >= min(rounds, result["throughput"]["steps_counted"])


def _why_again(plan: Planned, output: Path) -> str:
    """Why an earlier measurement of the same configuration is not reused; empty if there is none."""
    for attempt in all_attempts(output, plan.point) if plan.contents else ():
        facts = read_or_warn(attempt.state, STATE)
        if facts is None or not settle(attempt).measured:
            continue
        before = facts.get("contents")
        if before is None:
            return f"measured on {_day(facts)}, before the contents of its files were recorded"
        changed = [
            contents.place(name, plan.config) for name in plan.contents if plan.contents[name] != before.get(name)
        ]
        return f"{' and '.join(changed)} changed since it was measured on {_day(facts)}"
    return ""


def _day(facts: Mapping[str, Any]) -> str:
    return _date(facts.get("time", 0))


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
