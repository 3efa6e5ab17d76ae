"""How fast a drive reads and writes scratch files, by size and number of requests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from zero_runtime.offload.scratch_file import ScratchFile, ScratchSettings, Transfer, aligned_buffer

BLOCK_MIB = (1, 2, 4, 8, 16)
REQUESTS = (1, 2, 4, 8)
TEST_BYTES = 256 << 20


class DriveSpeed(NamedTuple):
    """Bytes a second of reading, of writing, and of both at once (each way), as an optimizer's step does."""

    block_mib: int
    requests: int
    read: float
    write: float
    both: float
    direct: bool


def measure_drive(folder: Path, total: int = TEST_BYTES) -> Iterator[DriveSpeed]:
    """Each block size with each number of requests, in turn. OffloadError where the folder cannot hold such a file."""
    first, second = aligned_buffer(total // 2), aligned_buffer(total // 2)
    for tensor in (first, second):
        tensor.zero_()
        tensor[::512] = 1  # no drive may take it for nothing
    for block_mib in BLOCK_MIB:
        for requests in REQUESTS:
            settings = ScratchSettings(folder, block_mib << 20, requests, verify=False)
            file = ScratchFile(replace(settings), total, rank=0)
            try:
                write = total / _seconds(file.write(0, first, "test"), file.write(total // 2, second, "test"))
                read = total / _seconds(file.read(0, first, "test"), file.read(total // 2, second, "test"))
                both = total / 2 / _seconds(file.read(0, first, "test"), file.write(total // 2, second, "test"))
                yield DriveSpeed(block_mib, requests, read, write, both, file.direct)
            finally:
                file.close()


def _seconds(*moving: Transfer) -> float:
    start = time.perf_counter()  # the moves have begun; their first blocks take far longer than this
    for move in moving:
        move.wait()
    return time.perf_counter() - start
