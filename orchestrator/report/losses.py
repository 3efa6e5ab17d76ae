"""What the losses of a comparison's rows say about its lossy rows. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.config.lossy import exact_form, lossy_words
from orchestrator.records.run_record import without_ignored
from orchestrator.text.units import ABSENT

Config = Mapping[str, Any]
Result = Mapping[str, Any]


def perplexity_texts(results: Mapping[str, Result | None]) -> dict[str, str]:
    """The column of evaluations, by the label of each row; empty if there are none."""
    found = {label: result["loss"].get("perplexity") for label, result in results.items() if result}
    known = {label: f"{value:.4f}" for label, value in found.items() if value is not None}
    return {**dict.fromkeys(results, ABSENT), **known} if known else {}


def loss_to_exact(config: Config, result: Result, measured: Sequence[tuple[Config, Result]]) -> float | None:
    """The last training loss less that of the measured row that differs only in having nothing lossy; None if the row
    itself is exact or there is no such row."""
    if not lossy_words(config):
        return None
    wanted = without_ignored(exact_form(config))
    twins = [other for one, other in measured if without_ignored(one) == wanted]
    return float(result["loss"]["last"] - twins[0]["loss"]["last"]) if twins else None
