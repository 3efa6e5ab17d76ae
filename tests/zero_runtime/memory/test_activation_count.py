"""Kept and peak activation bytes are computed correctly from traces written by hand."""

from __future__ import annotations

from zero_runtime.memory.activation_count import ActivationBytes, Trace, between


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
    two, eight = (2, step(20, 8, 40, rest=5)), (8, step(80, 32, 160, rest=5))
    for micro in (3, 5, 7):
        assert between(two, eight, micro) == step(10 * micro, 4 * micro, 20 * micro, rest=5).total()


def test_sizes_that_two_traces_do_not_determine_give_none() -> None:
    two, eight = (2, step(20, 8, 40)), (8, step(80, 32, 160))
    assert between(two, eight, 8) is None
    assert between(two, eight, 9) is None
    assert between(two, (8, step(80, 32, 161)), 3) is None  # not an integer number of bytes per sequence
    other = step(80, 32, 160)
    other.went(other.came(1, in_block=False))
    assert between(two, (8, other), 3) is None
