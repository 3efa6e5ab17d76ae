"""What `zlab fit --as ENGINE` shows: what fits under another engine's byte rules, and the terms of one row."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from orchestrator.config.engine import EngineKind
from orchestrator.config.strict import Refusal
from orchestrator.planning.point import Point
from orchestrator.report.screen import Screen, make_console
from orchestrator.report.summary import Row, Table
from orchestrator.text.paths import program
from orchestrator.text.units import ABSENT, many, size
from orchestrator.wings.predict.fit_page import VERDICTS, WORKSPACES, host_row, limit_row, micro_cell, named
from orchestrator.wings.predict.fit_words import document
from orchestrator.wings.predict.memory_cache import units_key
from orchestrator.wings.predict.peer_fit import PeerFit, peer_fit
from orchestrator.wings.predict.peer_limits import limits
from orchestrator.wings.predict.prediction import gpu_bytes_here, overhead_of, target_here
from orchestrator.wings.predict.step import Memories
from zero_runtime.predict.memory.peers import COPIES, Moment

EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True"
HEADER = ("row", "micro", "peak", "at rest", "activations", "largest term")
GIVEN = ("row", "micro", "fits", "at rest", "peak", "activations", "reserved", "host", "of node", "largest term")
DROPPED = ("activations", "host", "of node", "largest term")  # by a narrow terminal, in this order


def as_engine(engine: str, point: Point) -> Point:
    """The point as this engine's, so that its activations are counted as it computes them: in the dtype of the
    parameters, or under its autocast."""
    config, kind = point.config, EngineKind(engine)
    dtypes, has_masters = config.precision.dtypes, config.precision.dtypes.master == "fp32"
    dtype = config.precision.compute if kind is EngineKind.plain and has_masters else dtypes.param
    precision = replace(config.precision, compute=dtype)
    return replace(point, config=replace(config, engine=replace(config.engine, kind=kind), precision=precision))


def rows_as(points: Sequence[Point], answers: Mapping[str, Mapping[str, Any]]) -> list[PeerFit]:
    """The rows that the rules of the points' engine know. Refusal if there are none."""
    memories, gpu_bytes, found = Memories(answers), gpu_bytes_here(), []
    for point in points:
        config, memory, target = point.config, memories.of(point.config), target_here(point.config, gpu_bytes)
        if memory is None or target.device_bytes is None:
            continue
        row = peer_fit(point, memory, answers[units_key(config)], target, overhead_of(config))
        found += [row] if row is not None else []
    if not found:
        raise Refusal([f"--as {points[0].config.engine.kind}: {why}" for why in reasons(points)])
    return found


def reasons(points: Sequence[Point]) -> list[str]:
    """List once each setting of the points that their engine's rules do not know."""
    return list(dict.fromkeys(str(broken) for point in points for broken in limits(point.config)))


def show(
    found: Sequence[PeerFit], points: Sequence[Point], words: Sequence[str], explain: str | None, *, as_json: bool
) -> int:
    """Prints the rows, or the terms of one. points: those that were asked for. Returns 0 if something fits, else 1."""
    screen, line = Screen(make_console(on_stderr=as_json)), ["fit", *words, "--as", str(points[0].config.engine.kind)]
    chosen = found if explain is None else [named(found, explain)]
    if as_json:
        print(document(points[0].config.model.name, chosen))
    elif explain is None:
        _table(screen, chosen)
        if (tried := len(points)) > len(found):
            screen.console.print()
            screen.rows([Row("left out", f"{tried - len(found)} of {many(tried, 'row')}")])
            screen.rows([Row("", why) for why in reasons(points)])
        first = next((one for one in chosen if one.micro), chosen[0])
        lines = {"explain": [*line, "--explain", first.label], "ours": ["fit", *words]}
        screen.closing([Row(name, f"{program()} {shlex.join(typed)}") for name, typed in lines.items()])
    else:
        _terms(screen, chosen[0])
        screen.closing([Row("all rows", f"{program()} {shlex.join(line)}")])
    return int(not any(one.micro for one in chosen))


