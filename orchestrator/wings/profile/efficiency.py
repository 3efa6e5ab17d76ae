"""What a run made of its hardware, its energy and its money, in rows of text. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.report.summary import Row
from orchestrator.text.units import share_text, significant, size
from orchestrator.wings.profile import costs

TERA = 1e12


def rows(result: Mapping[str, Any], config: Mapping[str, Any]) -> list[Row]:
    """Operations, energy and cost of a run, those that are known."""
    found = profile_rows(result) or rate_rows(result["throughput"], result["device"])
    if result.get("profile_failed"):
        found.append(Row("profile", f"none: {result['profile_failed']}"))
    if (joules := costs.joules_per_step(result)) is not None:
        per_token = significant(costs.joules_per_token(result) or 0.0)
        text = f"{significant(joules)} J a step, {per_token} J a token, {costs.energy_words(result)}"
        found.append(Row("energy", text))
    price, cost = costs.price_of(config), costs.cost_per_billion(config, result)
    if price is not None and cost is not None:
        count = costs.devices(config, result)
        unit = "GPU" if result["device"] == "cuda" else "machine"
        each = f"{count} {unit}{'' if count == 1 else 's'} at {costs.money(price.per_hour, price.currency)} an hour"
        found.append(Row("cost", f"{significant(cost)} {price.currency} per billion tokens, {each}".replace("  ", " ")))
    return found


def rate_rows(speed: Mapping[str, Any], device: str) -> list[Row]:
    """The model's operations a second by its parameters, which every run knows."""
    if (rate := speed.get("model_flops_per_s")) is None:
        return []
    share = f"no MFU: no dense peak of this {'CPU' if device == 'cpu' else 'GPU and dtype'} is known"
    if (mfu := speed.get("mfu")) is not None:
        share = f"MFU {share_text(mfu)} of {speed['peak_flops_per_s'] / TERA:,.5g} TFLOP/s a GPU, dense"
    return [Row("TFLOP/s", f"{rate / TERA:,.3g} median, 6 FLOP for each trained parameter and token; {share}")]


def profile_rows(result: Mapping[str, Any]) -> list[Row]:
    """What the profile of a run found; empty without one."""
    profile = result.get("profile")
    if not profile:
        return []
    ranks, model, executed = result["world"], profile["model_flops_per_step"], profile["executed_flops_per_step"]
    again = f", {executed / model - 1:.1%} more executed" if model and executed > model else ""
    reached = profile["model_flops_per_s"] / TERA
    found = [
        Row(
            "operations",
            f"{model / TERA:,.4g} TFLOP of the model a step, counted in forward and backward{again}; "
            f"{reached:,.4g} TFLOP/s at the median step, on {ranks} {'rank' if ranks == 1 else 'ranks'}",
        )
    ]
    if (mfu := profile.get("mfu")) is not None:
        peak = profile["peak_flops_per_s"] / TERA
        text = f"MFU {share_text(mfu)}, HFU {share_text(profile['hfu'])} of {peak:,.5g} TFLOP/s a GPU, dense"
        found.append(Row("utilisation", f"{text} ({profile['peak_source']})"))
    else:
        found.append(Row("utilisation", "no MFU: conf/hardware has no dense peak of this device and dtype"))
    where = " of ".join(filter(None, (profile["peak_phase"], profile["peak_module"]))) or "no phase"
    found.append(
        Row(
            "peak of a step",
            f"{size(profile['peak_bytes'])} of tensors on rank {profile['peak_rank']} in {where}; most of it: "
            f"{profile['peak_holder'].replace('_', ' ')}, {size(profile['peak_holder_bytes'])}",
        )
    )
    return found
