"""The terms of another engine reach the model of the allocator together with the activations."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import published_reserved
from zero_runtime.predict.memory.activation_count import Mark, Trace
from zero_runtime.predict.memory.peer_reserved import peer_reserved
from zero_runtime.predict.memory.peers import Moment, PeerMemory, PeerTerm

MIB = 1 << 20
UNITS = [[MIB, 3 * MIB]] * 4  # elements of the two parameters of each unit
UNIT_BYTES = 2 * 4 * MIB
ACTIVATION, STATES = 16 * MIB, 64 * MIB


def trace() -> Trace:
    """Each unit keeps one activation until its backward."""
    made = Trace()
    kept = []
    for unit in range(len(UNITS)):
        made.mark(Mark.BEFORE_FORWARD, unit)
        kept.append(made.came(ACTIVATION, in_block=True))
        made.mark(Mark.AFTER_FORWARD, unit)
    made.forward_end = len(made.events)
    for unit in reversed(range(len(UNITS))):
        made.mark(Mark.BEFORE_BACKWARD, unit)
        made.went(kept.pop())
        made.mark(Mark.AFTER_BACKWARD, unit)
    return made


def peaks(*terms: PeerTerm, expandable: bool = True, micro_batches: int = 1) -> tuple[int, int]:
    rules = PeerMemory("an engine", (PeerTerm("states", STATES), *terms))
    found = peer_reserved(trace(), rules, UNITS, expandable=expandable, micro_batches=micro_batches, other=(2 * MIB,))
    return found.allocated, found.reserved


@pytest.mark.parametrize(
    ("term", "more"),
    [
        (PeerTerm("bucket", 8 * MIB, Moment.COMPUTE), 8 * MIB),
        (PeerTerm("copy", 80 * MIB, Moment.STEP), 80 * MIB - 4 * ACTIVATION),  # when the activations are gone
        (PeerTerm("offloaded", 80 * MIB, on_host=True), 0),
        # With the last unit's backward all gradients exist, and no activation any more.
        (PeerTerm("gradients", 48 * MIB, Moment.GRADIENTS), 0),
        (PeerTerm("one unit at a time", UNIT_BYTES, Moment.COMPUTE, each=2), UNIT_BYTES),
        (PeerTerm("two units", 2 * UNIT_BYTES + MIB, Moment.COMPUTE, each=2), 2 * UNIT_BYTES),
        (PeerTerm("all units", 9 * UNIT_BYTES, Moment.COMPUTE, each=2), 4 * UNIT_BYTES),
        (PeerTerm("less than a unit", UNIT_BYTES - 1, Moment.COMPUTE, each=2), 0),
    ],
)
def test_the_allocated_bytes_are_the_highest_sum_of_terms_and_activations(term: PeerTerm, more: int) -> None:
    """All tensors are multiples of 2 MiB, so that rounding adds nothing."""
    assert peaks(term)[0] == STATES + 2 * MIB + 4 * ACTIVATION + more


def test_gradients_of_earlier_micro_batches_stay() -> None:
    gradients = PeerTerm("gradients", 48 * MIB, Moment.GRADIENTS)
    assert peaks(gradients, micro_batches=2)[0] == peaks()[0] + 48 * MIB


def test_the_default_segments_reserve_more_than_those_that_grow() -> None:
    """A copy of the step finds the activations' memory free, but not in one segment: it takes one of its own, where
    segments that grow need at most one page more."""
    copy = PeerTerm("copy", 50 * MIB, Moment.STEP)
    grows, fixed = (peaks(copy, expandable=expandable)[1] for expandable in (True, False))
    assert fixed - grows >= 50 * MIB - 20 * MIB


@pytest.mark.full
def test_the_table_of_published_reserved_bytes_is_the_one_that_the_command_prints() -> None:
    page = (Path(__file__).parents[4] / "docs" / "published.md").read_text(encoding="utf-8")
    table = [line for line in published_reserved.report() if line.startswith("|")]
    assert len(table) == 2 + 17
    assert "\n".join(table) in page
