"""The perplexities of evaluations in a comparison: a column, see report/extras.py. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.report.entry import Entry
from orchestrator.report.extras import ExtraColumn
from orchestrator.text.units import ABSENT


def columns(entries: Sequence[Entry]) -> list[ExtraColumn]:
    """Perplexities; where the weights of some rows are quantised and those of one are not, with the change against that
    row. (With several such rows, as of two models, nobody says which is the one to compare with.)"""
    losses = [(entry.result or {}).get("loss") or {} for entry in entries]
    values = [one.get("perplexity") for one in losses]
    plain = {one["perplexity"] for one in losses if one.get("perplexity") is not None and one.get("weights") is None}
    texts = []
    for one, value in zip(losses, values, strict=True):
        text = ABSENT if value is None else f"{value:.4f}"
        if value is not None and len(plain) == 1 and one.get("weights") is not None:
            text += f" ({100 * (value / next(iter(plain)) - 1):+.2f} %)"
        texts.append(text)
    return [ExtraColumn("perplexity", values, texts)]


def cells(entry: Entry, entries: Sequence[Entry]) -> dict[str, object]:
    """The same, for results.csv."""
    return {"perplexity": ((entry.result or {}).get("loss") or {}).get("perplexity")}
