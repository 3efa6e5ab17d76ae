"""A model of PyTorch's caching allocator for CUDA: the bytes that a sequence of allocations and frees reserves.

Pure: standard library only. The constants are those of torch 2.13.0 (c10/core/AllocatorConfig.h), the rules those of
`DeviceCachingAllocator` (c10/cuda/CUDACachingAllocator.cpp, read at pytorch's commit 001074d25084); the names in quotes
are theirs. No GPU has confirmed them here: the claim `allocator` of `make gpu` compares the two.

Not modelled, because the runtime does not use them: `record_stream` (a block is free as soon as its tensor is, so that
`active_bytes` always equals `allocated_bytes`), private pools of CUDA graphs, and `garbage_collection_threshold`, which
is off by default.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from zero_runtime.errors import PlanError, ZeroError
from zero_runtime.predict.memory.allocator_blocks import BlockPool, MemoryBlock, sizes

MIB = 1 << 20
BLOCK = 512  # kMinBlockSize: the size of a block is a multiple of it, and at least it
SMALL = 1 * MIB  # kSmallSize: the largest request that a small pool serves
SMALL_SEGMENT = 2 * MIB  # kSmallBuffer: the bytes of a segment of a small pool, and of a page of an expandable one
LARGE_SEGMENT = 20 * MIB  # large_segment_size: the same of a large pool, for requests below OWN_SEGMENT
OWN_SEGMENT = 10 * MIB  # kMinLargeAlloc: from here on a request gets a segment of its own size ...
SEGMENT_STEP = 2 * MIB  # kRoundLarge: ... rounded up to a multiple of this
OVERSIZE_SPARE = 20 * MIB  # max_non_split_rounding_size: a larger oversize block is too large for a request
FIRST_ADDRESS = 1 << 40
UNBOUNDED = 1 << 46  # address space of an expandable segment where the memory of the device is not given, in bytes


@dataclass(frozen=True)
class AllocatorSettings:
    """What `PYTORCH_CUDA_ALLOC_CONF` sets, with torch's defaults.

    expandable: `expandable_segments`. max_split: `max_split_size_mb`, in bytes; free blocks of at least this size are
    kept for requests of at least this size, and are not split. roundup_divisions: `roundup_power2_divisions`, one
    number for all sizes; 0 and 1: none. PlanError for values that torch refuses, and for `max_split` with `expandable`,
    which is not modelled.
    """

    expandable: bool = False
    max_split: int | None = None
    roundup_divisions: int = 0

    def __post_init__(self) -> None:
        if self.max_split is not None and self.max_split < LARGE_SEGMENT:
            raise PlanError(f"max_split: expected at least {LARGE_SEGMENT} bytes, found {self.max_split}")
        if self.max_split is not None and self.expandable:
            raise PlanError("max_split: expected None with expandable segments")
        if self.roundup_divisions < 0 or self.roundup_divisions & (self.roundup_divisions - 1):
            raise PlanError(f"roundup_divisions: expected 0 or a power of 2, found {self.roundup_divisions}")

    def rounded(self, nbytes: int) -> int:
        """The size of the block for a request of `nbytes` (`round_size`), in bytes."""
        divisions = self.roundup_divisions
        if divisions > 1 and nbytes > BLOCK * divisions:
            # The steps between two powers of 2 are equal, and as many as there are divisions.
            return rounded_up(nbytes, (1 << (nbytes.bit_length() - 1)) // divisions)
        return rounded_up(max(nbytes, BLOCK), BLOCK)


def segment_bytes(size: int) -> int:
    """The bytes asked of the driver for a block of `size` bytes that no free block can hold (`get_allocation_size`)."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < OWN_SEGMENT else rounded_up(size, SEGMENT_STEP)


def rounded_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


class OutOfDeviceMemory(ZeroError):
    """A request that does not fit after all cached segments were released.

    requested: bytes of the request. refused: bytes that the driver did not have for it, in whole segments or pages.
    limit, allocated, reserved: bytes at this moment. largest: bytes of the largest free block of the request's pool.
    """

    def __init__(self, requested: int, refused: int, limit: int, allocated: int, reserved: int, largest: int) -> None:
        super().__init__(
            f"out of device memory: {requested} bytes were requested, for which {refused} more must be reserved; "
            f"of {limit} bytes {reserved} are reserved, {allocated} of them allocated; the largest free block of that "
            f"stream and kind has {largest}"
        )
        self.requested, self.refused, self.limit = requested, refused, limit
        self.allocated, self.reserved, self.largest = allocated, reserved, largest


