"""Measures peaks of memory: the units that are unsharded at the same time, and the bytes of all model states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from zero_runtime.accounting import state_tensors
from zero_runtime.runtime import ZeroRuntime
from zero_runtime.unit import Unit

ALLOCATING = ("unshard", "take_grad", "reduce_grad", "wait_reduce")


@dataclass
class UnshardedPeak:
    """The peak of unsharded units: their names, their padded elements; counts: number of unsharded units per gather."""

    units: tuple[str, ...] = ()
    numel: int = 0
    counts: list[int] = field(default_factory=list)

    def look(self, units: list[Unit]) -> None:
        whole = [unit for unit in units if unit.unsharded_param.untyped_storage().size() > 0]
        self.counts.append(len(whole))
        if sum(unit.layout.padded_numel for unit in whole) > self.numel:
            self.numel = sum(unit.layout.padded_numel for unit in whole)
            self.units = tuple(unit.name for unit in whole)


@contextmanager
def unsharded_peak(units: list[Unit]) -> Iterator[UnshardedPeak]:
    """Measure after every gather that starts inside the context, since storages grow only there. Inspects the storages
    themselves, not the states of the units."""
    peak = UnshardedPeak()

    def watched(verb: Any) -> Any:
        def call() -> None:
            verb()
            peak.look(units)

        return call

    for unit in units:
        unit.unshard = watched(unit.unshard)  # type: ignore[method-assign]
    try:
        yield peak
    finally:
        for unit in units:
            del unit.unshard


@dataclass
class StateBytesPeak:
    """Peak of this rank's bytes of model states, sharded and full."""

    bytes: int = 0


@contextmanager
def state_bytes_peak(runtime: ZeroRuntime) -> Iterator[StateBytesPeak]:
    """Measure after every call of a unit's method that allocates. Each storage counts once, with the bytes it holds."""
    peak = StateBytesPeak()

    def watched(verb: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = verb(*args, **kwargs)
            tensors = [tensor for found in state_tensors(runtime).values() for tensor in found]
            held = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}
            peak.bytes = max(peak.bytes, sum(held.values()))
            return result

        return call

    for unit in runtime.units:
        for verb in ALLOCATING:
            setattr(unit, verb, watched(getattr(unit, verb)))
    try:
        yield peak
    finally:
        for unit in runtime.units:
            for verb in ALLOCATING:
                delattr(unit, verb)
