"""Names points of a sweep next to the fastest, such as the smallest; they can be the same. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.report import extras
from orchestrator.report.entry import Entry
from orchestrator.report.ranking import Ranked, by_table
from orchestrator.text.units import size


def lines(ranked: Sequence[Ranked]) -> list[str]:
    """The smallest of each table, after what wings name, as the cheapest; none for fewer than two results."""
    return [
        f"{name}: {line}" if name else line for name, rows in by_table(ranked).items() for line in _of_one_table(rows)
    ]


def _of_one_table(rows: Sequence[Ranked]) -> list[str]:
    measured = [row.entry for row in rows if row.entry.result is not None and not row.apart]
    if len(measured) < 2:
        return []
    return [*extras.lines(measured), *_smallest(measured)]


def names(entries: Sequence[Entry]) -> str:
    """One label, or several as a tie."""
    names = ", ".join(entry.label for entry in entries)
    return names if len(entries) == 1 else f"a tie of {names}"


def _smallest(entries: Sequence[Entry]) -> list[str]:
    on_device = all(_allocated(entry.result or {}) is not None for entry in entries)
    held = {id(entry): _held_bytes(entry.result or {}) for entry in entries}
    least = min(held.values())
    what = "peak of a rank's allocator" if on_device else "counted tensors of a rank"
    return [f"smallest: {names([entry for entry in entries if held[id(entry)] == least])}, {size(least)}, {what}"]


def _held_bytes(result: dict[str, Any]) -> float:
    """The memory by which points are compared: on a CPU, where no allocator counts, all counted tensors."""
    allocated = _allocated(result)
    if allocated is not None:
        return allocated
    memory = result["memory"]
    states = sum(state["measured_bytes"] or 0 for state in memory["states"])
    return float(states + (memory["activations_bytes"] or 0) + (memory["other_tensors_bytes"] or 0))


def _allocated(result: dict[str, Any]) -> float | None:
    peak: float | None = result["memory"].get("peak_allocated_bytes")
    return peak
