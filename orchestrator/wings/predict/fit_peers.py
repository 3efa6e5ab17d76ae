"""What `zlab fit --as ENGINE` shows: what fits under another engine's byte rules, and the terms of one row."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.config.strict import Refusal
from orchestrator.plan.point import Point
from orchestrator.report.screen import Screen, make_console
from orchestrator.report.summary import Row, Table
from orchestrator.text.paths import program
from orchestrator.text.units import ABSENT, many, size
from orchestrator.wings.predict.fit_page import named
from orchestrator.wings.predict.memory_cache import units_key
from orchestrator.wings.predict.peer_fit import NAMES, PeerFit, peer_fit
from orchestrator.wings.predict.prediction import gpu_bytes_here, overhead_of, target_here
from orchestrator.wings.predict.step import Memories

HEADER = ("row", "micro", "peak", "at rest", "activations", "largest term")


def rows_as(engine: str, points: Sequence[Point], answers: Mapping[str, Mapping[str, Any]]) -> list[PeerFit]:
    """The rows that the engine's rules know. Refusal if there are none."""
    memories, gpu_bytes, found = Memories(answers), gpu_bytes_here(), []
    for point in points:
        memory, target = memories.of(point.config), target_here(point.config, gpu_bytes)
        if memory is None or target.device_bytes is None:
            continue
        shapes = answers[units_key(point.config)]
        limit = target.device_bytes // target.ranks_share
        overhead = overhead_of(point.config)
        row = peer_fit(engine, point.label, tuple(point.overrides), memory, shapes, limit, overhead)
        found += [row] if row is not None else []
    if not found:
        raise Refusal(
            [
                f"--as {engine}: its rules know none of these rows: they are without a tiled loss, NVMe, recomputation "
                "by operation, tensor or sequence parallelism, and for stages that the engine has      "
                "fix: loss=full recompute=none,full parallel=none"
            ]
        )
    return found


def show(
    engine: str, found: Sequence[PeerFit], tried: int, words: Sequence[str], explain: str | None, *, as_json: bool
) -> int:
    """Prints the rows, or the terms of one. tried: how many were asked for. Returns 0 if something fits, else 1."""
    screen = Screen(make_console(on_stderr=as_json))
    chosen = found if explain is None else [named(found, explain)]
    if as_json:
        print(json.dumps([one.to_dict() for one in chosen], ensure_ascii=False))
    elif explain is None:
        _table(screen, chosen)
        if tried > len(found):
            screen.console.print()
            screen.rows(
                [Row("left out", f"{tried - len(found)} of {many(tried, 'row')}, which these rules do not know")]
            )
        first = next((one for one in chosen if one.micro), chosen[0])
        line = shlex.join(["fit", *words, "--as", engine, "--explain", first.label])
        screen.closing(
            [Row("explain", f"{program()} {line}"), Row("ours", f"{program()} {shlex.join(['fit', *words])}")]
        )
    else:
        _terms(screen, chosen[0])
        screen.closing([Row("all rows", f"{program()} {shlex.join(['fit', *words, '--as', engine])}")])
    return int(not any(one.micro for one in chosen))


def _table(screen: Screen, found: Sequence[PeerFit]) -> None:
    first = found[0]
    screen.rows(
        [
            Row("engine", f"{first.memory.engine}, by its rules of bytes (docs/published.md); nothing of it was run"),
            Row("limit", f"{size(first.limit_bytes)} for a rank, of which libraries take {size(first.overhead.most)}"),
        ]
    )
    screen.console.print()
    rows = tuple((one.label, *_cells(one)) for one in found)
    screen.table(Table(HEADER, rows))


def _cells(one: PeerFit) -> tuple[str, ...]:
    largest = max(one.memory.terms, key=lambda term: term.nbytes)
    micro = f"{one.micro}{'+' if one.capped else ''}" if one.micro else ABSENT
    return (micro, size(one.peak), size(one.memory.resting), size(one.activations), largest.what)


def _terms(screen: Screen, one: PeerFit) -> None:
    at = f"micro-batch {one.micro}" if one.micro else "micro-batch 1, which does not fit"
    screen.say(f"{one.memory.engine}, {one.label}, {at}", "bold")
    rows = [(term.what, term.moment.value, size(term.nbytes)) for term in one.memory.terms]
    rows += [("activations, at most", "compute", size(one.activations)), ("allocated at the peak", "", size(one.peak))]
    screen.table(Table(("term", "exists", "bytes"), tuple(rows), names=2))


def engine_names() -> tuple[str, ...]:
    """The engines whose rules are known."""
    return NAMES
