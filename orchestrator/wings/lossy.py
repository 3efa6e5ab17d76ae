"""What is lossy in each row of a comparison, and what it does to the loss: columns, see report/extras.py. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.config.lossy import exact_form, lossy_words
from orchestrator.records.run_record import without_ignored
from orchestrator.report.entry import Entry
from orchestrator.report.extras import ExtraColumn


def columns(entries: Sequence[Entry]) -> list[ExtraColumn]:
    """The lossy settings of each row, and its loss less that of the exact row; none if all rows are exact."""
    words = [_words(entry) for entry in entries]
    if not any(words):
        return []
    above = [loss_to_exact(entry, entries) for entry in entries]
    return [
        ExtraColumn("lossy", words, [text or "exact" for text in words]),
        ExtraColumn.of_numbers("loss - exact", above, lambda difference: f"{difference:+.4f}"),
    ]


def cells(entry: Entry, entries: Sequence[Entry]) -> dict[str, object]:
    """The same, for results.csv."""
    return {"lossy": _words(entry), "loss_to_exact": loss_to_exact(entry, entries)}


def _words(entry: Entry) -> str:
    return ", ".join(lossy_words(entry.config))


def loss_to_exact(entry: Entry, entries: Sequence[Entry]) -> float | None:
    """The last training loss less that of the measured row that differs only in having nothing lossy; None if the row
    itself is exact or there is no such row."""
    if entry.result is None or not lossy_words(entry.config):
        return None
    wanted = without_ignored(exact_form(entry.config))
    twins = [one.result for one in entries if one.result is not None and without_ignored(one.config) == wanted]
    return float(entry.result["loss"]["last"] - twins[0]["loss"]["last"]) if twins else None
