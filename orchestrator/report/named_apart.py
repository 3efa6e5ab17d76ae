"""Names points of a sweep next to the fastest, such as the smallest; they can be the same. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    held = {id(entry): held_bytes(entry.result or {}) for entry in entries}
    least = min(held.values())
    smallest = [entry for entry in entries if held[id(entry)] == least]
    words = memory_words(smallest[0].result or {})
    return [f"smallest: {names(smallest)}, {size(least)}, {words}"]


def memory_words(result: Mapping[str, Any]) -> str:
    """What `held_bytes` counted."""
    return "peak of a rank's allocator" if on_device(result) else "counted tensors of a rank"


def held_bytes(result: Mapping[str, Any]) -> float:
    """The memory by which points are compared: the peak of the device's allocator; on a CPU, where no allocator counts,
    all counted tensors."""
    memory = result["memory"]
    if on_device(result):
        return float(memory["peak_allocated_bytes"])
    states = sum(state["measured_bytes"] or 0 for state in memory["states"])
    return float(states + (memory["activations_bytes"] or 0) + (memory["other_tensors_bytes"] or 0))


def on_device(result: Mapping[str, Any]) -> bool:
    """Whether that memory is of a device's allocator."""
    return result["memory"].get("peak_allocated_bytes") is not None
