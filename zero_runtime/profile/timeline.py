"""The memory of one step over time, by component, and what holds it at the peak. Standard library only.

[Note: components of a profile]
A block is a component's if one of the runtime's own tensors has its address while it lives: parameters, gradients,
masters, optimizer states, and messages, the buffers of collectives under way. What is allocated while a collective is
started or waited for is a message too. Of the rest, what was allocated in a forward and outlives it is an activation,
as is what a recomputation makes for the backward after it. All other blocks of the step are temporary: working memory
of operations and gradients of activations. "other" was there before the step and is none of these, such as buffers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from zero_runtime.profile.trace import BACKWARD, COMMUNICATION, FORWARD, RECOMPUTE, Context, MemoryEvent

COMPONENTS = (
    "parameters",
    "gradients",
    "masters",
    "optimizer_states",
    "activations",
    "messages",
    "temporary",
    "other",
)
MESSAGES = "messages"
NOWHERE = Context()
COLUMNS = 240  # of a timeline: more than a picture's pixels can show apart
HOLDERS = 16


class BlockOwner(NamedTuple):
    """What a block of memory is. name: the unit or module that it belongs to; may be empty."""

    component: str
    name: str


class StartBlock(NamedTuple):
    """A block that exists when the step begins."""

    address: int
    nbytes: int
    held: BlockOwner


class Sample(NamedTuple):
    """The runtime's own tensors at a moment, by address."""

    at_us: float
    held: Mapping[int, BlockOwner]


@dataclass
class TimedBlock:
    """Memory from its allocation to its release. died_us: None while it lives. context: of its allocation."""

    address: int
    nbytes: int
    born_us: float
    context: Context
    died_us: float | None = None
    died_in: Context = NOWHERE
    held: BlockOwner | None = None


class PeakMoment(NamedTuple):
    """The moment of the most memory."""

    at_us: float
    nbytes: int
    context: Context


class Timeline(NamedTuple):
    """columns: the moment of the most memory in each of equal parts of the step, with the bytes by component."""

    columns: list[tuple[float, dict[str, int]]]
    peak: PeakMoment
    at_peak: list[TimedBlock]


def blocks_of(start: Sequence[StartBlock], events: Sequence[MemoryEvent], start_us: float) -> list[TimedBlock]:
    """All blocks of the step. The release of a block whose allocation is not known counts for nothing."""
    found = [TimedBlock(one.address, one.nbytes, start_us, NOWHERE, held=one.held) for one in start]
    live = {block.address: block for block in found}
    for event in events:
        before = live.pop(event.address, None)
        if before is not None:  # also if its memory is given out again without a release that was seen
            before.died_us, before.died_in = event.at_us, event.context
        if event.nbytes > 0:
            block = TimedBlock(event.address, event.nbytes, event.at_us, event.context)
            live[event.address] = block
            found.append(block)
    return found


def name_blocks(
    blocks: Sequence[TimedBlock], samples: Sequence[Sample], forwards: Sequence[tuple[float, float]]
) -> None:
    """Sets `held` of all blocks that have none. forwards: when the forwards of the step began and ended.

    See [Note: components of a profile].
    """
    by_address: dict[int, list[tuple[float, BlockOwner]]] = {}
    for sample in samples:
        for address, held in sample.held.items():
            by_address.setdefault(address, []).append((sample.at_us, held))
    for block in blocks:
        if block.held is None:
            block.held = _sampled(block, by_address.get(block.address, ())) or _by_context(block, forwards)


def _sampled(block: TimedBlock, seen: Sequence[tuple[float, BlockOwner]]) -> BlockOwner | None:
    """What it was seen as; the result of a reduction is first a message, and a gradient from its end on."""
    found = [held for at, held in seen if at >= block.born_us and (block.died_us is None or at < block.died_us)]
    return next((held for held in found if held.component != MESSAGES), found[0] if found else None)


def _by_context(block: TimedBlock, forwards: Sequence[tuple[float, float]]) -> BlockOwner:
    context, name = block.context, block.context.module or ""
    if context.phase == COMMUNICATION:
        return BlockOwner(MESSAGES, name)
    if context.way == RECOMPUTE:
        return BlockOwner("activations" if block.died_in.way == BACKWARD else "temporary", name)
    end_us = next((end for start, end in forwards if start <= block.born_us < end), None)
    if context.phase == FORWARD and end_us is not None and (block.died_us is None or block.died_us >= end_us):
        return BlockOwner("activations", name)
    return BlockOwner("temporary", name)


def timeline_of(
    blocks: Sequence[TimedBlock], start_us: float, end_us: float, columns: int = COLUMNS, unseen: int = 0
) -> Timeline:
    """The named blocks over time. unseen: bytes that the allocator counts besides them, as "other"."""
    changes = sorted(
        [(block.born_us, 1, at) for at, block in enumerate(blocks) if block.born_us > start_us]
        + [(block.died_us, 0, at) for at, block in enumerate(blocks) if block.died_us is not None]
    )
    held = dict.fromkeys(COMPONENTS, 0)
    held["other"] += unseen
    for block in blocks:
        if block.born_us <= start_us:
            held[_component(block)] += block.nbytes
    total = sum(held.values())
    peak = PeakMoment(start_us, total, NOWHERE)
    width = (end_us - start_us) / columns or 1.0
    found: list[tuple[float, dict[str, int]]] = []
    highest = (start_us, total, dict(held))
    for at_us, is_born, number in changes:
        while len(found) < columns - 1 and at_us >= start_us + (len(found) + 1) * width:
            found.append((highest[0], highest[2]))
            highest = (start_us + len(found) * width, total, dict(held))
        block = blocks[number]
        size = block.nbytes if is_born else -block.nbytes
        held[_component(block)] += size
        total += size
        if total > highest[1]:
            highest = (at_us, total, dict(held))
        if total > peak.nbytes:
            peak = PeakMoment(at_us, total, block.context)
    while len(found) < columns:
        found.append((highest[0], highest[2]))
        highest = (start_us + len(found) * width, total, dict(held))
    return Timeline(found, peak, [block for block in blocks if _lives_at(block, peak.at_us)])


def _lives_at(block: TimedBlock, at_us: float) -> bool:
    return block.born_us <= at_us and (block.died_us is None or block.died_us > at_us)


def _component(block: TimedBlock) -> str:
    assert block.held is not None, "name_blocks names all"
    return block.held.component


def holders(blocks: Sequence[TimedBlock], most: int = HOLDERS) -> list[dict[str, Any]]:
    """The blocks by component and name, the largest first; the numbers of layers are not told apart.

    Each has component, name, bytes, tensors (their number) and largest_bytes.
    """
    groups: dict[BlockOwner, list[int]] = {}
    for block in blocks:
        assert block.held is not None
        groups.setdefault(BlockOwner(block.held.component, alike(block.held.name)), []).append(block.nbytes)
    found = [
        {**held._asdict(), "bytes": sum(sizes), "tensors": len(sizes), "largest_bytes": max(sizes)}
        for held, sizes in groups.items()
    ]
    return sorted(found, key=lambda one: -one["bytes"])[:most]


def alike(name: str) -> str:
    """The name with * for numbers between dots: equal for the same module of all layers."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
