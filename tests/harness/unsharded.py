"""Counts how many units have their full parameters in memory at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from zero_runtime.unit import Unit


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