@dataclass(frozen=True)
class ReservedSegment:
    """Memory that is reserved and adjoins, for an explanation: of an expandable segment a range that is mapped.

    address: of its first byte. small: it serves requests of at most 1 MiB. blocks: the bytes of each block in the order
    of addresses, and whether it is allocated.
    """

    address: int
    stream: int
    small: bool
    blocks: tuple[tuple[int, bool], ...]

    @property
    def nbytes(self) -> int:
        return sum(size for size, _ in self.blocks)


class CachingAllocator:
    """The allocator of one device. All sizes are in bytes.

    allocated: the sum of the blocks that are allocated, which are larger than the requests: torch's
    `memory_allocated`. reserved: all memory obtained from the driver: `memory_reserved`. Their peaks:
    `max_memory_allocated`, `max_memory_reserved`.
    """

    def __init__(
        self,
        limit_bytes: int | None = None,
        settings: AllocatorSettings | None = None,
        place: Callable[[int], int] | None = None,
    ) -> None:
        """`limit_bytes`: the memory that the driver can give; None: any amount. A limit that is set with
        `set_per_process_memory_fraction` is the same, but with expandable segments torch compares that with the bytes
        of the segment that it would obtain without them, which is not modelled.

        `place`: gets the bytes of a segment and returns the address that the driver gives it. Addresses decide between
        free blocks of one size. By default they rise and none is used again.
        """
        self.settings = AllocatorSettings() if settings is None else settings
        self.limit_bytes = limit_bytes
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self._place = self._next_address if place is None else place
        self._address = FIRST_ADDRESS
        self._refused = 0
        self._pools: dict[tuple[int, bool], BlockPool] = {}
        self._blocks: dict[int, MemoryBlock | None] = {}

    def allocate(self, key: int, nbytes: int, stream: int = 0) -> None:
        """Allocates `nbytes` on a stream, under a key for `free`; 0 bytes take no block.

        OutOfDeviceMemory: they do not fit, and nothing was allocated, but cached segments were released. ValueError:
        the key is in use, or the size is negative.
        """
        if key in self._blocks or nbytes < 0:
            raise ValueError(f"expected a new key and a size of at least 0, found key {key} and {nbytes} bytes")
        if nbytes == 0:
            self._blocks[key] = None
            return
        size = self.settings.rounded(nbytes)
        where = stream, size <= SMALL
        pool = self._pools.get(where)
        if pool is None:
            pool = self._pools[where] = BlockPool(*where, SMALL_SEGMENT if size <= SMALL else LARGE_SEGMENT)
        block = self._cached(pool, size) or self._obtained(pool, size, nbytes)
        if self._splits(block, size):
            block.cut(size).insert()
        block.allocated = True
        self._blocks[key] = block
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated

    def free(self, key: int) -> None:
        """Frees what was allocated under the key. ValueError: nothing was."""
        if key not in self._blocks:
            raise ValueError(f"expected a key that is allocated, found {key}")
        block = self._blocks.pop(key)
        if block is not None:
            block.allocated = False
            self.allocated -= block.size
            block.merge()
            block.insert()

    def address(self, key: int) -> int:
        """Where the block under the key begins; 0 for one of 0 bytes, as `Tensor.data_ptr` says. KeyError: none is."""
        block = self._blocks[key]
        return 0 if block is None else block.address

    def empty_cache(self) -> None:
        """Gives segments without an allocated block back to the driver (`torch.cuda.empty_cache`).

        Of an expandable segment it gives back the pages that lie within a free block.
        """
        for pool in self._pools.values():
            for _, _, block in list(pool.free):
                if self.settings.expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    self._release(block)

    def segments(self) -> tuple[ReservedSegment, ...]:
        """What is reserved, in the order of addresses."""
        blocks = [block for block in self._blocks.values() if block is not None]
        blocks += [block for pool in self._pools.values() for _, _, block in pool.free]
        heads = [block for block in blocks if block.before is None or not block.before.mapped]
        return tuple(
            ReservedSegment(head.address, head.pool.stream, head.pool.small, tuple(sizes(head)))
            for head in sorted(heads, key=lambda head: head.address)
        )

    def _cached(self, pool: BlockPool, size: int) -> MemoryBlock | None:
        """The smallest free block of at least `size`, at the lowest address, taken from its list (`get_free_block`)."""
        free, most = pool.free, self.settings.max_split
        index = bisect_left(free, (size,))
        if index == len(free):
            return None
        if self.settings.expandable:
            # A block counts as large as it can grow, so that the one at the growing end is taken last.
            while index + 1 < len(free) and free[index + 1][2].room() < free[index][2].room():
                index += 1
        elif most is not None and (free[index][0] >= most if size < most else free[index][0] >= size + OVERSIZE_SPARE):
            return None
        return free.pop(index)[2]

    def _obtained(self, pool: BlockPool, size: int, nbytes: int) -> MemoryBlock:
        """A block of at least `size` with new memory, for which cached segments are released if they must be."""
        obtain = self._expand if self.settings.expandable else self._new_segment
        block = obtain(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = obtain(pool, size)
        if block is None:
            self.empty_cache()
            block = obtain(pool, size)
        if block is None:
            assert self.limit_bytes is not None  # without a limit the driver refuses nothing
            largest = pool.free[-1][0] if pool.free else 0
            raise OutOfDeviceMemory(nbytes, self._refused, self.limit_bytes, self.allocated, self.reserved, largest)
        return block

    def _splits(self, block: MemoryBlock, size: int) -> bool:
        """Whether the part of a block that a request leaves over becomes a free block (`should_split`)."""
        spare = block.size - size
        if block.pool.small or self.settings.expandable:
            return spare >= BLOCK
        return spare > SMALL and (self.settings.max_split is None or size < self.settings.max_split)

    def _reserve(self, nbytes: int) -> bool:
        """Whether the driver gives so many bytes; if so they are counted."""
        if self.limit_bytes is not None and self.reserved + nbytes > self.limit_bytes:
            self._refused = nbytes
            return False
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _next_address(self, nbytes: int) -> int:
        address = self._address
        self._address += nbytes
        return address

    # Segments that are obtained and released as a whole.

    def _new_segment(self, pool: BlockPool, size: int) -> MemoryBlock | None:
        nbytes = segment_bytes(size)
        if not self._reserve(nbytes):
            return None
        address = self._place(nbytes)
        return MemoryBlock(pool, address, address, nbytes)

    def _release(self, block: MemoryBlock) -> None:
        block.remove()
        self.reserved -= block.size

    def _release_oversize(self, pool: BlockPool, size: int) -> bool:
        """Releases the smallest oversize block that leaves enough memory, else the largest ones until they are enough.

        Whether that makes another attempt worthwhile (`release_available_cached_blocks`).
        """
        most = self.settings.max_split
        if most is None:
            return False
        wanted, released = max(size, most), 0
        index = bisect_left(pool.free, (wanted,))
        if index < len(pool.free):
            self._release(pool.free[index][2])
            return True
        while released < wanted and pool.free and pool.free[-1][0] >= most:
            released += pool.free[-1][0]
            self._release(pool.free[-1][2])
        return released >= wanted

    # Expandable segments: one for each pool, which maps and unmaps pages within its range of addresses.

    def _expand(self, pool: BlockPool, size: int) -> MemoryBlock | None:
        """A free block of at least `size`, after pages were mapped (`try_allocate_expandable_block`).

        Pages that were mapped before the limit was reached are kept.
        """
        block = self._lowest_room(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            after = block.after
            assert after is not None  # there is room for `size`
            if not self._map(after, min(size - block.size, after.size)):
                return None
            block = after  # it has absorbed the block before it
        block.remove()
        return block

    def _lowest_room(self, pool: BlockPool, size: int) -> MemoryBlock:
        """The first of adjoining free and unmapped blocks with room for `size`, at the lowest address.

        A new segment has addresses for 9/8 of the device's memory (`find_expandable_block`).
        """
        for _, unmapped in pool.unmapped:
            before = unmapped.before
            first = unmapped if before is None or before.allocated else before
            block: MemoryBlock | None = first
            room = 0
            while room < size and block is not None and not block.allocated:
                room += block.size
                block = block.after
            if room >= size:
                return first
        nbytes = UNBOUNDED if self.limit_bytes is None else self.limit_bytes + self.limit_bytes // 8
        nbytes = rounded_up(max(nbytes, size), pool.page)
        address = self._place(nbytes)
        block = MemoryBlock(pool, address, address, nbytes, mapped=False)
        block.insert()
        return block

    def _map(self, block: MemoryBlock, nbytes: int) -> bool:
        """Maps the pages of the first `nbytes` of an unmapped block, which becomes free (`map_block`)."""
        nbytes = rounded_up(nbytes, block.pool.page)  # an unmapped block begins and ends with a page
        if not self._reserve(nbytes):
            return False
        block.remove()
        if nbytes < block.size:
            block.cut(nbytes).insert()
        block.mapped = True
        block.merge()
        block.insert()
        return True

    def _unmap(self, block: MemoryBlock) -> None:
        """Unmaps the pages that lie within a free block (`unmap_block`); a segment without any other block ends."""
        page, offset = block.pool.page, block.address - block.base
        first, end = rounded_up(offset, page), (offset + block.size) // page * page
        if first >= end:
            return
        block.remove()
        self.reserved -= end - first
        if first > offset:
            head, block = block, block.cut(first - offset)
            head.insert()
        if block.size > end - first:
            block.cut(end - first).insert()
        block.mapped = False
        block.merge()
        if block.before is not None or block.after is not None:
            block.insert()
