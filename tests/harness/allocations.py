"""Memory allocated by torch's CPU allocator: tensors, without the buffers inside matrix products.

oneDNN allocates such buffers there for products of 16-bit matrices, and how large they are depends on the processor:
none without AVX-512, 4 bytes for each element of the result with AVX-512 alone, other copies of blocks with AVX512-BF16
and others again with AMX. What remains is the same on every processor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
SUMS_BYTES = 4  # of each element of a 16-bit result, in oneDNN with AVX-512 alone


def allocated_peak(function: Callable[[], None]) -> int:
    """Peak of the bytes allocated during a call, above the bytes allocated when it began."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    assert record.profiler is not None
    peak = total = 0
    ends: defaultdict[int, int] = defaultdict(int)  # of the last product, by thread
    for event in sorted(record.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        thread = event.start_thread_id()
        if event.name() in PRODUCTS:
            ends[thread] = max(ends[thread], event.end_ns())
        elif event.name() == "[memory]":
            before, total = total, total + event.nbytes()
            if event.start_ns() > ends[thread]:
                peak = max(peak, before, total)
    return max(peak, total)


@contextmanager
def products_in_loops() -> Iterator[None]:
    """16-bit matrices are multiplied without oneDNN, as on a processor that has neither AVX-512 nor bf16 products."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


class ProductsWithSums(TorchDispatchMode):
    """Each product of 16-bit matrices also allocates and frees the buffer that oneDNN takes with AVX-512 alone."""

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        with record_function(name):
            result = func(*args, **(kwargs or {}))
            if name in PRODUCTS and result.element_size() < SUMS_BYTES:
                torch.empty(result.numel() * SUMS_BYTES, dtype=torch.uint8)
        return result