def _table(screen: Screen, found: Sequence[PeerFit]) -> None:
    first = found[0]
    rules = f"{first.rules.engine}, by its rules of bytes (docs/published.md); nothing of it was run"
    limit = f"{size(first.limit_bytes)} for a rank, of which libraries take {size(first.overhead.most)}"
    screen.rows([Row("engine", rules), Row("limit", limit)])
    screen.console.print()
    given = all(one.given for one in found)
    rows = [_cells(one) for one in found]
    header = GIVEN if given else HEADER
    screen.table(Table(header, tuple(tuple(row[name] for name in header) for row in rows), drops=DROPPED))
    verdicts = {one.verdict for one in found} if given else set()
    screen.rows(_copies(found) + [Row(f"fits {word}", why) for word, why in VERDICTS.items() if word in verdicts])


def _copies(found: Sequence[PeerFit]) -> list[Row]:
    """The cost of torch's default form of the optimizer, if the engine's rules have it."""
    terms = [term for one in found for term in one.rules.terms if term.what.startswith(COPIES)]
    most = max((term.nbytes for term in terms), default=0)
    told = f"torch's default form, with {COPIES} of up to {size(most)}; a fused one has none, so `perhaps` fits"
    return [Row("optimizer", told)] if most else []


def _cells(one: PeerFit) -> dict[str, str]:
    """The cells of the row by the names of their columns."""
    sizes = {"at rest": one.resting_bytes, "peak": one.peak.total, "activations": one.activations}
    found = {name: size(nbytes) for name, nbytes in sizes.items()}
    found |= {"row": one.label, "micro": micro_cell(one), "largest term": _largest(one)}
    if one.given:  # `reserved` replays steps
        host = {"host": one.host_bytes, "of node": one.host_of_node, "reserved": one.reserved and one.reserved.reserved}
        found |= {name: size(nbytes) if nbytes else ABSENT for name, nbytes in host.items()}
        found["fits"] = one.verdict
    return found


def _largest(one: PeerFit) -> str:
    return max(one.rules.terms, key=lambda term: term.nbytes).what


def _terms(screen: Screen, one: PeerFit) -> None:
    at = f"micro-batch {one.counted}{'' if one.micro else ', which does not fit'}"
    screen.say(f"{one.rules.engine}, {one.label}, {at}", "bold")
    places = [f"{term.moment.value}{', on the host' if term.on_host else ''}" for term in one.rules.terms]
    rows = [(term.what, place, size(term.nbytes)) for term, place in zip(one.rules.terms, places, strict=True)]
    rows += [
        ("activations, at most", "compute", size(one.activations)),
        ("allocated at the peak", "", size(one.peak.total)),
    ]
    screen.table(Table(("term", "exists", "bytes"), tuple(rows), names=2))
    screen.console.print()
    screen.rows(_after(one))


def _after(one: PeerFit) -> list[Row]:
    """What follows from the terms: bytes at rest, as torch counts them and as its allocator reserves them, the limit,
    and the host's."""
    after = size(one.rules.at(Moment.ALWAYS))
    rest = f"{size(one.resting_bytes)} between the last backward and the step, {after} after it"
    rows = [Row("at rest", rest), *_copies([one])]
    fixed, grows = one.reserved, one.replayed(expandable=True)
    if fixed is not None and grows is not None:
        rows.append(Row("allocated", f"{size(one.peak.total)} {WORKSPACES}"))
        ways = f"{size(fixed.reserved)} by torch's allocator; {size(grows.reserved)} with {EXPANDABLE}"
        rows.append(Row("reserved", ways))
        rows.append(Row("libraries", f"{size(one.overhead.least)} to {size(one.overhead.most)}: CUDA, cuBLAS and NCCL"))
    return [*rows, limit_row(one, one.peak.total + one.overhead.most)] + [host_row(one)] * bool(one.host_bytes)
