"""The perplexities of evaluations in a comparison: a column, see report/extras.py. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.report.entry import Entry
from orchestrator.report.extras import ExtraColumn
from orchestrator.text.units import ABSENT


def columns(entries: Sequence[Entry]) -> list[ExtraColumn]:
    """The perplexities, to four digits."""
    values = [((entry.result or {}).get("loss") or {}).get("perplexity") for entry in entries]
    return [ExtraColumn("perplexity", values, [ABSENT if value is None else f"{value:.4f}" for value in values])]


def cells(entry: Entry, entries: Sequence[Entry]) -> dict[str, object]:
    """The same, for results.csv."""
    return {"perplexity": ((entry.result or {}).get("loss") or {}).get("perplexity")}
