"""The blocks of a caching allocator: ranges of addresses, linked to their neighbours and listed by size.

Pure: standard library only. The rules by which they are cut, taken and released are in `caching_allocator.py`; the
names in quotes are those of torch (c10/cuda/CUDACachingAllocator.cpp).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator


class MemoryBlock:
    """A range of addresses of one segment, linked to its neighbours. Two free neighbours become one block.

    base: the address at which the segment begins. mapped: it has memory; False only in an expandable segment.
    """

    __slots__ = ("address", "after", "allocated", "base", "before", "mapped", "pool", "size")

    def __init__(self, pool: BlockPool, base: int, address: int, size: int, mapped: bool = True) -> None:
        self.pool, self.base, self.address, self.size = pool, base, address, size
        self.allocated, self.mapped = False, mapped
        self.before: MemoryBlock | None = None
        self.after: MemoryBlock | None = None

    def cut(self, size: int) -> MemoryBlock:
        """Shortens this block to `size` bytes, and returns a block of the others, which is in no list."""
        rest = MemoryBlock(self.pool, self.base, self.address + size, self.size - size, self.mapped)
        rest.before, rest.after = self, self.after
        if self.after is not None:
            self.after.before = rest
        self.after = rest
        self.size = size
        return rest

    def merge(self) -> None:
        """Absorbs the neighbours that are free and mapped as this block is (`try_merge_blocks`)."""
        before, after = self.before, self.after
        if before is not None and not before.allocated and before.mapped == self.mapped:
            before.remove()
            self.address, self.before = before.address, before.before
            self.size += before.size
            if self.before is not None:
                self.before.after = self
        if after is not None and not after.allocated and after.mapped == self.mapped:
            after.remove()
            self.after = after.after
            self.size += after.size
            if self.after is not None:
                self.after.before = self

    def insert(self) -> None:
        """Puts this block into its pool's list of free or of unmapped blocks."""
        if self.mapped:
            insort(self.pool.free, (self.size, self.address, self))
        else:
            insort(self.pool.unmapped, (self.address, self))

    def remove(self) -> None:
        """Takes this block out of the list that it is in."""
        if self.mapped:
            del self.pool.free[bisect_left(self.pool.free, (self.size, self.address))]
        else:
            del self.pool.unmapped[bisect_left(self.pool.unmapped, (self.address,))]

    def room(self) -> int:
        """Bytes of this block and of the unmapped memory behind it, into which it can grow."""
        after = self.after
        return self.size if after is None or after.mapped else self.size + after.size


class BlockPool:
    """The blocks of one stream that hold small or large requests, but not those that are allocated.

    free: (bytes, address, block), from the smallest to the largest. unmapped: (address, block), from the lowest address
    to the highest. No two blocks have one address, so that blocks are never compared. page: the bytes that an
    expandable segment maps at a time.
    """

    def __init__(self, stream: int, small: bool, page: int) -> None:
        self.stream, self.small, self.page = stream, small, page
        self.free: list[tuple[int, int, MemoryBlock]] = []
        self.unmapped: list[tuple[int, MemoryBlock]] = []


def sizes(block: MemoryBlock | None) -> Iterator[tuple[int, bool]]:
    """Bytes of the block and of those behind it, up to the first that is not mapped, and whether each is allocated."""
    while block is not None and block.mapped:
        yield block.size, block.allocated
        block = block.after
