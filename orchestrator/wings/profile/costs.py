"""Money and energy of a measured point: what a billion tokens cost, and joules of a step and a token. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from orchestrator.rounds.recorded import used_rounds
from orchestrator.text.units import significant

TOKENS = 10**9
US_DOLLARS = "USD"


class Price(NamedTuple):
    """What one device costs in an hour: a GPU, or a machine whose CPUs compute. currency: may be empty."""

    per_hour: float
    currency: str


def price_of(config: Mapping[str, Any]) -> Price | None:
    """`hardware.price_per_hour`, else `cluster.usd_per_gpu_hour` for GPUs; None if neither is set."""
    node, cluster = config.get("hardware") or {}, config.get("cluster") or {}
    if (own := node.get("price_per_hour")) is not None:
        return Price(float(own), node.get("currency") or "")
    usd = cluster.get("usd_per_gpu_hour")
    if usd is None or (config.get("resources") or {}).get("device") != "cuda":
        return None
    return Price(float(usd), US_DOLLARS)


def devices(config: Mapping[str, Any], result: Mapping[str, Any]) -> int:
    """The number of devices that the price is for: the ranks' GPUs, or the machines of CPU ranks."""
    if result["device"] == "cuda":
        return int(result["world"])
    return int((config.get("resources") or {}).get("nodes") or 1)


def cost_of(price: Price, count: int, tokens_per_second: float) -> float:
    """What a billion tokens cost on so many devices at this speed."""
    return price.per_hour * count * TOKENS / (3600 * tokens_per_second)


def cost_per_billion(config: Mapping[str, Any], result: Mapping[str, Any] | None) -> float | None:
    """What a billion tokens cost at the median speed; None without a price."""
    price = price_of(config)
    if price is None or result is None:
        return None
    speed = result["throughput"]["tokens_per_second"]["median"]
    return cost_of(price, devices(config, result), speed) if speed > 0 else None


def predicted_cost(config: Mapping[str, Any], tokens_per_second: float | None) -> float | None:
    """What a billion tokens would cost at a predicted speed; None without a price or a speed."""
    price, resources = price_of(config), config.get("resources") or {}
    if price is None or not tokens_per_second:
        return None
    on_gpus = resources.get("device") == "cuda"
    return cost_of(price, int((resources.get("ranks") if on_gpus else resources.get("nodes")) or 1), tokens_per_second)


def column_name(currencies: Collection[str]) -> str:
    """The title of a column of costs in these currencies."""
    return (
        f"{next(iter(currencies))}/1B tokens" if len(currencies) == 1 and "" not in currencies else "cost of 1B tokens"
    )


def joules_per_step(result: Mapping[str, Any] | None) -> float | None:
    """Energy of a step of all ranks' devices, the median over the rounds; None if a round has none."""
    found = [one.get("joules_per_step") for one in used_rounds(result or {})]
    known = [value for value in found if value is not None]
    return statistics.median(known) if known and len(known) == len(found) else None


def joules_per_token(result: Mapping[str, Any] | None) -> float | None:
    """The same for one token."""
    joules = joules_per_step(result)
    return None if result is None or joules is None else joules / result["batch"]["tokens_per_step"]


def money(amount: float, currency: str) -> str:
    """An amount as text."""
    return f"{significant(amount)} {currency}".strip()


def energy_words(result: Mapping[str, Any]) -> str:
    """Whose energy was measured."""
    if result["device"] == "cuda":
        return "of the GPUs, by NVML"
    return "of the machine's processors and all that they did, by RAPL"
