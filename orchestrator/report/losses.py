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
    """The column of evaluations, by the label of each row; empty if there are none.

    Where the weights of some rows are quantised and those of one are not, with the change against that row. (With
    several such rows, as of two models, nobody says which is the one to compare with.)
    """
    found = {label: result["loss"] for label, result in results.items() if result}
    known = {label: losses for label, losses in found.items() if losses.get("perplexity") is not None}
    plain = {losses["perplexity"] for losses in known.values() if losses.get("weights") is None}
    texts = dict.fromkeys(results if known else (), ABSENT)
    for label, losses in known.items():
        value, change = losses["perplexity"], ""
        if len(plain) == 1 and losses.get("weights") is not None:
            change = f" ({100 * (value / next(iter(plain)) - 1):+.2f} %)"
        texts[label] = f"{value:.4f}{change}"
    return texts


def loss_to_exact(config: Config, result: Result, measured: Sequence[tuple[Config, Result]]) -> float | None:
    """The last training loss less that of the measured row that differs only in having nothing lossy; None if the row
    itself is exact or there is no such row."""
    if not lossy_words(config):
        return None
    wanted = without_ignored(exact_form(config))
    twins = [other for one, other in measured if without_ignored(one) == wanted]
    return float(result["loss"]["last"] - twins[0]["loss"]["last"]) if twins else None
