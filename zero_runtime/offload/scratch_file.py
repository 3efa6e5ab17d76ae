"""One rank's scratch file: preallocated, read and written in blocks with direct I/O, several requests in flight.

What lies in it is only worth something while its run lives: it is unlinked as soon as it is open, so a run that is
killed leaves nothing behind. Offsets and sizes are multiples of ALIGN_BYTES, and so are the buffers' addresses.

[Note: checksums]
Each block's checksum is kept in memory from its writing to its reading. The thread that moves the block sums it,
beside the other threads' I/O. A block that comes back otherwise ends the run: a silently wrong moment would train on.

[Note: huge pages]
A request to a drive is a list of pieces of physical memory, and drives take a few hundred pieces at most. In pages of
4 KiB a block of 4 MiB is a thousand of them: it is sent as several requests, and each page is pinned for itself. So
large buffers ask for huge pages, which also spares the update most of its address translations: for what is not
touched yet, and at once in place of what malloc had in use before (jobs keep their heap: no page of it is new).
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from uuid import uuid4

import torch

from zero_runtime.errors import OffloadError, PlanError, missing_folder
from zero_runtime.kernels.checksum import checksum_function
from zero_runtime.offload.memory import ALIGN_BYTES, aligned, buffer_bytes
from zero_runtime.process_identity import mark, remove_left_behind

HUGE_BYTES = 2 << 20  # the smallest huge page
HUGE_ADVICE = (14, 25)  # Linux's MADV_HUGEPAGE and, since 6.1, MADV_COLLAPSE
_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class ScratchSettings:
    """folder: on the drive to use; it must exist. block_bytes: of one request, whole pages.

    requests: of each kind in flight at once. ahead: units that are read before and written behind the one that is
    updated. verify: see [Note: checksums].
    """

    folder: Path
    block_bytes: int = 4 << 20
    requests: int = 4
    ahead: int = 1
    verify: bool = True

    def __post_init__(self) -> None:
        if self.block_bytes < 1 or self.block_bytes % ALIGN_BYTES:
            raise PlanError(
                f"scratch.block_bytes: expected a multiple of {ALIGN_BYTES:,}, which direct I/O needs, found "
                f"{self.block_bytes:,}; set it to {max(aligned(self.block_bytes), ALIGN_BYTES):,}"
            )
        if self.requests < 1:
            raise PlanError(f"scratch.requests: expected at least 1 in flight, found {self.requests}")
        if self.ahead < 0:
            raise PlanError(f"scratch.ahead: expected at least 0 units, found {self.ahead}")


def aligned_buffer(size: int) -> torch.Tensor:
    """[size] uint8 on the host at an address that direct I/O takes."""
    whole = torch.empty(buffer_bytes(size), dtype=torch.uint8)
    start = -whole.data_ptr() % ALIGN_BYTES
    buffer = whole[start : start + size]
    _ask_for_huge_pages(buffer)
    return buffer


def _ask_for_huge_pages(buffer: torch.Tensor) -> None:
    """See [Note: huge pages]. A wish: where the kernel has none, nothing else changes."""
    size = buffer.nbytes // ALIGN_BYTES * ALIGN_BYTES
    if sys.platform != "linux" or size < HUGE_BYTES:
        return
    for advice in HUGE_ADVICE:
        _libc.madvise(ctypes.c_void_p(buffer.data_ptr()), ctypes.c_size_t(size), advice)


class Transfer:
    """A read or write under way. Keeps its buffer alive; nobody may touch that before `wait` has returned."""

    def __init__(self, parts: list[Future[None]]) -> None:
        self._parts = parts

    def wait(self) -> None:
        """Block until all of it is done; OffloadError with the cause where a part failed."""
        self.settle()
        for part in self._parts:
            part.result()

    def settle(self) -> None:
        """Block until nothing moves any more, whatever became of it."""
        wait(self._parts)


class ScratchFile:
    """`size` bytes in `settings.folder`. Every method may raise OffloadError: what was expected, found, what to do."""

    def __init__(self, settings: ScratchSettings, size: int, rank: int) -> None:
        self.settings = settings
        self.size = aligned(size)
        self.path = settings.folder / f".zero-lab-{mark()}-rank{rank}-{uuid4().hex[:8]}.scratch"
        self.direct = True
        self._sums: dict[tuple[int, int], int] = {}  # by offset and size
        self._checksum = checksum_function() if settings.verify else None
        self._fd = self._open()
        # Reads and writes do not queue behind each other: drives do both at once faster than one after the other.
        self._readers = ThreadPoolExecutor(settings.requests, thread_name_prefix="scratch-read")
        self._writers = ThreadPoolExecutor(settings.requests, thread_name_prefix="scratch-write")

    def _open(self) -> int:
        folder = self.path.parent
        if not os.path.isdir(folder):
            raise OffloadError(f"{folder}: expected a folder for scratch files, found {missing_folder(folder)}")
        remove_left_behind(folder.glob(".zero-lab-*.scratch"))  # of ranks that were killed before they unlinked it
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        try:
            fd = os.open(self.path, flags, 0o600)
        except OSError as error:
            raise self._unusable(error) from error
        try:
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
        """The same file for direct I/O, tried out; None where the file system has none."""
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
        """Start filling `target` (uint8, aligned) from `offset`; `what` is named in errors."""
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
        # Blocks lie at multiples of the block size in the file, so any range meets the same ones as their writing did.
        bounds = [offset, *range((offset // step + 1) * step, end, step), end]
        return Transfer(
            [
                pool.submit(move, low, tensor[low - offset : high - offset], what)
                for low, high in pairwise(bounds)
                if low < high
            ]
        )

    def _read_block(self, offset: int, block: torch.Tensor, what: str) -> None:
        rest, place = _bytes(block), offset
        while rest:
            try:
                count = os.preadv(self._fd, [rest], place)
            except OSError as error:
                raise self._failed("read", offset, block.nbytes, what, error.strerror or str(error)) from error
            if count == 0:
                raise self._failed("read", offset, block.nbytes, what, f"the file's end at {place}")
            rest, place = rest[count:], place + count
        if self._checksum is None:
            return
        wanted = self._sums.get((offset, block.nbytes))
        if wanted is not None and self._checksum(block) != wanted:
            raise self._failed("read", offset, block.nbytes, what, "other bytes than were written there")

    def _write_block(self, offset: int, block: torch.Tensor, what: str) -> None:
        rest, place = _bytes(block), offset
        while rest:
            try:
                count = os.pwritev(self._fd, [rest], place)
            except OSError as error:
                raise self._failed("write", offset, block.nbytes, what, error.strerror or str(error)) from error
            rest, place = rest[count:], place + count
        if self._checksum is not None:
            self._sums[offset, block.nbytes] = self._checksum(block)

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
        """Wait for what is under way and give the space back. Idempotent."""
        self._readers.shutdown()
        self._writers.shutdown()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's memory, writable, without a copy; it keeps the tensor alive for as long as anyone moves bytes."""
    return memoryview(tensor.numpy().data)
