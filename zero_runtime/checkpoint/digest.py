"""The checksum of a file's bytes: the CRC-32 of zlib and gzip, computed while the file is read or written.

It has to detect errors of disks and networks (a flipped bit, a hole, a block of another file), not attacks, and every
language has it. It is several times as fast as the SHA family and BLAKE2; plain sums of words would be faster still,
but do not detect two exchanged blocks.
"""

from __future__ import annotations

import zlib
from concurrent.futures import Future, ThreadPoolExecutor

from zero_runtime.checkpoint.layout import checksum_text

_WORTH_A_THREAD_BYTES = 1 << 18  # handing a block to a thread takes as long as the checksum of this many bytes


class RunningDigest:
    """Computes the checksum of blocks in order, large ones in a thread.

    `add` may return before its block is read: do not change the block until the next `add` or `text`.
    """

    def __init__(self) -> None:
        self._value = 0
        self._under_way: Future[int] | None = None
        self._pool: ThreadPoolExecutor | None = None

    def add(self, block: bytes | memoryview) -> None:
        self._settle()
        if len(block) < _WORTH_A_THREAD_BYTES:
            self._value = zlib.crc32(block, self._value)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-digest")
        # zlib releases Python's lock: the caller writes the block meanwhile, so the checksum costs no time of the disk.
        self._under_way = self._pool.submit(zlib.crc32, block, self._value)

    def text(self) -> str:
        """The checksum of all blocks; ends the thread."""
        self.close()
        return checksum_text(self._value)

    def close(self) -> None:
        self._settle()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _settle(self) -> None:
        if self._under_way is not None:
            self._value = self._under_way.result()
            self._under_way = None
