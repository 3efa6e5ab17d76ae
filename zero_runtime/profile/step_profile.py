"""Profiles two steps: the first counts operations, the second is timed and its memory is followed.

Neither belongs among the steps of a measurement: counting makes the first several times slower, and the ranges of the
second cost some microseconds for each call of a module and each operation.

[Note: no message across the end of a profile]
torch writes the end of a collective into the profile under which it was issued, also if that has ended: into memory
that was freed. A step may end while full parameters are gathered for the next one, so these gathers are waited for
before a profile ends.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from zero_runtime.accounting import host_tensors, state_tensors
from zero_runtime.census import live_storages
from zero_runtime.profile import timeline, trace
from zero_runtime.profile.flops import FlopsByModule, ModuleFlops
from zero_runtime.profile.ranges import StepRanges
from zero_runtime.profile.timeline import COMPONENTS, BlockOwner, Sample, StartBlock, alike
from zero_runtime.profile.trace import BACKWARD, FORWARD, OUTSIDE, RECOMPUTE, SAMPLE
from zero_runtime.runtime import ZeroRuntime

Step = Callable[[], None]  # one whole training step, which starts and ends the runtime's clock
_OF_UNITS = {"params": "parameters", "grads": "gradients", "optimizer": "masters"}
_OF_ALL = {"params": "parameters", "grads": "gradients", "optimizer": "optimizer_states", "staging": "messages"}
_MOST_EVENTS = 200_000  # of the allocator's history on CUDA


def profile_step(runtime: ZeroRuntime, step: Step, file: Path) -> dict[str, Any]:
    """Runs two steps and returns the profile of this rank as plain data. All ranks must call it together.

    file: where the trace of the second step is written, a Chrome trace compressed by gzip; on CUDA the allocator's
    history is written next to it. The profile has step_ms, model_flops and executed_flops of this rank, `modules`,
    `outside_ms`, `timeline` and `peak`: docs/profile.md describes them.
    """
    flops = _counted(runtime, step)
    samples = _Samples(runtime)
    start = samples.all_blocks()
    ranges = StepRanges(runtime.model, runtime.clock, samples.take)
    with _history(runtime.device, file), profile(activities=_activities(runtime.device), profile_memory=True) as made:
        with ranges:
            step()
        _end_messages(runtime)
        if runtime.device.type == "cuda":
            torch.cuda.synchronize(runtime.device)
    read = trace.read_step(_written(made, file), ranges.module_of)
    return {
        "device": runtime.device.type,
        "step_ms": (read.end_us - read.start_us) / 1e3,
        "model_flops": sum(one.model for one in flops.values()),
        "executed_flops": sum(one.executed for one in flops.values()),
        **_time(read, flops),
        **_memory(read, runtime.device.type, start, samples.found),
    }


def _counted(runtime: ZeroRuntime, step: Step) -> dict[str | None, ModuleFlops]:
    """The operations of a step. It is profiled too, because a CPU's allocator reports the release of those blocks alone
    that were allocated under a profile."""
    ranges = StepRanges(runtime.model, runtime.clock)
    counter = FlopsByModule(ranges)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True):
        with ranges, counter:
            step()
        _end_messages(runtime)
    return counter.by_module


def _end_messages(runtime: ZeroRuntime) -> None:
    """See [Note: no message across the end of a profile]."""
    for unit in runtime.units:
        unit.wait_renewed()


def _activities(device: torch.device) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]


def _history(device: torch.device, file: Path) -> AbstractContextManager[None]:
    return nullcontext() if device.type != "cuda" else _recorded_history(file.with_suffix(".memory.pickle"))


@contextmanager
def _recorded_history(file: Path) -> Any:
    """What the allocator of the GPU does inside, for https://pytorch.org/memory_viz."""
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MOST_EVENTS)
    try:
        yield
        torch.cuda.memory._dump_snapshot(str(file))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _written(made: profile, file: Path) -> dict[str, Any]:
    """Writes the trace and returns its content."""
    plain = file.with_name(f"{file.name}.json")
    try:
        made.export_chrome_trace(str(plain))
        with plain.open(encoding="utf-8", errors="replace") as text:
            content: dict[str, Any] = json.load(text)
        with plain.open("rb") as source, gzip.open(file, "wb", compresslevel=6) as target:
            shutil.copyfileobj(source, target)
    finally:
        plain.unlink(missing_ok=True)
    return content


# ---- time -----------------------------------------------------------------------------------------------------------


