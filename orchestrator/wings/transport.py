"""What the ranks of a row communicated over, in a comparison of rows that differ in it: see report/extras.py. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.report.entry import Entry
from orchestrator.report.extras import ExtraColumn
from orchestrator.text.units import ABSENT


def columns(entries: Sequence[Entry]) -> list[ExtraColumn]:
    """The backends, if they are not all one."""
    values = [(entry.result or {}).get("backend") for entry in entries]
    differ = len({value for value in values if value is not None}) > 1
    return [ExtraColumn("over", values, [value or ABSENT for value in values])] if differ else []


def cells(entry: Entry, entries: Sequence[Entry]) -> dict[str, object]:
    """Beside the backend, which results.csv has: why it is gloo where another one was wanted."""
    return {"backend_reason": (entry.result or {}).get("backend_reason") or None}
