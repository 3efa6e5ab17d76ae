"""The model of torch's caching allocator follows each rule of its source, in examples computed by hand."""

from __future__ import annotations

import pytest
from harness.allocator_comparison import Blocks, segments_of

from zero_runtime.predict.memory.caching_allocator import (
    BLOCK,
    LARGE_PAGE,
    MIB,
    SMALL_PAGE,
    CachingAllocator,
    MemoryBlock,
)


def after(*requests: int) -> tuple[CachingAllocator, list[MemoryBlock]]:
    """An allocator with these requests in bytes, and their blocks."""
    model = CachingAllocator()
    return model, [model.allocate(nbytes) for nbytes in requests]


@pytest.mark.parametrize(
    ("requests", "reserved"),
    [
        ((BLOCK,), 2 * MIB),
        ((MIB, MIB, BLOCK), 4 * MIB),
        ((MIB + BLOCK, 18 * MIB), 20 * MIB),  # both in one segment of 20 MiB
        ((9 * MIB, 11 * MIB + BLOCK), (20 + 12) * MIB),  # the second has its own, of a multiple of 2 MiB
        ((30 * MIB, 15 * MIB), (30 + 16) * MIB),
    ],
)
def test_a_segment_of_torch_s_default_has_a_fixed_size(requests: tuple[int, ...], reserved: int) -> None:
    model = CachingAllocator(expandable=False)
    for nbytes in requests:
        model.allocate(nbytes)
    assert model.reserved == reserved


def test_free_blocks_of_two_segments_stay_two() -> None:
    """What the default segments reserve more: 40 MiB are free, and a request of 40 MiB takes a new segment."""
    for expandable, reserved in ((True, 40 * MIB), (False, 80 * MIB)):
        model = CachingAllocator(expandable=expandable)
        for block in [model.allocate(20 * MIB), model.allocate(20 * MIB)]:
            model.free(block)
        model.allocate(40 * MIB)
        assert model.reserved == reserved


def test_at_most_1_mib_is_left_in_a_block_of_the_default_segments() -> None:
    model = CachingAllocator(expandable=False)
    block = model.allocate(19 * MIB + BLOCK)
    assert (block.size, model.allocated) == (20 * MIB, 20 * MIB)
    model.free(block)
    assert model.allocate(19 * MIB - BLOCK).size == 19 * MIB - BLOCK


def blocks(model: CachingAllocator) -> list[Blocks]:
    return segments_of(model)


@pytest.mark.parametrize(
    ("nbytes", "size"), [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)]
)
def test_a_block_is_a_multiple_of_512_bytes_and_at_least_512(nbytes: int, size: int) -> None:
    model, _ = after(nbytes)
    assert (model.allocated, model.peak_allocated) == (size, size)


def test_requests_of_at_most_1_mib_have_a_segment_of_their_own() -> None:
    model, _ = after(MIB, MIB + BLOCK)
    assert blocks(model) == [((MIB, True), (MIB, False)), ((MIB + BLOCK, True), (19 * MIB - BLOCK, False))]


def test_a_segment_grows_by_pages() -> None:
    model, _ = after(30 * MIB)
    assert blocks(model) == [((30 * MIB, True), (10 * MIB, False))]
    model.allocate(15 * MIB)  # the 10 MiB at the end, and a page
    assert blocks(model) == [((30 * MIB, True), (15 * MIB, True), (15 * MIB, False))]
    for nbytes in (MIB, MIB, BLOCK):
        model.allocate(nbytes)
    assert model.reserved == 3 * LARGE_PAGE + 2 * SMALL_PAGE


@pytest.mark.parametrize(("size", "page"), [(MIB - BLOCK, SMALL_PAGE), (LARGE_PAGE - BLOCK, LARGE_PAGE)])
def test_a_block_is_split_if_512_bytes_are_left(size: int, page: int) -> None:
    model, _ = after(size)
    assert blocks(model) == [((size, True), (page - size, False))]
    assert model.allocated == size


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    model, held = after(30 * MIB, BLOCK + MIB, 24 * MIB, BLOCK + MIB, 40 * MIB, BLOCK + MIB)
    for place in (0, 2, 4):
        model.free(held[place])
    model.allocate(23 * MIB)
    free = [size for size, allocated in blocks(model)[0] if not allocated]
    assert free[:3] == [30 * MIB, MIB, 40 * MIB]


def test_of_blocks_of_one_size_the_one_at_the_lowest_address_is_taken() -> None:
    model, held = after(5 * MIB, 2 * MIB, 5 * MIB, 8 * MIB)
    model.free(held[2])
    model.free(held[0])
    assert model.allocate(3 * MIB).address == 0


def test_the_free_block_at_the_growing_end_is_taken_last() -> None:
    """It counts with all the memory that it can grow into, so that a larger block before the end fits better."""
    model, held = after(9 * MIB, MIB + BLOCK)
    model.free(held[0])  # 9 MiB free at the beginning, and 20 - 10 - 512 bytes free at the end
    model.allocate(8 * MIB)
    assert blocks(model) == [((8 * MIB, True), (MIB, False), (MIB + BLOCK, True), (10 * MIB - BLOCK, False))]
    # Also where the block at the end is the smaller of the two.
    model, held = after(12 * MIB, MIB + BLOCK)
    model.free(held[0])
    model.allocate(5 * MIB)
    assert blocks(model) == [((5 * MIB, True), (7 * MIB, False), (MIB + BLOCK, True), (7 * MIB - BLOCK, False))]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_a_freed_block_merges_with_both_neighbours(order: tuple[int, ...]) -> None:
    model, held = after(3 * MIB, 4 * MIB, 5 * MIB)
    for place in order:
        model.free(held[place])
    assert blocks(model) == [((LARGE_PAGE, False),)]
    assert (model.allocated, model.reserved, model.peak_allocated) == (0, LARGE_PAGE, 12 * MIB)


def test_memory_between_blocks_in_use_is_fragmented_and_a_larger_request_cannot_use_it() -> None:
    model, held = after(9 * MIB, 2 * MIB, 9 * MIB)
    model.free(held[0])
    model.allocate(9 * MIB + BLOCK)
    assert blocks(model) == [
        ((9 * MIB, False), (2 * MIB, True), (9 * MIB, True), (9 * MIB + BLOCK, True), (11 * MIB - BLOCK, False))
    ]
    assert model.reserved == 2 * LARGE_PAGE