def _time(read: trace.TraceStep, flops: dict[str | None, ModuleFlops]) -> dict[str, Any]:
    """`modules`: milliseconds and operations by module, without those of the modules in it, the same modules of all
    layers together. `outside_ms`: what belongs to no module."""
    modules: dict[str, dict[str, float]] = {}
    outside: dict[str, float] = {}

    def row(name: str) -> dict[str, float]:
        keys = [f"{way}_{unit}" for unit in ("ms", "flops") for way in (FORWARD, RECOMPUTE, BACKWARD)]
        return modules.setdefault(alike(name), dict.fromkeys(keys, 0))

    for (phase, module, way), ms in trace.times_ms(read).items():
        if module is None or way == OUTSIDE:
            name = module or (f"{trace.LOSS} {phase}" if phase in (FORWARD, BACKWARD) else phase)
            outside[name] = outside.get(name, 0.0) + ms
        else:
            row(module)[f"{way}_ms"] += ms
    for counted_in, counted in flops.items():
        into = row(counted_in or "loss")
        for way in (FORWARD, RECOMPUTE, BACKWARD):
            into[f"{way}_flops"] += getattr(counted, way)
    named = [{"name": name, **numbers} for name, numbers in modules.items()]
    return {"modules": sorted(named, key=_ms, reverse=True), "outside_ms": outside}


def _ms(module: dict[str, Any]) -> float:
    return float(sum(module[f"{way}_ms"] for way in (FORWARD, RECOMPUTE, BACKWARD)))


# ---- memory ---------------------------------------------------------------------------------------------------------


class _Samples:
    """The runtime's own tensors by address, sampled whenever a phase begins or ends."""

    def __init__(self, runtime: ZeroRuntime) -> None:
        self._runtime = runtime
        self.found: list[dict[int, BlockOwner]] = []

    def take(self) -> None:
        """Samples the tensors of units, and marks the moment in the trace."""
        with record_function(f"{SAMPLE}{len(self.found)}"):
            self.found.append(self._of_units())

    def _of_units(self) -> dict[int, BlockOwner]:
        held: dict[int, BlockOwner] = {}
        for unit in self._runtime.units:
            for component, tensors in unit.state_tensors().items():
                for tensor in tensors:
                    self._add(held, tensor, BlockOwner(_OF_UNITS[component], unit.name))
            for tensor in unit.message_tensors():
                self._add(held, tensor, BlockOwner("messages", unit.name))
        return held

    def _add(self, held: dict[int, BlockOwner], tensor: torch.Tensor, what: BlockOwner) -> None:
        if tensor.device.type == self._runtime.device.type and (address := tensor.untyped_storage().data_ptr()):
            held.setdefault(address, what)

    def all_blocks(self) -> list[StartBlock]:
        """All blocks that Python's tensors hold now."""
        runtime, held = self._runtime, self._of_units()
        for unit in runtime.units:
            for tensor in runtime.optimizer.tensors_of(unit).values():
                self._add(held, tensor, BlockOwner("optimizer_states", unit.name))
        for found in (state_tensors(runtime), host_tensors(runtime)):
            for component, tensors in found.items():
                for tensor in tensors:
                    self._add(held, tensor, BlockOwner(_OF_ALL.get(component, "other"), ""))
        for tensor in runtime.model.buffers():
            self._add(held, tensor, BlockOwner("other", "buffers"))
        rest = BlockOwner("other", "")
        return [
            StartBlock(address, nbytes, held.get(address, rest))
            for address, nbytes in live_storages(runtime.device.type).items()
        ]


def _memory(
    read: trace.TraceStep, device: str, start: list[StartBlock], found: list[dict[int, BlockOwner]]
) -> dict[str, Any]:
    events, times = trace.memory_events(read, device), trace.sample_times(read)
    phases = trace.phase_times(read, ("data", FORWARD, BACKWARD, "optimizer"))
    blocks = timeline.blocks_of(start, events, read.start_us)
    samples = [Sample(times[number], held) for number, held in enumerate(found) if number in times]
    timeline.name_blocks(blocks, samples, [(begin, end) for name, begin, end in phases if name == FORWARD])
    unseen = 0
    if device == "cuda" and events:  # the allocator of a CPU counts from the beginning of the profile
        unseen = max(0, events[0].total - events[0].nbytes - sum(one.nbytes for one in start))
    line = timeline.timeline_of(blocks, read.start_us, read.end_us, unseen=unseen)

    def ms(at_us: float) -> float:
        return round((at_us - read.start_us) / 1e3, 4)

    at_peak = dict.fromkeys(COMPONENTS, 0)
    at_peak["other"] += unseen
    for block in line.at_peak:
        assert block.held is not None
        at_peak[block.held.component] += block.nbytes
    return {
        "timeline": {
            "ms": [ms(at) for at, _ in line.columns],
            "bytes": {name: [held[name] for _, held in line.columns] for name in COMPONENTS},
            "phases": [{"name": name, "start_ms": ms(begin), "end_ms": ms(end)} for name, begin, end in phases],
        },
        "peak": {
            "ms": ms(line.peak.at_us),
            "bytes": line.peak.nbytes,
            "phase": line.peak.context.phase,
            "module": line.peak.context.module or "",
            "components": at_peak,
            "holders": timeline.holders(line.at_peak),
        },
    }
