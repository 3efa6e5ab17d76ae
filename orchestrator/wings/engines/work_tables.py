"""The tables of what the rows of a comparison of engines did: work, messages, dtypes and settings. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any

from orchestrator.report.changes import flat
from orchestrator.report.entry import Entry
from orchestrator.report.summary import Table
from orchestrator.text.units import ABSENT, size
from orchestrator.wings.engines.columns import engine_text, work_text
from orchestrator.wings.engines.distances import Distance, distances_of
from orchestrator.wings.engines.places import differences, kind_of, notes_of

HEX = 8  # digits of a hash that are shown
WORK = (
    *("point", "engine", "work", "first weights", "tokens", "steps", "updates", "micro-batches/update"),
    *("loss", "bound", "norm", "bound of the norm"),
)


def _group(entry: Entry, name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = (entry.result or {}).get(name) or {}
    return found


def work(entries: Sequence[Entry]) -> Table:
    """A row for each point whose work was counted."""
    found, far = differences(entries), distances_of(entries)
    rows = [
        (*_named(entry, found), *_counts(counted), *_distances(far.get(entry.label)))
        for entry in entries
        if (counted := _group(entry, "work"))
    ]
    return Table(WORK, tuple(rows), names=5)


def _named(entry: Entry, found: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    return entry.label, engine_text(entry), work_text(entry, found) or ABSENT


def _counts(counted: Mapping[str, Any]) -> tuple[str, ...]:
    steps = counted["steps"]
    updates = sum(step["updates"] for step in steps)
    batches = sorted({step["micro_batches"] for step in steps})
    tokens = sha256(" ".join(step["tokens"] for step in steps).encode()).hexdigest()
    return counted["weights"][:HEX], tokens[:HEX], str(len(steps)), str(updates), ", ".join(map(str, batches)) or ABSENT


def _distances(far: Mapping[str, Distance] | None) -> tuple[str, ...]:
    """Of the loss and of the norm: the distance and the bound of the step that is nearest to its bound."""
    if far is None:
        return (ABSENT,) * 4
    found = list[str]()
    for distance in far.values():
        step = distance.nearest_to_bound
        pair = (None, None) if step is None else (distance.far[step], distance.bounds[step])
        found += [ABSENT if value is None else "0" if value == 0 else f"{value:.1e}" for value in pair]
    return tuple(found)


def messages(entries: Sequence[Entry]) -> Table:
    """What one rank sends in a step, by kind; in the last columns all of it as a multiple of the parameters."""
    counted = [(entry, found) for entry in entries if (found := _group(entry, "work").get("messages"))]
    kinds = list(dict.fromkeys(kind for _, found in counted for kind in found))
    rows = [
        (entry.label, *(_sent(found.get(kind)) for kind in kinds), _multiple(entry, found), _theory(entry))
        for entry, found in counted
    ]
    return Table(("point", *kinds, "all", "in theory"), tuple(rows), names=1)


def _sent(by_dtype: Mapping[str, Mapping[str, int]] | None) -> str:
    if not by_dtype:
        return ABSENT
    return ", ".join(f"{one['calls']} x {dtype}, {size(one['bytes'])}" for dtype, one in by_dtype.items())


def _multiple(entry: Entry, found: Mapping[str, Mapping[str, Mapping[str, int]]]) -> str:
    result = entry.result or {}
    ranks, parameters = result["world"], result["model"]["parameters"]
    elements = sum(one["elements"] for by_dtype in found.values() for one in by_dtype.values())
    return f"{elements * ranks / (ranks - 1) / parameters:.2f}Ψ·(N-1)/N" if ranks > 1 and parameters else ABSENT


def _theory(entry: Entry) -> str:
    """The theory of zero-lab's own runtime, and whether its count is that."""
    talk = _group(entry, "communication")
    if talk.get("theory") is None:
        return ABSENT
    sent = sum(volume["elements"] for volume in talk["data"].values())
    holds = sent == talk["theory_elements"] + (talk.get("padding_elements") or 0)
    return f"{talk['theory']}, {'equal' if holds else 'NOT equal'}"


def dtypes(entries: Sequence[Entry]) -> Table:
    """The bytes of a rank by component and dtype."""
    counted = [(entry, found) for entry in entries if (found := _group(entry, "dtypes"))]
    names = list(dict.fromkeys(name for _, found in counted for name in found))
    rows = [(entry.label, *(_held(found.get(name)) for name in names)) for entry, found in counted]
    return Table(("point", *names), tuple(rows), names=1)


def _held(by_dtype: Mapping[str, int] | None) -> str:
    return ", ".join(f"{dtype} {size(amount)}" for dtype, amount in (by_dtype or {}).items()) or ABSENT


def settings(entries: Sequence[Entry]) -> dict[str, list[str]]:
    """By engine: its versions, what its rows were told in its own words, and what it does otherwise than others."""
    found: dict[str, list[str]] = {}
    for kind in dict.fromkeys(map(kind_of, entries)):
        engines = {entry.label: _group(entry, "engine") for entry in entries if kind_of(entry) == kind}
        known = {label: engine for label, engine in engines.items() if engine}
        lines = _shared(known, lambda engine: engine.get("versions") or {}, "versions")
        lines += _shared(known, lambda engine: flat(engine.get("settings") or {}), "settings")
        lines += [f"{note}{whose}" for note, whose in notes_of(kind, entries).items()]
        if lines:
            found[kind] = lines
    return found


def _shared(
    engines: Mapping[str, Mapping[str, Any]], read: Callable[[Mapping[str, Any]], Mapping[str, Any]], what: str
) -> list[str]:
    """What all rows were told alike, and after it what only some were."""
    told = {label: read(engine) for label, engine in engines.items()}
    names = dict.fromkeys(name for values in told.values() for name in values)
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        for value in dict.fromkeys(str(values[name]) for values in told.values() if name in values):
            labels = tuple(label for label, values in told.items() if name in values and str(values[name]) == value)
            groups.setdefault(labels, []).append(f"{name}={value}")
    whose = {labels: "" if len(labels) == len(told) else f" of {', '.join(labels)}" for labels in groups}
    first = sorted(groups.items(), key=lambda group: len(group[0]) < len(told))
    return [f"{what}{whose[labels]}: {' '.join(words)}" for labels, words in first]
