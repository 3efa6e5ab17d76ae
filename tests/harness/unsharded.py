"""Measures peaks of memory: the units that are unsharded at the same time, and the bytes of all model states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from zero_runtime.accounting import state_tensors
from zero_runtime.runtime import ZeroRuntime
from zero_runtime.unit import Unit

ALLOCATING = {"parameters": ("start_gather",), "gradients": ("take", "reduce", "wait_reduce")}  # of a unit's tensors


@dataclass
class UnshardedPeak:
    """The peak of unsharded units: their names, their padded elements; counts: number of unsharded units per gather."""

    units: tuple[str, ...] = ()
    numel: int = 0
    counts: list[int] = field(default_factory=list)

    def look(self, units: list[Unit]) -> None:
        whole = [unit for unit in units if unit.parameters.unsharded_param.untyped_storage().size() > 0]
        self.counts.append(len(whole))
        if sum(unit.layout.padded_numel for unit in whole) > self.numel:
            self.numel = sum(unit.layout.padded_numel for unit in whole)
            self.units = tuple(unit.name for unit in whole)


@contextmanager
def unsharded_peak(units: list[Unit]) -> Iterator[UnshardedPeak]:
    """Measure after every gather that starts inside the context, since storages grow only there. Inspects the storages
    themselves, not the states of the units."""
    peak = UnshardedPeak()
    with watching([(unit.parameters, "start_gather") for unit in units], lambda: peak.look(units)):
        yield peak


@dataclass
class StateBytesPeak:
    """Peak of this rank's bytes of model states, sharded and full."""

    bytes: int = 0


@contextmanager
def state_bytes_peak(runtime: ZeroRuntime) -> Iterator[StateBytesPeak]:
    """Measure after every call of a unit's method that allocates. Each storage counts once, with the bytes it holds."""
    peak = StateBytesPeak()

    def look() -> None:
        tensors = [tensor for found in state_tensors(runtime).values() for tensor in found]
        held = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}
        peak.bytes = max(peak.bytes, sum(held.values()))

    methods = [
        (getattr(unit, tensors), verb)
        for unit in runtime.units
        for tensors, verbs in ALLOCATING.items()
        for verb in verbs
    ]
    with watching(methods, look):
        yield peak


@contextmanager
def watching(methods: list[tuple[Any, str]], look: Callable[[], None]) -> Iterator[None]:
    """Call `look` after every call of these methods, given as (object, name), inside the context."""

    def watched(verb: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = verb(*args, **kwargs)
            look()
            return result

        return call

    for owner, name in methods:
        setattr(owner, name, watched(getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name in methods:
            delattr(owner, name)
