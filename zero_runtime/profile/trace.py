"""Reads the profiler's trace of one step: which phase and module each moment belongs to, and every allocation.

Standard library only. Times are microseconds of the trace; a trace is the content of a Chrome trace file.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

STEP = "zlab step"
PHASE = "zlab phase: "
MODULE = "zlab module: "
SAMPLE = "zlab sample: "
COMMUNICATION = "communication_exposed"
FORWARD, RECOMPUTE, BACKWARD, OUTSIDE = "forward", "recompute", "backward", "outside"
_NODE = "autograd::engine::evaluate_function: "
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
GATHERED = "gradients and reductions"  # nodes that hand a parameter's gradient over
LOSS = "loss and the rest of"
_DEVICES = {"cpu": 0, "cuda": 1}  # the trace's numbers of kinds of devices


class Context(NamedTuple):
    """What a moment belongs to. module: the innermost; None outside of all. way: FORWARD, RECOMPUTE or BACKWARD of the
    module, or OUTSIDE."""

    phase: str = ""
    module: str | None = None
    way: str = OUTSIDE


class MemoryEvent(NamedTuple):
    """nbytes more at `address`, or fewer if negative. total: the bytes that the allocator counts after it."""

    at_us: float
    address: int
    nbytes: int
    total: int
    context: Context


class TraceStep(NamedTuple):
    """One step of a trace. changes: by thread, each moment from which another context holds."""

    start_us: float
    end_us: float
    changes: Mapping[Any, tuple[Sequence[float], Sequence[Context]]]
    events: Sequence[Mapping[str, Any]]

    def context_at(self, thread: Any, at_us: float) -> Context:
        """The context of a thread at a moment."""
        times, contexts = self.changes.get(thread, ((), ()))
        place = bisect_right(times, at_us) - 1
        return contexts[place] if place >= 0 else Context()


def read_step(trace: Mapping[str, Any], module_of: Callable[[int], str | None]) -> TraceStep:
    """The step of a trace that has one. module_of: the module that made autograd's node of a number."""
    # A trace of a GPU has each range twice: as the host opened it, and as its kernels ran.
    events = [event for event in trace["traceEvents"] if event.get("cat") != "gpu_user_annotation"]
    step = next(one for one in events if one.get("ph") == "X" and one.get("name") == STEP)
    spans: dict[Any, list[Mapping[str, Any]]] = {}
    for event in events:
        if event.get("ph") == "X" and _is_range(event["name"]):
            spans.setdefault(event["tid"], []).append(event)
    changes = {thread: _changes(found, module_of) for thread, found in spans.items()}
    return TraceStep(step["ts"], step["ts"] + step["dur"], changes, events)


def _is_range(name: str) -> bool:
    return name.startswith((PHASE, MODULE, _NODE))


def _changes(
    spans: list[Mapping[str, Any]], module_of: Callable[[int], str | None]
) -> tuple[list[float], list[Context]]:
    """The moments of a thread from which another context holds, with the contexts. Ranges of a thread are nested."""
    spans.sort(key=lambda one: (one["ts"], -one["dur"]))
    times: list[float] = []
    contexts: list[Context] = []
    open_: list[tuple[float, Context]] = []

    def note(at_us: float, context: Context) -> None:
        times.append(at_us)
        contexts.append(context)

    for span in spans:
        while open_ and open_[-1][0] <= span["ts"]:
            end_us, _ = open_.pop()
            note(end_us, open_[-1][1] if open_ else Context())
        inside = _inside(open_[-1][1] if open_ else Context(), span, module_of)
        note(span["ts"], inside)
        open_.append((span["ts"] + span["dur"], inside))
    while open_:
        end_us, _ = open_.pop()
        note(end_us, open_[-1][1] if open_ else Context())
    return times, contexts


def _inside(outer: Context, span: Mapping[str, Any], module_of: Callable[[int], str | None]) -> Context:
    name: str = span["name"]
    if name.startswith(PHASE):
        return outer._replace(phase=name.removeprefix(PHASE))
    if name.startswith(MODULE):
        way = FORWARD if outer.way in (OUTSIDE, FORWARD) else RECOMPUTE
        return outer._replace(module=name.removeprefix(MODULE), way=way)
    number = span.get("args", {}).get("Sequence number")
    if number is None or number < 0 or name.endswith("AccumulateGrad"):
        return Context("backward", GATHERED, OUTSIDE)
    return Context("backward", module_of(number), BACKWARD)


def times_ms(step: TraceStep) -> dict[tuple[str, str | None, str], float]:
    """Milliseconds by (phase, module, way): of the device's work if the trace has any, else of the step's thread.

    Work of a device belongs to the moment at which the host issued it; kernels that overlap count in full.
    """
    sums: dict[tuple[str, str | None, str], float] = {}

    def add(context: Context, us: float) -> None:
        key = _key(context)
        sums[key] = sums.get(key, 0.0) + us / 1e3

    if work := [event for event in step.events if event.get("cat") in _DEVICE_WORK and event.get("ph") == "X"]:
        issued = {
            event["args"]["correlation"]: event
            for event in step.events
            if event.get("cat") in _CALLS and "correlation" in event.get("args", {})
        }
        for event in work:
            call = issued.get(event.get("args", {}).get("correlation"))
            context = Context() if call is None else step.context_at(call["tid"], call["ts"])
            if event["name"].startswith("nccl"):
                context = context._replace(phase=COMMUNICATION)
            add(context, event["dur"])
        return sums
    thread = next(event["tid"] for event in step.events if event.get("name") == STEP)
    times, contexts = step.changes.get(thread, ((), ()))
    for (start, end), context in zip(
        itertools.pairwise([step.start_us, *times, step.end_us]), [Context(), *contexts], strict=True
    ):
        if end > start:
            add(context, end - start)
    return sums


def _key(context: Context) -> tuple[str, str | None, str]:
    if context.phase == COMMUNICATION:
        return COMMUNICATION, None, OUTSIDE
    if context.phase not in (FORWARD, BACKWARD):
        return context.phase or "other", None, OUTSIDE
    return context.phase, context.module, context.way


def memory_events(step: TraceStep, device: str) -> list[MemoryEvent]:
    """Each allocation and release of the step on the device, in their order."""
    kind = _DEVICES[device]
    found = [
        event
        for event in step.events
        if event.get("name") == "[memory]"
        and event["args"].get("Device Type") == kind
        and step.start_us <= event["ts"] <= step.end_us
    ]
    found.sort(key=lambda one: (one["ts"], one["args"].get("Ev Idx", 0)))
    return [
        MemoryEvent(
            event["ts"],
            event["args"]["Addr"],
            event["args"]["Bytes"],
            event["args"].get("Total Allocated", 0),
            step.context_at(event["tid"], event["ts"]),
        )
        for event in found
    ]


def sample_times(step: TraceStep) -> dict[int, float]:
    """When each numbered sample of the step was taken."""
    found = (event for event in step.events if event.get("ph") == "X" and event["name"].startswith(SAMPLE))
    return {int(event["name"].removeprefix(SAMPLE)): event["ts"] for event in found}


def phase_times(step: TraceStep, phases: Iterable[str]) -> list[tuple[str, float, float]]:
    """When each of these phases ran, on the thread of the step."""
    wanted = {f"{PHASE}{name}": name for name in phases}
    found = [
        (wanted[event["name"]], event["ts"], event["ts"] + event["dur"])
        for event in step.events
        if event.get("ph") == "X" and event.get("name") in wanted
    ]
    return sorted(found, key=lambda one: one[1])
