"""The model of torch's caching allocator follows each rule of its source, in examples computed by hand."""

from __future__ import annotations

import pytest

from zero_runtime.errors import PlanError
from zero_runtime.predict.memory.caching_allocator import (
    BLOCK,
    LARGE_SEGMENT,
    MIB,
    SMALL_SEGMENT,
    AllocatorSettings,
    CachingAllocator,
    OutOfDeviceMemory,
    segment_bytes,
)

GIB = 1024 * MIB
EXPANDABLE = AllocatorSettings(expandable=True)


def after(*requests: int, settings: AllocatorSettings | None = None, limit: int | None = None) -> CachingAllocator:
    """An allocator with these requests in bytes, under the keys 0, 1, 2, ..."""
    model = CachingAllocator(limit, settings)
    for key, nbytes in enumerate(requests):
        model.allocate(key, nbytes)
    return model


def blocks(model: CachingAllocator) -> list[tuple[tuple[int, bool], ...]]:
    return [segment.blocks for segment in model.segments()]


# Rounding.


@pytest.mark.parametrize(
    ("nbytes", "size"), [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)]
)
def test_a_block_is_a_multiple_of_512_bytes_and_at_least_512(nbytes: int, size: int) -> None:
    model = after(nbytes)
    assert (model.allocated, model.peak_allocated) == (size, size)


@pytest.mark.parametrize(
    ("nbytes", "divisions", "size"),
    [
        # Four divisions between 1 and 2 MiB are 1, 1.25, 1.5 and 1.75 MiB: the example of torch's comment, times 1024.
        (1200 * 1024, 4, 1280 * 1024),
        (1024 * 1024, 4, 1024 * 1024),
        (2047 * 1024, 4, 2048 * 1024),
        # At most 512 bytes for each division: multiples of 512.
        (2048, 4, 2048),
        (2049, 4, 2560),
        (1025, 4, 1536),
        (1200 * 1024 + 1, 0, 1200 * 1024 + 512),
        (1200 * 1024 + 1, 1, 1200 * 1024 + 512),
    ],
)
def test_roundup_divides_the_space_between_two_powers_of_two(nbytes: int, divisions: int, size: int) -> None:
    assert AllocatorSettings(roundup_divisions=divisions).rounded(nbytes) == size


def test_settings_that_torch_refuses_or_that_are_not_modelled_are_refused() -> None:
    with pytest.raises(PlanError, match="at least 20971520 bytes, found 2097152"):
        AllocatorSettings(max_split=2 * MIB)
    with pytest.raises(PlanError, match="power of 2, found 3"):
        AllocatorSettings(roundup_divisions=3)
    with pytest.raises(PlanError, match="None with expandable segments"):
        AllocatorSettings(expandable=True, max_split=40 * MIB)


# Segments: at most 1 MiB is packed into 2 MiB, less than 10 MiB into 20 MiB, and more gets multiples of 2 MiB.


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        (BLOCK, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + BLOCK, 20 * MIB),
        (10 * MIB - BLOCK, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + BLOCK, 12 * MIB),
        (12 * MIB, 12 * MIB),
    ],
)
def test_a_segment_has_2_mib_or_20_mib_or_its_own_size(size: int, nbytes: int) -> None:
    assert segment_bytes(size) == nbytes
    model = after(size)
    assert (model.reserved, model.peak_reserved) == (nbytes, nbytes)


def test_small_and_large_requests_and_streams_have_segments_of_their_own() -> None:
    model = after(BLOCK, MIB + BLOCK)
    model.allocate(2, BLOCK, stream=7)
    assert model.reserved == 2 * SMALL_SEGMENT + LARGE_SEGMENT
    assert [(one.stream, one.small, one.nbytes) for one in model.segments()] == [
        (0, True, SMALL_SEGMENT),
        (0, False, LARGE_SEGMENT),
        (7, True, SMALL_SEGMENT),
    ]
    model.free(0)
    model.allocate(3, BLOCK, stream=8)  # a block that another stream freed is not reused
    assert model.reserved == 3 * SMALL_SEGMENT + LARGE_SEGMENT


# Splitting: in a small pool what is left over is a block from 512 bytes on, in a large one above 1 MiB.


def test_a_small_block_is_split_if_512_bytes_are_left() -> None:
    model = after(MIB, MIB - BLOCK)
    assert blocks(model) == [((MIB, True), (MIB - BLOCK, True), (BLOCK, False))]
    model.allocate(2, 1)
    assert model.reserved == SMALL_SEGMENT


