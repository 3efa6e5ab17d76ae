"""Counts what is in memory at once: units with their full parameters, and the bytes of all model states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from zero_runtime.runtime import ZeroRuntime
from zero_runtime.unit import Unit

ALLOCATING = ("unshard", "take_grad", "reduce_grad", "wait_reduce")


@dataclass
class UnshardedPeak:
    """The most that was whole at one moment: units by name, their elements with padding, and each moment's count."""

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
    """Look after every gather that begins inside: storages only grow there. Storages are looked at, not states."""
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
    """The most bytes of model states, sharded and whole, that one rank held at one moment."""

    bytes: int = 0


@contextmanager
def state_bytes_peak(runtime: ZeroRuntime) -> Iterator[StateBytesPeak]:
    """Look after every verb of a unit that allocates; each storage counts once, by the bytes that it holds."""
    peak = StateBytesPeak()

    def watched(verb: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = verb(*args, **kwargs)
            tensors = [tensor for found in runtime.state_tensors().values() for tensor in found]
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
