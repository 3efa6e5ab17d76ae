"""Measures how fast a disk reads and writes scratch files, by size and number of requests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from zero_runtime.offload.scratch_file import ScratchFile, Transfer, aligned_buffer
from zero_runtime.offload_plan import ScratchSettings

BLOCK_MIB = (1, 2, 4, 8, 16)
REQUESTS = (1, 2, 4, 8)
TEST_BYTES = 256 << 20


class DriveSpeed(NamedTuple):
    """Bytes per second of reads, of writes, and of both together (in each direction), as in an optimizer step."""

    block_mib: int
    requests: int
    read: float
    write: float
    both: float
    direct: bool


def measure_drive(folder: Path, total: int = TEST_BYTES) -> Iterator[DriveSpeed]:
    """Measure each block size with each number of requests. OffloadError if the folder cannot hold `total` bytes."""
    first, second = aligned_buffer(total // 2), aligned_buffer(total // 2)
    for tensor in (first, second):
        tensor.zero_()
        tensor[::512] = 1  # a disk might not store a buffer of zeros
    for block_mib in BLOCK_MIB:
        for requests in REQUESTS:
            settings = ScratchSettings(folder, block_mib << 20, requests, verify=False)
            file = ScratchFile(settings, total, rank=0)
            try:
                write = total / _seconds(file.write(0, first, "test"), file.write(total // 2, second, "test"))
                read = total / _seconds(file.read(0, first, "test"), file.read(total // 2, second, "test"))
                both = total / 2 / _seconds(file.read(0, first, "test"), file.write(total // 2, second, "test"))
                yield DriveSpeed(block_mib, requests, read, write, both, file.direct)
            finally:
                file.close()


def _seconds(*moving: Transfer) -> float:
    start = time.perf_counter()  # the transfers have begun, but their first blocks take far longer than getting here
    for move in moving:
        move.wait()
    return time.perf_counter() - start
