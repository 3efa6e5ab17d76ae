"""Times a fixed piece of work next to each measured step: how fast the cores of a rank are at that moment.

A core of a virtual machine may share its hardware with a neighbour that no counter of the guest shows: the same step
takes half as long again, and is back within a second. Work that is always the same meets the same
neighbour. It has the three kinds of work that steps on cores consist of: products of small matrices, sums over arrays,
and calls of operations that have next to nothing to do. It takes about a millisecond, which is left out of the
step's time. How it is used is in [Note: equal speed of the cores] of rounds/comparison.py.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import time

import torch

from orchestrator.config.schema import Device, RunConfig
from zero_runtime.offload_plan import Tier

# Whoever changes the work changes its number, rounds/recorded.py's REFERENCE_WORK.
SIDE = 128  # of the matrices: three of them are 192 KiB
PRODUCTS = 8
NUMEL = 16384  # of the arrays: two of them are 128 KiB
SUMS = 100
SHAPES = ((SIDE, SIDE), (SIDE, SIDE), (SIDE, SIDE), (NUMEL,), (NUMEL,))
FEW, CALLS = 64, 100  # elements of a small array, and the operations on it
# The smallest huge page. The arrays take 0.3 MiB of it, less than a core's own cache of 0.5 to 2 MiB: a virtual
# machine's huge page may lie in small pages of its host, and the cache has room for the arrays wherever they lie.
# Arrays of 1.2 MiB in a cache of 2 MiB had a speed of their own in each process (benchmarks/core_speed.py).
PAGE_BYTES = 2 << 20


def compares_cores(config: RunConfig) -> bool:
    """Whether reference work is timed next to the steps of a run: of one on cores that takes turns with others.

    Offloaded states are updated in the background of the next step; next to reference work such an update would be in
    the time of no step.
    """
    is_offloaded = {config.offload.params, config.offload.optimizer} != {Tier.DEVICE}
    return config.resources.device is Device.cpu and config.measure.rounds > 1 and not is_offloaded


class ReferenceWork:
    """The work of one rank. There is none with uses_cores=False: where steps run on another device, and where no
    speeds are compared."""

    def __init__(self, *, uses_cores: bool) -> None:
        self._memory = huge_page() if uses_cores else None

    @torch.no_grad()
    def timed_ms(self) -> float | None:
        """Does the work once. Returns its milliseconds; None if there is no such work."""
        if self._memory is None:
            return None
        # The tensors are made for each call, so that no count of a rank's tensors includes them.
        left, right, product, values, sums = arrays_in(self._memory)
        began = time.perf_counter()
        for _ in range(PRODUCTS):
            torch.mm(left, right, out=product)
        for _ in range(SUMS):
            torch.add(values, 1.0, out=sums)
        few = values[:FEW]
        for _ in range(CALLS):
            torch.add(few, 1.0)
        return 1e3 * (time.perf_counter() - began)


def huge_page() -> mmap.mmap:
    """Memory that holds one whole huge page, with ones in the arrays. A system without huge pages has small ones."""
    # A cache keeps an address by its place in physical memory. Arrays in pages of 4 KiB get other places in every
    # process, so the same work could be faster in one process than in another for as long as both live, and the points
    # of a sweep would seem to have met different cores. In one huge page each array has the same place.
    memory = mmap.mmap(-1, 2 * PAGE_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # of a kernel that was built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    for array in arrays_in(memory):
        array.fill_(1.0)
    return memory


def arrays_in(memory: mmap.mmap) -> list[torch.Tensor]:
    """The fp32 arrays of the work, one behind the other from the beginning of the page."""
    whole = torch.frombuffer(memory, dtype=torch.float32)
    first = -whole.data_ptr() % PAGE_BYTES // whole.itemsize
    sizes = [math.prod(shape) for shape in SHAPES]
    parts = whole[first : first + sum(sizes)].split_with_sizes(sizes)
    return [part.view(shape) for part, shape in zip(parts, SHAPES, strict=True)]
