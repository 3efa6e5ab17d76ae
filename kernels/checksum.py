"""Checksums of host memory, which verify that bytes read back from disk are those that were written."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch

from zero_runtime.kernels.cpu import operations
from zero_runtime.kernels.registration import prepare

Checksum = Callable[[torch.Tensor], int]


def checksum_function() -> Checksum:
    """A function that computes a 32-bit checksum of a contiguous uint8 CPU tensor.

    It may be called from any thread, and other threads run meanwhile. It is the compiled one (see [Note: three lanes]
    in checksum.cpp), or zlib's CRC-32 if that is not available. The two give different checksums, so a caller that
    stores checksums must keep the function that computed them. Both detect every flipped bit, and all but one in 2^32
    of other changes. This call prepares the CPU (registration.py); ZLAB_KERNELS applies as for every operation.

    The compiled one is not the plain CRC-32C, which would need tables to combine the three lanes: checksums that never
    leave the process need not follow a standard. zlib's is much slower, and would take most of the processor time of a
    step whose states are in a scratch file.
    """
    return operations.checksum if prepare(torch.device("cpu")) and operations.has_checksum() else zlib_crc32


def zlib_crc32(data: torch.Tensor) -> int:
    """The function where nothing is compiled."""
    return zlib.crc32(data.numpy().data)
