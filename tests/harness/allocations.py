"""What torch's CPU allocator gives out and gets back, down to the buffers that kernels take for themselves."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


def allocated_peak(function: Callable[[], None]) -> int:
    """The most bytes that were alive at once in a call, above what was alive when it began."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    assert record.profiler is not None
    events = sorted(record.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"), default=0)
