"""Memory allocated by torch's CPU allocator, including buffers that kernels allocate internally."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


def allocated_peak(function: Callable[[], None]) -> int:
    """Peak of the bytes allocated during a call, above the bytes allocated when it began."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    assert record.profiler is not None
    events = sorted(record.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"), default=0)
