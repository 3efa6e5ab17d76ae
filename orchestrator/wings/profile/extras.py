"""What this wing adds to a comparison and to the summary of a run: see orchestrator/report/extras.py. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.report.entry import Entry
from orchestrator.report.extras import ExtraColumn
from orchestrator.report.named_apart import names
from orchestrator.report.summary import Row
from orchestrator.rounds import recorded
from orchestrator.rounds.comparison import SpeedVerdict, compare
from orchestrator.text.units import digits, share_text, significant
from orchestrator.wings.profile import costs, efficiency
from orchestrator.wings.profile.efficiency import TERA

__all__ = ["cells", "columns", "lines", "rows"]
FLOPS = ("model_flops_per_step", "executed_flops_per_step", "model_flops_per_s", "peak_flops_per_s")
PROFILED = (*FLOPS, "mfu", "hfu")
SAMPLES = "samples/s"


def rows(result: Mapping[str, Any], config: Mapping[str, Any]) -> list[Row]:
    """Sequences a second, and what a profile tells of a run."""
    told = f"{digits(result['throughput']['samples_per_second'])} median, sequences of all ranks"
    return [Row(SAMPLES, told), *efficiency.rows(result, config)]


def _samples(result: Mapping[str, Any] | None) -> float | None:
    """Sequences a second, of all ranks; None without a result."""
    return None if result is None else float(result["throughput"]["samples_per_second"])


def _rates(entry: Entry) -> Mapping[str, Any]:
    """Operations and shares of peaks: counted by a profile, else by the parameters."""
    result = entry.result or {}
    found: Mapping[str, Any] = result.get("profile") or result.get("throughput") or {}
    return found


def cells(entry: Entry, entries: Sequence[Entry]) -> dict[str, object]:
    """Operations, energy and cost; None for what is not known."""
    profile = _rates(entry)
    price = costs.price_of(entry.config)
    return {
        "samples_per_second_median": _samples(entry.result),
        **{name: profile.get(name) for name in PROFILED},
        "profiled_peak_bytes": profile.get("peak_bytes"),
        "joules_per_step": costs.joules_per_step(entry.result),
        "joules_per_token": costs.joules_per_token(entry.result),
        "cost_per_billion_tokens": costs.cost_per_billion(entry.config, entry.result),
        "currency": price.currency if price else None,
    }


def columns(entries: Sequence[Entry]) -> list[ExtraColumn]:
    """MFU, energy and cost; more of a profile in the page. Samples a second are in the page, and on the screen where
    the points differ in the tokens of a sample, so that tokens/s order them otherwise."""
    samples = [_samples(entry.result) for entry in entries]
    differ = len({(entry.config.get("batch") or {}).get("seq") for entry in entries}) > 1
    rates = [_rates(entry) for entry in entries]
    flops = [one.get("model_flops_per_s") for one in rates]
    profiled = any((entry.result or {}).get("profile") for entry in entries)
    prices = {price.currency for entry in entries if (price := costs.price_of(entry.config))}
    money = [costs.cost_per_billion(one.config, one.result) for one in entries]
    return [
        ExtraColumn.of_numbers(SAMPLES, samples, digits, on_screen=differ),
        ExtraColumn.of_numbers("MFU", [one.get("mfu") for one in rates], share_text, on_screen=profiled),
        ExtraColumn.of_numbers("TFLOP/s", flops, lambda rate: significant(rate / TERA), on_screen=False),
        ExtraColumn.of_numbers("J/token", [costs.joules_per_token(entry.result) for entry in entries], significant),
        ExtraColumn.of_numbers(costs.column_name(prices), money, significant),
    ]


def lines(entries: Sequence[Entry]) -> list[str]:
    """The cheapest where prices are known and speeds are ranked."""
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
    return [f"cheapest: {names([first, *ties])}, {amount} per billion tokens{_of_how_many(known, entries)}"]


def _of_how_many(known: Sequence[Entry], entries: Sequence[Entry]) -> str:
    left = len(entries) - len(known)
    return f", of the {len(known)} of {len(entries)} points with a price and a ranked speed" if left else ""
