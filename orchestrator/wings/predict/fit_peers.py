"""What `zlab fit --as ENGINE` shows: what fits under another engine's byte rules, and the terms of one row."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from orchestrator import wings
from orchestrator.config.engine import EngineKind
from orchestrator.config.schema import Device, RunConfig
from orchestrator.config.strict import Refusal
from orchestrator.planning.point import Point
from orchestrator.report.screen import Screen, make_console
from orchestrator.report.summary import Row, Table
from orchestrator.text.paths import program
from orchestrator.text.units import ABSENT, many, size
from orchestrator.wings.predict.fit_page import VERDICTS, WORKSPACES, named
from orchestrator.wings.predict.fit_words import document
from orchestrator.wings.predict.memory_cache import units_key
from orchestrator.wings.predict.peer_fit import NAMES, PeerFit, peer_fit
from orchestrator.wings.predict.peer_limits import limits
from orchestrator.wings.predict.prediction import gpu_bytes_here, overhead_of, target_here
from orchestrator.wings.predict.step import Memories, given_micro
from zero_runtime.predict.memory.peers import COPIES, Moment

EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True"
HEADER = ("row", "micro", "peak", "at rest", "activations", "largest term")
GIVEN = ("row", "micro", "fits", "at rest", "peak", "activations", "reserved", "host", "of node", "largest term")
DROPPED = ("activations", "host", "of node", "largest term")  # by a narrow terminal, in this order


def points_of(engine: str, points: Sequence[Point]) -> list[Point]:
    """The points as this engine's, so that their activations are counted as it computes them: in the dtype of the
    parameters, or under its autocast. Those of an engine whose rules alone are known stay as they are."""
    if engine not in wings.ENGINES:
        return list(points)
    return [replace(one, config=_of_engine(EngineKind(engine), one.config)) for one in points]


def _of_engine(kind: EngineKind, config: RunConfig) -> RunConfig:
    dtypes, has_masters = config.precision.dtypes, config.precision.dtypes.master == "fp32"
    dtype = config.precision.compute if kind is EngineKind.plain and has_masters else dtypes.param
    precision = replace(config.precision, compute=dtype)
    return replace(config, engine=replace(config.engine, kind=kind), precision=precision)


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
        row = peer_fit(
            engine,
            point.label,
            tuple(point.overrides),
            memory,
            shapes,
            limit,
            overhead,
            given=given_micro(point.config, point.overrides),
            ranks_per_node=target.ranks_per_node,
            host_limit_bytes=target.host_bytes if target.device is Device.cuda else None,
        )
        found += [row] if row is not None else []
    if not found:
        raise Refusal([f"--as {engine}: {why}" for why in reasons(engine, points)])
    return found


def reasons(engine: str, points: Sequence[Point]) -> list[str]:
    """What of the points the engine's rules do not know, each once."""
    return list(dict.fromkeys(str(broken) for point in points for broken in limits(engine, point.config)))


def show(
    engine: str,
    found: Sequence[PeerFit],
    points: Sequence[Point],
    words: Sequence[str],
    explain: str | None,
    *,
    as_json: bool,
) -> int:
    """Prints the rows, or the terms of one. points: those that were asked for. Returns 0 if something fits, else 1."""
    screen = Screen(make_console(on_stderr=as_json))
    chosen = found if explain is None else [named(found, explain)]
    if as_json:
        print(document(points[0].config.model.name, chosen))
    elif explain is None:
        _table(screen, chosen)
        if (tried := len(points)) > len(found):
            screen.console.print()
            screen.rows([Row("left out", f"{tried - len(found)} of {many(tried, 'row')}")])
            screen.rows([Row("", why) for why in reasons(engine, points)])
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
    given = all(one.given for one in found)
    rows = tuple(_given_cells(one) if given else _cells(one) for one in found)
    screen.table(Table(GIVEN if given else HEADER, rows, drops=DROPPED))
    verdicts = {one.verdict for one in found} if given else set()
    screen.rows(_copies(found) + [Row(f"fits {word}", why) for word, why in VERDICTS.items() if word in verdicts])


def _copies(found: Sequence[PeerFit]) -> list[Row]:
    """What torch's default form of the optimizer costs, if the engine's rules have it."""
    terms = [term for one in found for term in one.memory.terms if term.what.startswith(COPIES)]
    most = max((term.nbytes for term in terms), default=0)
    told = f"torch's default form, with {COPIES} of up to {size(most)}; a fused one has none, so `perhaps` fits"
    return [Row("optimizer", told)] if most else []


def _cells(one: PeerFit) -> tuple[str, ...]:
    micro = f"{one.micro}{'+' if one.capped else ''}" if one.micro else ABSENT
    return (one.label, micro, size(one.peak), size(one.memory.resting), size(one.activations), _largest(one))


def _given_cells(one: PeerFit) -> tuple[str, ...]:
    reserved, host = one.reserved(), one.memory.host_bytes
    return (
        one.label,
        str(one.given),
        one.verdict,
        size(one.memory.resting),
        size(one.peak),
        size(one.activations),
        ABSENT if reserved is None else size(reserved.reserved),
        size(host) if host else ABSENT,
        size(one.host_of_node) if host else ABSENT,
        _largest(one),
    )


def _largest(one: PeerFit) -> str:
    return max(one.memory.terms, key=lambda term: term.nbytes).what


def _terms(screen: Screen, one: PeerFit) -> None:
    at = f"micro-batch {one.counted}{'' if one.micro else ', which does not fit'}"
    screen.say(f"{one.memory.engine}, {one.label}, {at}", "bold")
    places = [f"{term.moment.value}{', on the host' if term.on_host else ''}" for term in one.memory.terms]
    rows = [(term.what, place, size(term.nbytes)) for term, place in zip(one.memory.terms, places, strict=True)]
    rows += [("activations, at most", "compute", size(one.activations)), ("allocated at the peak", "", size(one.peak))]
    screen.table(Table(("term", "exists", "bytes"), tuple(rows), names=2))
    screen.console.print()
    screen.rows(_after(one))


def _after(one: PeerFit) -> list[Row]:
    """What follows from the terms: bytes at rest, as torch counts them and as its allocator reserves them, the limit,
    and the host's."""
    after = size(one.memory.at(Moment.ALWAYS))
    rest = f"{size(one.memory.resting)} between the last backward and the step, {after} after it"
    rows = [Row("at rest", rest), *_copies([one])]
    fixed, grows = one.reserved(), one.reserved(expandable=True)
    if fixed is not None and grows is not None:
        rows.append(Row("allocated", f"{size(one.peak)} {WORKSPACES}"))
        ways = f"{size(fixed.reserved)} by torch's allocator; {size(grows.reserved)} with {EXPANDABLE}"
        rows.append(Row("reserved", ways))
        rows.append(Row("libraries", f"{size(one.overhead.least)} to {size(one.overhead.most)}: CUDA, cuBLAS and NCCL"))
    left = one.limit_bytes - one.peak - one.overhead.most
    spare = f"{size(left)} are left" if left >= 0 else f"{size(-left)} too few"
    rows.append(Row("limit", f"{size(one.limit_bytes)}: {spare}"))
    if one.memory.host_bytes:
        limit = f" of {size(one.host_limit_bytes)}" if one.host_limit_bytes is not None else ""
        node = f"{one.ranks_per_node} ranks of a node: {size(one.host_of_node)}{limit}"
        rows.append(Row("host memory", f"{size(one.memory.host_bytes)} of each rank; {node}"))
    return rows


def engine_names() -> tuple[str, ...]:
    """The engines whose rules are known."""
    return NAMES
