"""Which rows of a comparison of engines have a place, and in which table: see orchestrator/report/extras.py. Pure."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator import wings
from orchestrator.config.engine import EngineKind
from orchestrator.config.schema import from_dict
from orchestrator.report.entry import Entry
from orchestrator.report.summary import Row
from orchestrator.text.paths import program, shown
from orchestrator.wings.engines import equality
from orchestrator.wings.engines.equality import REFERENCE

OWN = EngineKind.zero.value
AT_SAME_BATCH, AT_ITS_LIMIT = "at the same batch", "at its own limit"
DIFFERS, UNKNOWN = "≠", "?"  # before what differs, and before why it is not known whether something does


def group_of(entry: Entry, name: str) -> Mapping[str, Any]:
    """A group of the configuration; empty if there is none, as of a point that was refused."""
    found = entry.config.get(name)
    return found if isinstance(found, Mapping) else {}


def kind_of(entry: Entry) -> str:
    """The engine of a row. A refused point has no configuration, and what was typed for it says the engine."""
    typed = [word.partition("=")[2] for word in entry.overrides if word.partition("=")[0] in ("engine", "engine.kind")]
    found: str = group_of(entry, "engine").get("kind") or (typed[-1] if typed else OWN)
    return found


def is_at_limit(entry: Entry) -> bool:
    """Whether the row has the largest micro-batch that fits its engine."""
    return bool(group_of(entry, "batch").get("at_limit", "batch.at_limit=true" in entry.overrides))


def compares(entries: Sequence[Entry]) -> bool:
    """Whether the rows are a comparison of engines."""
    return any(kind_of(entry) != OWN for entry in entries)


def differences(entries: Sequence[Entry]) -> dict[str, tuple[str, ...]]:
    """What differs in the work of each row that has a result, or why that is not known, by its label; empty texts for
    equal work, and no rows without other engines."""
    measured = [entry for entry in entries if entry.result is not None]
    found = equality.verdicts(measured) if compares(entries) else {}
    return {
        label: tuple(dict.fromkeys(verdict.differences))
        or ((f"{UNKNOWN} {verdict.unknown}",) if verdict.unknown else ())
        for label, verdict in found.items()
    }


def text_of(differing: Sequence[str]) -> str:
    """The differences as one text with their sign; empty for equal work."""
    text = "; ".join(differing)
    return text if not text or text.startswith(UNKNOWN) else f"{DIFFERS} {text}"


def apart(entries: Sequence[Entry]) -> dict[str, str]:
    """The reference, and the rows whose work is not that of the others, or not known to be."""
    kinds = {entry.label: kind_of(entry) for entry in entries}
    texts = {
        label: "the reference" if kinds[label] == REFERENCE else text_of(differing)
        for label, differing in differences(entries).items()
    }
    return {label: text for label, text in texts.items() if text}


def tables(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Rows at the same batch, and rows of which each has the largest that fits; one table if there are no such rows."""
    if not any(map(is_at_limit, entries)):
        return {"": list(entries)}
    found = {
        AT_SAME_BATCH: [entry for entry in entries if not is_at_limit(entry)],
        AT_ITS_LIMIT: list(filter(is_at_limit, entries)),
    }
    return {name: own for name, own in found.items() if own}


def notes(entries: Sequence[Entry]) -> list[str]:
    """What each engine does otherwise than the others with the same words, with the rows of which that is true."""
    kinds = dict.fromkeys(map(kind_of, entries))
    bases = {one.basis for one in equality.verdicts(entries).values()} if compares(entries) else set()
    own = [entry.label for entry in entries if entry.label in bases and kind_of(entry) != REFERENCE]
    text = f"no plain PyTorch was run: work is compared with that of {', '.join(own)}, in wider bounds"
    found = [f"{text}, and whether {own[0]} trains what plain PyTorch does is not known"] if own else []
    return found + [f"{kind}{whose}: {note}" for kind in kinds for note, whose in notes_of(kind, entries).items()]


def notes_of(kind: str, entries: Sequence[Entry]) -> dict[str, str]:
    """The notes of an engine, each with its rows; with nothing if it is of all of them."""
    own = [entry for entry in entries if entry.result is not None and kind_of(entry) == kind]
    rows: dict[str, list[str]] = {}
    for entry in own:
        for note in ((entry.result or {}).get("engine") or {}).get("notes") or ():
            rows.setdefault(note, []).append(entry.label)
    return {note: "" if len(labels) == len(own) else f" ({', '.join(labels)})" for note, labels in rows.items()}


def costs(configs: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row for what each kind of plain runs adds, with their number if there are several."""
    plain = [from_dict(config) for config in configs if config["engine"]["kind"] == REFERENCE]
    texts = Counter(wings.load(wings.ENGINES[REFERENCE]).cost_text(config) for config in plain)
    return [Row("reference", f"{text}{f' ({count} times)' if count > 1 else ''}") for text, count in texts.items()]


def next_command(entry: Entry) -> str:
    """Writes the winner of a comparison of engines as files for its own engine; empty for other winners, as for
    zero-lab's own runtime, which needs none."""
    is_compared = group_of(entry, "engine").get("counted") and kind_of(entry) != OWN and entry.folder
    return f"{program()} export {shlex.quote(shown(Path(entry.folder)))}" if is_compared else ""
