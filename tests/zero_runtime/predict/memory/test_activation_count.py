"""Kept and peak activation bytes are computed correctly from traces written by hand."""

from __future__ import annotations

import json

import pytest

from zero_runtime.predict.memory.activation_count import ActivationBytes, LinearTrace, Mark, Trace


def step(embedding: int, block: int, gradient: int, *, rest: int = 0) -> Trace:
    """The trace of an embedding and a block: two storages are kept, one is freed in forward, backward creates one."""
    trace = Trace()
    first = trace.came(embedding + rest, in_block=False)
    passing = trace.came(10, in_block=True)
    kept = trace.came(block, in_block=True)
    trace.went(passing)
    trace.forward_end = len(trace.events)
    made = trace.came(gradient, in_block=False)
    trace.went(kept)
    trace.went(first)
    trace.went(made)
    return trace


def test_bytes_alive_after_the_forward_are_kept_and_the_worst_moment_is_the_peak() -> None:
    assert step(100, 1000, 300).total() == ActivationBytes(
        kept=1100, kept_outside=100, peak=1400, peak_outside=100, peak_backward=300
    )
    assert step(100, 1000, 5).total() == ActivationBytes(
        kept=1100, kept_outside=100, peak=1110, peak_outside=100, peak_backward=0
    )
    assert Trace().total() == ActivationBytes(0, 0, 0, 0, 0)


def test_bytes_on_the_host_are_counted_separately() -> None:
    trace = Trace()
    trace.came(100, in_block=True)
    trace.came(64, in_block=True, on_host=True)
    trace.forward_end = len(trace.events)
    assert trace.total() == ActivationBytes(
        kept=100, kept_outside=0, peak=100, peak_outside=0, peak_backward=0, host=64
    )


def test_a_micro_batch_between_two_traced_ones_is_interpolated_storage_by_storage() -> None:
    linear = LinearTrace.between((2, step(20, 8, 40, rest=5)), (8, step(80, 32, 160, rest=5)))
    assert linear is not None
    for micro in (2, 3, 5, 7, 8):
        assert linear.at(micro) == step(10 * micro, 4 * micro, 20 * micro, rest=5)
    for outside in (1, 9):
        with pytest.raises(ValueError, match=f"micro-batch {outside}: expected 2 to 8"):
            linear.at(outside)


def test_sizes_that_two_traces_do_not_determine_give_none() -> None:
    two = (2, step(20, 8, 40))
    assert LinearTrace.between(two, two) is None
    assert LinearTrace.between(two, (8, step(80, 32, 161))) is None  # not an integer number of bytes per sequence
    other = step(80, 32, 160)
    other.went(other.came(1, in_block=False))
    assert LinearTrace.between(two, (8, other)) is None
    marked = step(80, 32, 160)
    marked.mark(Mark.BEFORE_FORWARD, 0)
    assert LinearTrace.between(two, (8, marked)) is None


def test_a_trace_is_the_same_after_json() -> None:
    trace = step(20, 8, 40)
    trace.mark(Mark.GRADIENT, 3)
    linear = LinearTrace.of_one(2, trace)
    assert LinearTrace.of_plain(json.loads(json.dumps(linear.plain()))) == linear


def test_a_report_that_is_repeated_is_marked_once() -> None:
    trace = Trace()
    for kind in (Mark.BEFORE_BACKWARD, Mark.BEFORE_BACKWARD, Mark.GRADIENT, Mark.BEFORE_BACKWARD):
        trace.mark(kind, 1)
    assert [kind for _, kind, _ in trace.marks] == [Mark.BEFORE_BACKWARD, Mark.GRADIENT, Mark.BEFORE_BACKWARD]


def test_the_parts_after_each_number_of_events_are_those_of_the_storages_that_exist_then() -> None:
    trace = step(100, 1000, 300)
    trace.on_host[2] = True
    away = trace.came(7, in_block=True)  # created by the backward of a block that recomputes
    trace.went(away)
    for count in range(len(trace.events) + 1):
        events = trace.events[:count]
        alive = {event for event in events if event > 0} - {-event for event in events}
        expected = [0, 0, 0]
        for event in alive:
            kind = 2 if event > 3 else 0 if trace.in_blocks[event - 1] else 1
            expected[kind] += 0 if trace.on_host[event - 1] else trace.sizes[event - 1]
        assert trace.parts(count) == tuple(expected)


def test_storages_that_end_together_are_ordered_within_the_forward_and_between_marks() -> None:
    """Two traces of one step, in which copies of weights were dropped in another order."""
    traces = []
    for dropped in ((0, 1, 2), (2, 0, 1)):
        trace = Trace()
        for _ in range(5):
            trace.came(8, in_block=True)
        for number in dropped:
            trace.went(number)
        trace.forward_end = len(trace.events)
        trace.went(4)
        trace.mark(Mark.BEFORE_BACKWARD, 0)
        trace.went(3)
        trace.order_ends()
        traces.append(trace)
    assert traces[0].events == traces[1].events == [1, 2, 3, 4, 5, -1, -2, -3, -5, -4]
    assert traces[0].same_steps(traces[1])
