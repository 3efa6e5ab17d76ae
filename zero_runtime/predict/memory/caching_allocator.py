"""A model of PyTorch's caching allocator for CUDA: the bytes that a sequence of allocations and frees reserves.

It has what runs of zero-lab use, expandable segments, and what torch has by default, segments of fixed sizes; one
stream, and no limit. The constants are those of torch 2.13.0
(c10/core/AllocatorConfig.h), the rules those of `DeviceCachingAllocator` (c10/cuda/CUDACachingAllocator.cpp, read at
pytorch's commit 001074d25084); the names in quotes are theirs. No GPU has confirmed them here: the claim `allocator` of
`make gpu` compares the two. A block is free as soon as its tensor is, since the runtime calls no `record_stream`.
Standard library only.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

MIB = 1 << 20
BLOCK = 512  # kMinBlockSize: the size of a block is a multiple of it, and at least it
SMALL = 1 * MIB  # kSmallSize: the largest request that the small pool serves
SMALL_PAGE = 2 * MIB  # kSmallBuffer: the bytes by which the segment of the small pool grows
LARGE_PAGE = 20 * MIB  # large_segment_size: the same of the large pool
OWN_SEGMENT = 10 * MIB  # kMinLargeAlloc: from here on a request has a segment of its own size
OWN_MULTIPLE = 2 * MIB  # kRoundLarge: which is a multiple of it


def rounded_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


@dataclass(eq=False, slots=True)
class MemoryBlock:
    """A range of a pool's segment, linked to its neighbours. address: from the begin of the segment."""

    address: int
    size: int
    allocated: bool = False
    before: MemoryBlock | None = None
    after: MemoryBlock | None = None


class BlockPool:
    """The blocks for small or for large requests, all in one segment that grows by pages.

    mapped: the bytes of the segment. free: (bytes, address, block), from the smallest to the largest; no two blocks
    have one address, so that blocks are never compared. Two free neighbours become one block.
    """

    def __init__(self, page: int) -> None:
        self.page, self.mapped = page, 0
        self.free: list[tuple[int, int, MemoryBlock]] = []
        self.last: MemoryBlock | None = None

    def take(self, size: int) -> MemoryBlock:
        """The smallest free block of at least `size`, at the lowest address (`get_free_block`). What it has more stays
        free."""
        place = bisect_left(self.free, (size,))
        # The block at the end counts as large as it can grow, so that it is taken last.
        if place + 1 < len(self.free) and self.free[place][2] is self.last:
            place += 1
        block = self.free.pop(place)[2] if place < len(self.free) else self._grown(size)
        block.allocated = True
        if block.size > size:
            rest = MemoryBlock(block.address + size, block.size - size, before=block, after=block.after)
            block.size = size
            self._link(rest)
            self._list(rest)
        return block

    def _grown(self, size: int) -> MemoryBlock:
        """A block of at least `size` at the end, after pages were mapped (`try_allocate_expandable_block`)."""
        block = self.last
        if block is None or block.allocated:
            block = MemoryBlock(self.mapped, 0, before=self.last)
            self._link(block)
        else:
            self._unlist(block)
        more = rounded_up(size - block.size, self.page)
        block.size += more
        self.mapped += more
        return block

    def give_back(self, block: MemoryBlock) -> None:
        """Free a block, and join it with its free neighbours (`try_merge_blocks`)."""
        block.allocated = False
        before, after = block.before, block.after
        if before is not None and not before.allocated:
            self._unlist(before)
            block.address, block.size, block.before = before.address, before.size + block.size, before.before
        if after is not None and not after.allocated:
            self._unlist(after)
            block.size, block.after = block.size + after.size, after.after
        self._link(block)
        self._list(block)

    def _link(self, block: MemoryBlock) -> None:
        """Make a block the neighbour of those that are its neighbours."""
        if block.before is not None:
            block.before.after = block
        if block.after is not None:
            block.after.before = block
        else:
            self.last = block

    def _list(self, block: MemoryBlock) -> None:
        insort(self.free, (block.size, block.address, block))

    def _unlist(self, block: MemoryBlock) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address))]


class FixedPool(BlockPool):
    """The same with torch's default segments, of which none grows: two free blocks of two segments stay two."""

    def take(self, size: int) -> MemoryBlock:
        """The smallest free block of at least `size`, at the lowest address; a new segment if there is none. A large
        block is split if more than 1 MiB is left (`should_split`)."""
        place = bisect_left(self.free, (size,))
        block = self.free.pop(place)[2] if place < len(self.free) else self._segment(size)
        block.allocated = True
        if block.size - size >= (BLOCK if self.page == SMALL_PAGE else SMALL + 1):
            rest = MemoryBlock(block.address + size, block.size - size, before=block, after=block.after)
            block.size = size
            self._link(rest)
            self._list(rest)
        return block

    def _segment(self, size: int) -> MemoryBlock:
        """A new segment of at least `size` (`get_allocation_size`)."""
        block = MemoryBlock(self.mapped, self.page if size < OWN_SEGMENT else rounded_up(size, OWN_MULTIPLE))
        self.mapped += block.size
        return block


class CachingAllocator:
    """The allocator of one device. expandable: its segments are. allocated: bytes of the blocks in use, which are
    larger than the requests: torch's `memory_allocated`; peak_allocated: the most of them. It gives no memory back."""

    def __init__(self, *, expandable: bool = True) -> None:
        pool = BlockPool if expandable else FixedPool
        self.small, self.large = pool(SMALL_PAGE), pool(LARGE_PAGE)
        self.allocated = self.peak_allocated = 0

    @property
    def reserved(self) -> int:
        """All memory obtained from the driver: torch's `memory_reserved`."""
        return self.small.mapped + self.large.mapped

    def allocate(self, nbytes: int) -> MemoryBlock:
        """A block for a request of at least one byte, for `free`."""
        size = -(-nbytes // BLOCK) * BLOCK  # without calls, since millions of blocks are replayed
        block = (self.small if size <= SMALL else self.large).take(size)
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        return block

    def free(self, block: MemoryBlock) -> None:
        self.allocated -= block.size
        (self.small if block.size <= SMALL else self.large).give_back(block)
