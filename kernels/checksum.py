"""Checksums of the host's memory, by which bytes that went to a drive are known again when they come back."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch

from zero_runtime.kernels.backends import backend_for
from zero_runtime.kernels.cpu.operations import CpuKernels

Checksum = Callable[[torch.Tensor], int]


def checksum_function() -> Checksum:
    """What sums a contiguous uint8 tensor on the host to 32 bits; from any thread, and others run meanwhile.

    The compiled one (see [Note: three lanes] in checksum.cpp), else zlib's CRC-32. Sums of the two are not comparable:
    whoever keeps sums keeps the function. Both find every flipped bit, and all but one in 2^32 of other changes.
    May compile; ZLAB_KERNELS decides as for every operation.
    """
    kernels = backend_for(torch.device("cpu"))
    return kernels.checksum if isinstance(kernels, CpuKernels) and kernels.has_checksum else _zlib_crc32


def _zlib_crc32(data: torch.Tensor) -> int:
    return zlib.crc32(data.numpy().data)