def test_a_large_block_is_split_only_if_more_than_1_mib_is_left() -> None:
    exact = after(19 * MIB // 2, 19 * MIB // 2)  # 20 - 9.5 - 9.5 = 1 MiB is left, which stays with the second block
    assert blocks(exact) == [((19 * MIB // 2, True), (21 * MIB // 2, True))]
    assert (exact.allocated, exact.reserved) == (20 * MIB, 20 * MIB)
    more = after(19 * MIB // 2, 19 * MIB // 2 - BLOCK)
    assert blocks(more) == [((19 * MIB // 2, True), (19 * MIB // 2 - BLOCK, True), (MIB + BLOCK, False))]


def test_a_request_of_10_mib_in_a_segment_of_its_own_takes_all_of_it() -> None:
    model = after(11 * MIB)
    assert blocks(model) == [((12 * MIB, True),)]
    assert model.allocated == 12 * MIB  # as torch's memory_allocated, which counts blocks and not requests


# Best fit: the smallest free block that is large enough, and of equal ones the lowest address.


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    model = after(30 * MIB, 24 * MIB, 40 * MIB)
    for key in range(3):
        model.free(key)
    model.allocate(3, 23 * MIB)
    assert blocks(model) == [((30 * MIB, False),), ((24 * MIB, True),), ((40 * MIB, False),)]


def test_of_blocks_of_one_size_the_one_at_the_lowest_address_is_taken() -> None:
    places = iter([3 * GIB, 1 * GIB, 2 * GIB])
    model = CachingAllocator(place=lambda nbytes: next(places))
    for key in range(3):
        model.allocate(key, 12 * MIB)
    assert [model.address(key) for key in range(3)] == [3 * GIB, GIB, 2 * GIB]
    for key in range(3):
        model.free(key)
    model.allocate(3, 12 * MIB)
    assert model.address(3) == GIB


# Coalescing: a block that is freed and its free neighbours become one block.


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_a_freed_block_merges_with_both_neighbours(order: tuple[int, ...]) -> None:
    model = after(3 * MIB, 4 * MIB, 5 * MIB)
    for key in order:
        model.free(key)
    assert blocks(model) == [((LARGE_SEGMENT, False),)]
    assert (model.allocated, model.reserved, model.peak_allocated) == (0, LARGE_SEGMENT, 12 * MIB)


def test_a_segment_in_use_is_fragmented_memory_that_a_larger_request_cannot_use() -> None:
    model = after(9 * MIB, 2 * MIB, 9 * MIB)
    model.free(0)
    model.free(2)
    assert blocks(model) == [((9 * MIB, False), (2 * MIB, True), (9 * MIB, False))]
    model.allocate(3, 9 * MIB + BLOCK)
    assert model.reserved == 2 * LARGE_SEGMENT


# The limit: cached segments without an allocated block are released, and the request is repeated.


def test_unused_segments_are_released_when_the_limit_is_reached() -> None:
    model = after(30 * MIB, 20 * MIB, limit=64 * MIB)
    model.free(0)
    model.allocate(2, 32 * MIB)
    assert (model.reserved, model.peak_reserved) == (52 * MIB, 52 * MIB)


def test_a_segment_that_is_partly_allocated_is_not_released() -> None:
    model = after(9 * MIB, 2 * MIB, limit=24 * MIB)
    model.free(0)
    with pytest.raises(OutOfDeviceMemory, match="12582912 bytes were requested") as caught:
        model.allocate(2, 12 * MIB)
    facts = caught.value
    assert (facts.requested, facts.refused, facts.limit) == (12 * MIB, 12 * MIB, 24 * MIB)
    assert (facts.allocated, facts.reserved, facts.largest) == (2 * MIB, 20 * MIB, 9 * MIB)
    model.allocate(2, 9 * MIB)  # the key is not taken, and what is cached is usable
    assert model.reserved == 20 * MIB


def test_a_small_request_is_out_of_memory_if_its_segment_does_not_fit() -> None:
    model = after(10 * MIB, limit=11 * MIB)
    with pytest.raises(OutOfDeviceMemory) as caught:
        model.allocate(1, 1)
    assert (caught.value.requested, caught.value.refused) == (1, SMALL_SEGMENT)


def test_emptying_the_cache_releases_what_is_not_split() -> None:
    model = after(30 * MIB, 3 * MIB, BLOCK)
    for key in (0, 2):
        model.free(key)
    model.empty_cache()
    assert blocks(model) == [((3 * MIB, True), (17 * MIB, False))]
    assert (model.allocated, model.reserved) == (3 * MIB, LARGE_SEGMENT)


# max_split_size: free blocks of at least this size are neither split nor given to smaller requests.


def test_an_oversize_block_serves_only_requests_that_leave_less_than_20_mib() -> None:
    model = after(100 * MIB, settings=AllocatorSettings(max_split=40 * MIB))
    model.free(0)
    model.allocate(1, 30 * MIB)  # not oversize: no part of the 100 MiB
    model.allocate(2, 80 * MIB)  # 100 is not below 80 + 20
    assert model.reserved == (100 + 30 + 80) * MIB
    model.allocate(3, 82 * MIB)
    assert model.reserved == (100 + 30 + 80) * MIB
    assert model.allocated == (100 + 30 + 80) * MIB  # it is not split


def test_a_block_and_a_request_of_exactly_max_split_are_oversize() -> None:
    model = after(50 * MIB, settings=AllocatorSettings(max_split=40 * MIB))
    model.free(0)
    model.allocate(1, 40 * MIB)
    assert blocks(model) == [((50 * MIB, True),)]
    model = after(40 * MIB, settings=AllocatorSettings(max_split=40 * MIB))
    model.free(0)
    model.allocate(1, 30 * MIB)
    assert blocks(model) == [((40 * MIB, False),), ((30 * MIB, True),)]


def test_at_the_limit_the_smallest_oversize_block_that_is_enough_is_released_first() -> None:
    model = after(
        50 * MIB, 90 * MIB, 44 * MIB, 12 * MIB, settings=AllocatorSettings(max_split=40 * MIB), limit=200 * MIB
    )
    for key in range(4):
        model.free(key)
    model.allocate(4, 30 * MIB)  # 44 MiB are released: the smallest of at least 40
    assert [segment.nbytes for segment in model.segments()] == [50 * MIB, 90 * MIB, 12 * MIB, 30 * MIB]


def test_at_the_limit_the_largest_oversize_blocks_are_released_if_none_is_enough() -> None:
    model = after(
        50 * MIB, 90 * MIB, 44 * MIB, 12 * MIB, settings=AllocatorSettings(max_split=40 * MIB), limit=200 * MIB
    )
    for key in range(4):
        model.free(key)
    model.allocate(4, 130 * MIB)  # 90 and then 50 MiB
    assert [segment.nbytes for segment in model.segments()] == [44 * MIB, 12 * MIB, 130 * MIB]


@pytest.mark.parametrize(
    ("cached", "kept"),
    [
        ((45, 40, 12), [12, 80]),  # 45 and 40 are at least the request
        ((45, 12), [80]),  # 45 is not: all is released, although 12 and 80 fit below the limit
    ],
)
def test_oversize_blocks_that_are_not_enough_together_lead_to_the_release_of_all(
    cached: tuple[int, ...], kept: list[int]
) -> None:
    settings = AllocatorSettings(max_split=40 * MIB)
    model = after(*(number * MIB for number in cached), settings=settings, limit=100 * MIB)
    for key in range(len(cached)):
        model.free(key)
    model.allocate(3, 80 * MIB)
    assert [segment.nbytes for segment in model.segments()] == [number * MIB for number in kept]


# Expandable segments: one for each stream and pool, which grows by pages of 2 MiB (small) and 20 MiB (large).


def test_an_expandable_segment_grows_by_pages() -> None:
    model = after(30 * MIB, settings=EXPANDABLE)
    assert blocks(model) == [((30 * MIB, True), (10 * MIB, False))]
    model.allocate(1, 15 * MIB)  # the 10 MiB at the end, and a page
    assert blocks(model) == [((30 * MIB, True), (15 * MIB, True), (15 * MIB, False))]
    model.allocate(2, MIB)
    model.allocate(3, MIB)
    model.allocate(4, BLOCK)
    assert model.reserved == 3 * LARGE_SEGMENT + 2 * SMALL_SEGMENT
    assert len(model.segments()) == 2


def test_a_large_block_of_an_expandable_segment_is_split_if_512_bytes_are_left() -> None:
    model = after(20 * MIB - BLOCK, settings=EXPANDABLE)
    assert blocks(model) == [((20 * MIB - BLOCK, True), (BLOCK, False))]
    assert model.allocated == 20 * MIB - BLOCK


def test_the_free_block_at_the_growing_end_is_taken_last() -> None:
    """It counts with all the memory that it can grow into, so that a larger block before the end fits better."""
    model = after(9 * MIB, MIB + BLOCK, settings=EXPANDABLE)
    model.free(0)  # 9 MiB free at the beginning, and 20 - 10 - 512 bytes free at the end
    model.allocate(2, 8 * MIB)
    assert blocks(model) == [((8 * MIB, True), (MIB, False), (MIB + BLOCK, True), (10 * MIB - BLOCK, False))]
    # Also where the block at the end is the smaller of the two.
    model = after(12 * MIB, MIB + BLOCK, settings=EXPANDABLE)
    model.free(0)
    model.allocate(2, 5 * MIB)
    assert blocks(model) == [((5 * MIB, True), (7 * MIB, False), (MIB + BLOCK, True), (7 * MIB - BLOCK, False))]


def test_of_blocks_that_can_grow_to_one_size_the_one_at_the_lowest_address_is_taken() -> None:
    model = after(5 * MIB, 2 * MIB, 5 * MIB, 8 * MIB, settings=EXPANDABLE)
    first = model.address(0)
    model.free(2)
    model.free(0)
    model.allocate(4, 3 * MIB)
    assert model.address(4) == first


def test_emptying_the_cache_unmaps_whole_pages_within_free_blocks() -> None:
    model = after(30 * MIB, 45 * MIB, 5 * MIB, settings=EXPANDABLE)  # four pages
    model.free(1)  # 30 to 75 MiB: of its pages only 40 to 60 MiB is free
    model.empty_cache()
    assert blocks(model) == [((30 * MIB, True), (10 * MIB, False)), ((15 * MIB, False), (5 * MIB, True))]
    assert model.reserved == 3 * LARGE_SEGMENT
    model.allocate(3, 25 * MIB)  # the lowest room is 30 to 75 MiB: the gap is mapped again
    assert blocks(model) == [((30 * MIB, True), (25 * MIB, True), (20 * MIB, False), (5 * MIB, True))]
    assert (model.reserved, model.peak_reserved) == (4 * LARGE_SEGMENT, 4 * LARGE_SEGMENT)


def test_a_gap_that_is_too_small_is_not_mapped() -> None:
    model = after(20 * MIB, 20 * MIB, 20 * MIB, settings=EXPANDABLE)
    model.free(1)
    model.empty_cache()
    model.allocate(3, 21 * MIB)
    assert [one.nbytes for one in model.segments()] == [LARGE_SEGMENT, 3 * LARGE_SEGMENT]


def test_pages_of_one_stream_are_given_to_another_at_the_limit() -> None:
    model = after(100 * MIB, settings=EXPANDABLE, limit=120 * MIB)
    model.free(0)
    model.allocate(1, 60 * MIB, stream=1)
    assert [(one.stream, one.nbytes) for one in model.segments()] == [(1, 60 * MIB)]
    model.allocate(2, 50 * MIB)
    with pytest.raises(OutOfDeviceMemory) as caught:
        model.allocate(3, 11 * MIB)
    assert (caught.value.refused, caught.value.largest, caught.value.reserved) == (20 * MIB, 10 * MIB, 120 * MIB)


def test_a_segment_of_which_all_is_unmapped_ends() -> None:
    model = after(30 * MIB, settings=EXPANDABLE, limit=GIB)
    first = model.address(0)
    model.free(0)
    model.empty_cache()
    assert (model.reserved, model.segments()) == (0, ())
    model.allocate(1, 30 * MIB)
    assert model.address(1) == first + 1160 * MIB  # 9/8 of 1 GiB in whole pages are 58 pages


def test_a_segment_has_addresses_for_nine_eighths_of_the_memory() -> None:
    """After so much was mapped and unmapped that none of its gaps is large enough, there is a second segment."""
    model = CachingAllocator(80 * MIB, EXPANDABLE)  # addresses for 100 MiB: five pages
    for key in range(4):
        model.allocate(key, 20 * MIB)
    first = model.address(0)
    for key in (0, 2):
        model.free(key)
    model.allocate(4, 40 * MIB)
    assert model.address(4) == first + 100 * MIB
    assert [one.nbytes for one in model.segments()] == [20 * MIB, 20 * MIB, 40 * MIB]


# Keys.


def test_nothing_is_allocated_for_no_bytes() -> None:
    model = after(0)
    assert (model.allocated, model.reserved, model.segments(), model.address(0)) == (0, 0, (), 0)
    model.free(0)
    with pytest.raises(ValueError, match="allocated, found 0"):
        model.free(0)


def test_a_key_is_used_once_at_a_time_and_a_size_is_not_negative() -> None:
    model = after(1)
    with pytest.raises(ValueError, match="found key 0 and 5 bytes"):
        model.allocate(0, 5)
    with pytest.raises(ValueError, match="found key 1 and -1 bytes"):
        model.allocate(1, -1)
    model.free(0)
    model.allocate(0, 5)
    assert model.allocated == BLOCK
