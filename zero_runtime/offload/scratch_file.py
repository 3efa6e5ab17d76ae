"""One rank's scratch file: preallocated, read and written in blocks with direct I/O, several requests in flight.

Its content is needed only while the run is alive. So the file is unlinked as soon as it is open, and a run that is
killed leaves nothing behind. Offsets, sizes and buffer addresses are multiples of ALIGN_BYTES.

Each block's checksum is kept in memory from the write to the read. A block that is read back with another one ends the
run: otherwise training would continue with a silently wrong moment.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import pairwise
from uuid import uuid4

import torch

from zero_runtime.errors import OffloadError, missing_folder
from zero_runtime.kernels.checksum import checksum_function
from zero_runtime.offload.memory import buffer_bytes
from zero_runtime.offload_plan import ALIGN_BYTES, ScratchSettings, aligned
from zero_runtime.process_identity import mark, remove_left_behind

HUGE_BYTES = 2 << 20  # the smallest huge page
# Linux's MADV_HUGEPAGE, for memory that has not been touched yet, and, since 6.1, MADV_COLLAPSE, which replaces pages
# that malloc had in use before: jobs keep their heap, so none of its pages is new.
HUGE_ADVICE = (14, 25)
_libc = ctypes.CDLL(None)


def aligned_buffer(size: int) -> torch.Tensor:
    """Allocate [size] uint8 on the host at an address that direct I/O accepts."""
    whole = torch.empty(buffer_bytes(size), dtype=torch.uint8)
    start = -whole.data_ptr() % ALIGN_BYTES
    buffer = whole[start : start + size]
    _ask_for_huge_pages(buffer)
    return buffer


def _ask_for_huge_pages(buffer: torch.Tensor) -> None:
    """Only advice: nothing else changes if the kernel has no huge pages."""
    # A request to a disk is a list of pieces of physical memory, and disks accept a few hundred pieces at most. In
    # pages of 4 KiB a block of 4 MiB has a thousand pieces: it is sent as several requests, and each page is pinned
    # separately. Huge pages also save the update most of its address translations.
    size = buffer.nbytes // ALIGN_BYTES * ALIGN_BYTES
    if sys.platform != "linux" or size < HUGE_BYTES:
        return
    for advice in HUGE_ADVICE:
        _libc.madvise(ctypes.c_void_p(buffer.data_ptr()), ctypes.c_size_t(size), advice)


class Transfer:
    """A read or write under way. Keeps its buffer alive; do not use the buffer before `wait` has returned."""

    def __init__(self, parts: list[Future[None]]) -> None:
        self._parts = parts

    def wait(self) -> None:
        """Block until the transfer is done; OffloadError with the cause if a part failed."""
        self.settle()
        for part in self._parts:
            part.result()

    def settle(self) -> None:
        """Block until all parts have ended, even if some failed."""
        wait(self._parts)


class ScratchFile:
    """A file of `size` bytes in `settings.folder`.

    Every method may raise OffloadError, which states what was expected, what was found, and what to do.
    """

    def __init__(self, settings: ScratchSettings, size: int, rank: int) -> None:
        self.settings = settings
        self.size = aligned(size)
        self.path = settings.folder / f".zero-lab-{mark()}-rank{rank}-{uuid4().hex[:8]}.scratch"
        self.direct = True
        self._sums: dict[tuple[int, int], int] = {}  # checksum of a block by offset and size
        self._checksum = checksum_function() if settings.verify else None
        self._fd = self._open()
        # Separate pools: reads and writes do not queue behind each other, since disks are faster at both together.
        self._readers = ThreadPoolExecutor(settings.requests, thread_name_prefix="scratch-read")
        self._writers = ThreadPoolExecutor(settings.requests, thread_name_prefix="scratch-write")

    def _open(self) -> int:
        folder = self.path.parent
        if not os.path.isdir(folder):
            raise OffloadError(f"{folder}: expected a folder for scratch files, found {missing_folder(folder)}")
        remove_left_behind(folder.glob(".zero-lab-*.scratch"))  # by ranks that were killed before they unlinked it
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        try:
            fd = os.open(self.path, flags, 0o600)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            # Preallocated, so that a full disk is reported here and not in the middle of training.
            os.posix_fallocate(fd, 0, max(self.size, ALIGN_BYTES))
            direct = self._reopen_direct()
        except OSError as error:
            os.close(fd)
            raise self._unusable(error) from error
        finally:
            self.path.unlink()
        if direct is None:
            self.direct = False
            warnings.warn(
                f"{self.settings.folder}: this file system has no direct I/O; its reads and writes go through the page "
                "cache, which takes memory that offloading was to free. Use a folder on a drive of its own",
                stacklevel=2,
            )
            return fd
        os.close(fd)
        return direct

    def _reopen_direct(self) -> int | None:
        """Open the same file for direct I/O and try a read; None if the file system has no direct I/O."""
        if not hasattr(os, "O_DIRECT"):
            return None
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return None
        try:
            os.preadv(fd, [_bytes(aligned_buffer(ALIGN_BYTES))], 0)
        except OSError as error:
            os.close(fd)
            if error.errno != errno.EINVAL:
                raise
            return None
        return fd

    def read(self, offset: int, target: torch.Tensor, what: str) -> Transfer:
        """Start reading from `offset` into `target` (uint8, aligned); errors name `what`."""
        return self._start(self._readers, self._read_block, offset, target, what)

    def write(self, offset: int, source: torch.Tensor, what: str) -> Transfer:
        """Start writing `source` (uint8, aligned) at `offset`."""
        return self._start(self._writers, self._write_block, offset, source, what)

    def _start(
        self,
        pool: ThreadPoolExecutor,
        move: Callable[[int, torch.Tensor, str], None],
        offset: int,
        tensor: torch.Tensor,
        what: str,
    ) -> Transfer:
        assert offset % ALIGN_BYTES == 0, offset
        assert tensor.numel() % ALIGN_BYTES == 0, tensor.numel()
        assert tensor.data_ptr() % ALIGN_BYTES == 0, "the buffer is not aligned"
        step, end = self.settings.block_bytes, offset + tensor.numel()
        # Block bounds are multiples of the block size in the file, so a read has the same blocks as the write had.
        bounds = [offset, *range((offset // step + 1) * step, end, step), end]
        return Transfer(
            [
                pool.submit(_move, move, low, [tensor[low - offset : high - offset]], what)
                for low, high in pairwise(bounds)
                if low < high
            ]
        )

    def _read_block(self, offset: int, block: torch.Tensor, what: str) -> None:
        self._transfer(os.preadv, "read", offset, block, what)
        if self._checksum is None:
            return
        # In the thread that transfers the block, in parallel with the other threads' I/O.
        wanted = self._sums.get((offset, block.nbytes))
        if wanted is not None and self._checksum(block) != wanted:
            raise self._failed("read", offset, block.nbytes, what, "other bytes than were written there")

    def _write_block(self, offset: int, block: torch.Tensor, what: str) -> None:
        self._transfer(os.pwritev, "write", offset, block, what)
        if self._checksum is not None:
            self._sums[offset, block.nbytes] = self._checksum(block)

    def _transfer(
        self, call: Callable[[int, list[memoryview], int], int], verb: str, offset: int, block: torch.Tensor, what: str
    ) -> None:
        """Call it until all of the block is transferred: the kernel may stop earlier."""
        rest, place = _bytes(block), offset
        while rest:
            try:
                count = call(self._fd, [rest], place)
            except OSError as error:
                raise self._failed(verb, offset, block.nbytes, what, error.strerror or str(error)) from error
            if count == 0:
                raise self._failed(verb, offset, block.nbytes, what, f"the file's end at {place}")
            rest, place = rest[count:], place + count

    def _failed(self, verb: str, offset: int, size: int, what: str, found: str) -> OffloadError:
        return OffloadError(
            f"{what}: expected to {verb} {size} bytes at {offset} of {self.path}, found {found}; the run ends here, "
            "its checkpoints are as they were: mend or change offload.folder and resume"
        )

    def _unusable(self, error: OSError) -> OffloadError:
        found = error.strerror or str(error)
        need = f" for {self.size:,} bytes" if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT) else ""
        return OffloadError(
            f"{self.settings.folder}: expected to make a scratch file there{need}, found {found}; make room or mend "
            "the rights, or give another offload.folder"
        )

    def close(self) -> None:
        """Wait for transfers under way and free the disk space. Idempotent."""
        self._readers.shutdown()
        self._writers.shutdown()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _move(move: Callable[[int, torch.Tensor, str], None], offset: int, held: list[torch.Tensor], what: str) -> None:
    """Take the block out of the call's arguments, which the pool's thread may keep for a while after the transfer has
    been waited for: the memory would be freed late."""
    move(offset, held.pop(), what)


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Writable view of the tensor's memory, without a copy; it keeps the tensor alive during a transfer."""
    return memoryview(tensor.numpy().data)
