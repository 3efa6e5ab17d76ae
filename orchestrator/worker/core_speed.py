"""Times a fixed piece of work next to each measured step: how fast the cores of a rank are at that moment.

[Note: reference work]
A core of a virtual machine may share its hardware with a neighbour that no counter of the guest shows: the same step
takes half as long again, and is back within a second. Work that is always the same meets the same
neighbour. It has the three kinds of work that steps on cores consist of: products of small matrices, sums over arrays
as large as a core's cache, and calls of operations that have next to nothing to do. It takes one to two milliseconds,
which are left out of the step's time. How it is used is in [Note: equal speed of the cores] of rounds/intervals.py.
"""

from __future__ import annotations

import time

import torch

SIDE = 128  # of the matrices: three of them are 192 KiB
PRODUCTS = 8
NUMEL = 131072  # of the arrays: two of them are 1 MiB
SUMS = 20
FEW, CALLS = 64, 100  # elements of a small array, and the operations on it


class ReferenceWork:
    """The work of one rank. There is none with uses_cores=False: where steps run on another device, and where no
    speeds are compared."""

    def __init__(self, *, uses_cores: bool) -> None:
        self._tensors: tuple[torch.Tensor, ...] = ()
        if uses_cores:
            shapes = ((SIDE, SIDE), (SIDE, SIDE), (SIDE, SIDE), (NUMEL,), (NUMEL,))
            self._tensors = tuple(torch.ones(shape, dtype=torch.float32) for shape in shapes)

    @torch.no_grad()
    def timed_ms(self) -> float | None:
        """Does the work once. Returns its milliseconds; None if there is no such work."""
        if not self._tensors:
            return None
        left, right, product, values, sums = self._tensors
        began = time.perf_counter()
        for _ in range(PRODUCTS):
            torch.mm(left, right, out=product)
        for _ in range(SUMS):
            torch.add(values, 1.0, out=sums)
        few = values[:FEW]
        for _ in range(CALLS):
            torch.add(few, 1.0)
        return 1e3 * (time.perf_counter() - began)
