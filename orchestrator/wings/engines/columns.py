"""What a comparison of engines shows of its rows, and the summary of one: see orchestrator/report/extras.py. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.report.changes import flat
from orchestrator.report.entry import Entry
from orchestrator.report.extras import ExtraColumn
from orchestrator.report.summary import Row
from orchestrator.text.units import ABSENT, size
from orchestrator.wings.engines.equality import REFERENCE
from orchestrator.wings.engines.places import OWN, compares, differences, group_of, is_at_limit, kind_of, text_of


def columns(entries: Sequence[Entry]) -> list[ExtraColumn]:
    """Whether the work of a row is that of the others, its engine with its version, and its memory on one scale."""
    if not compares(entries):
        return []
    engines = [engine_text(entry) for entry in entries]
    found = differences(entries)
    works = [work_text(entry, found) for entry in entries]
    return [
        ExtraColumn("work", works, [text or ABSENT for text in works]),
        ExtraColumn("engine", engines, engines),
        ExtraColumn.of_numbers("above start", [above_start(entry.result) for entry in entries], size),
    ]


def engine_text(entry: Entry) -> str:
    """The engine and the version of its library, such as "deepspeed 0.19.8" or "ddp (torch 2.13.0)"."""
    kind, versions = kind_of(entry), group_of(entry, "engine").get("versions") or {}
    if kind == OWN:
        return kind
    library = kind if kind in versions else "torch"
    version = str(versions.get(library, "")).partition("+")[0]
    return kind if not version else f"{kind} {version}" if library == kind else f"{kind} ({library} {version})"


def work_text(entry: Entry, differing: Mapping[str, Sequence[str]]) -> str | None:
    """Whether the work of a row is that of the others, and if not what differs first; None without a result."""
    if entry.label not in differing:
        return None
    if kind_of(entry) == REFERENCE:
        return "reference"
    text, more = text_of(differing[entry.label][:1]) or "=", len(differing[entry.label]) - 1
    return f"{text}; {more} more" if more > 0 else text


def above_start(result: Mapping[str, Any] | None) -> float | None:
    """The peak of a rank's memory above what it had before its engine was built, in bytes; None if it is not known."""
    found: float | None = ((result or {}).get("memory") or {}).get("peak_above_start_bytes")
    return found


def cells(entry: Entry, entries: Sequence[Entry]) -> dict[str, object]:
    """The same, for results.csv; nothing for other sweeps."""
    if not compares(entries):
        return {}
    versions, found = group_of(entry, "engine").get("versions") or {}, differences(entries)
    return {
        "engine": kind_of(entry),
        "engine_versions": " ".join(f"{name}={version}" for name, version in versions.items()),
        "at_limit": is_at_limit(entry),
        "work": text_of(found.get(entry.label, ())) or work_text(entry, found),
        "peak_above_start_bytes": above_start(entry.result),
    }


def rows(result: Mapping[str, Any], config: Mapping[str, Any]) -> list[Row]:
    """The engine of a run, what it was told in its own words, and what it does otherwise than others."""
    engine = result.get("engine") or {}
    if engine.get("kind", OWN) == OWN:
        return []
    versions = ", ".join(f"{name} {version}" for name, version in (engine.get("versions") or {}).items())
    found = [Row("engine", f"{engine['kind']}{f', {versions}' if versions else ''}")]
    found += [Row("  settings", settings_text(engine["settings"]))] if engine.get("settings") else []
    return [*found, *(Row("  note", note) for note in engine.get("notes") or ())]


def settings_text(settings: Mapping[str, Any]) -> str:
    """Nested settings as words with dots."""
    return " ".join(f"{name}={value}" for name, value in flat(settings).items())


def lines(entries: Sequence[Entry]) -> list[str]:
    """The row with the smallest peak above its start, which counts what an engine holds besides the model states."""
    known = {entry.label: peak for entry in entries if (peak := above_start(entry.result)) is not None}
    if not compares(entries) or len(known) < len(entries):
        return []
    least = min(known, key=lambda label: known[label])
    return [f"smallest peak: {least}, {size(known[least])} above its start"]
