"""Names the cheapest and the smallest point of a sweep, next to the fastest; they can be the same. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.report.ranking import Entry, Ranked
from orchestrator.rounds import recorded
from orchestrator.rounds.comparison import SpeedVerdict, compare
from orchestrator.text.units import significant, size
from orchestrator.wings.profile import costs


def lines(ranked: Sequence[Ranked]) -> list[str]:
    """The cheapest where prices are known and speeds are ranked, and the smallest; none for fewer than two results."""
    measured = [row.entry for row in ranked if row.entry.result is not None]
    if len(measured) < 2:
        return []
    return [*_cheapest(measured), *_smallest(measured)]


def _cheapest(entries: Sequence[Entry]) -> list[str]:
    prices = {id(entry): costs.price_of(entry.config) for entry in entries}
    known = [entry for entry in entries if prices[id(entry)] and recorded.is_ranked(entry.result or {})]
    if not known:
        return []
    currencies = {price.currency for entry in known if (price := prices[id(entry)])}
    if len(currencies) > 1:
        return [f"cheapest: not named, the prices have different currencies: {', '.join(sorted(currencies))}"]

    def per_ms(entry: Entry) -> float:
        price = prices[id(entry)]
        assert price is not None
        return price.per_hour * costs.devices(entry.config, entry.result or {})

    amounts = {id(entry): costs.cost_per_billion(entry.config, entry.result) or 0.0 for entry in known}
    known.sort(key=lambda entry: amounts[id(entry)])
    first, *others = known

    def is_dearer(entry: Entry) -> bool:
        if amounts[id(first)] == 0:
            return amounts[id(entry)] > 0
        of_time = compare(entry.result or {}, first.result or {}, family=len(others))
        return of_time.times(per_ms(entry) / per_ms(first)).verdict is SpeedVerdict.slower

    ties = [entry for entry in others if not is_dearer(entry)]
    most = max(amounts[id(entry)] for entry in [first, *ties])
    low, high = significant(amounts[id(first)]), significant(most)
    amount = f"{low if low == high else f'{low} to {high}'} {next(iter(currencies))}".strip()
    return [f"cheapest: {_names([first, *ties])}, {amount} per billion tokens{_of_how_many(known, entries)}"]


def _of_how_many(known: Sequence[Entry], entries: Sequence[Entry]) -> str:
    left = len(entries) - len(known)
    return f", of the {len(known)} of {len(entries)} points with a price and a ranked speed" if left else ""


def _names(entries: Sequence[Entry]) -> str:
    names = ", ".join(entry.label for entry in entries)
    return names if len(entries) == 1 else f"a tie of {names}"


def _smallest(entries: Sequence[Entry]) -> list[str]:
    on_device = all(_allocated(entry.result or {}) is not None for entry in entries)
    held = {id(entry): _held_bytes(entry.result or {}) for entry in entries}
    least = min(held.values())
    what = "peak of a rank's allocator" if on_device else "counted tensors of a rank"
    return [f"smallest: {_names([entry for entry in entries if held[id(entry)] == least])}, {size(least)}, {what}"]


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
