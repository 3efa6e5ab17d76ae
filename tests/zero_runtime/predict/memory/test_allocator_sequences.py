"""The model of torch's caching allocator in sequences: random ones, and those of torch's own tests."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from harness.allocator_comparison import LARGEST, Segments, first_difference, sequence

from zero_runtime.predict.memory.caching_allocator import (
    BLOCK,
    LARGE_SEGMENT,
    MIB,
    SMALL_SEGMENT,
    AllocatorSettings,
    CachingAllocator,
    OutOfDeviceMemory,
    ReservedSegment,
)

GIB = 1024 * MIB
LIMIT = 201 * MIB  # less than the sequences need
EXPANDABLE = AllocatorSettings(expandable=True)
MODES = pytest.mark.parametrize(
    ("settings", "limit"),
    [
        (AllocatorSettings(), None),
        (AllocatorSettings(), LIMIT),
        (EXPANDABLE, None),
        (EXPANDABLE, LIMIT),
        (AllocatorSettings(max_split=24 * MIB), LIMIT),
        (AllocatorSettings(roundup_divisions=4), None),
    ],
    ids=["plain", "limited", "expandable", "expandable-limited", "max_split", "rounded"],
)


# Whatever the sequence.


def played(settings: AllocatorSettings, limit: int | None, seed: int, events: int) -> CachingAllocator:
    """After every event of a random sequence, what must hold of blocks and totals holds; the keys in use are freed."""
    model, live = CachingAllocator(limit, settings), dict[int, int]()
    peaks, shortages = [0, 0], list[int]()
    for what, key, nbytes, stream in sequence(seed, events):
        if what == "empty":
            model.empty_cache()
        elif what == "free":
            if live.pop(key, None) is not None:
                model.free(key)
        else:
            try:
                model.allocate(key, nbytes, stream)
                live[key] = nbytes
            except OutOfDeviceMemory as error:
                shortages.append(error.reserved + error.refused)
        peaks = [max(peaks[0], model.allocated), max(peaks[1], model.reserved)]
        assert [model.peak_allocated, model.peak_reserved] == peaks
        assert limit is None or model.peak_reserved <= limit
        check(model.segments(), model, live)
    assert bool(shortages) == (limit is not None)
    assert all(wanted > (limit or 0) for wanted in shortages)
    for key in live:
        model.free(key)
    return model


def check(segments: tuple[ReservedSegment, ...], model: CachingAllocator, live: dict[int, int]) -> None:
    """Segments do not overlap and add up to the totals, no two neighbours are free, and each request has its block."""
    assert all(one.address + one.nbytes <= other.address for one, other in pairwise(segments))
    starts: dict[int, int] = {}
    for segment in segments:
        address = segment.address
        for size, allocated in segment.blocks:
            assert size % BLOCK == 0
            assert size >= BLOCK
            if allocated:
                starts[address] = size
            address += size
        assert not any(not one[1] and not other[1] for one, other in pairwise(segment.blocks))
        assert segment.nbytes % SMALL_SEGMENT == 0
    assert {model.address(key) for key in live} == set(starts)
    assert len(starts) == len(live)
    assert all(starts[model.address(key)] >= nbytes for key, nbytes in live.items())
    assert model.allocated == sum(starts.values())
    assert model.reserved == sum(segment.nbytes for segment in segments)
    assert model.allocated <= model.reserved


@MODES
@pytest.mark.parametrize("seed", [1, 2])
def test_blocks_never_overlap_and_add_up_and_what_is_freed_is_whole(
    settings: AllocatorSettings, limit: int | None, seed: int
) -> None:
    model = played(settings, limit, seed, 700)
    assert model.allocated == 0
    assert all(len(segment.blocks) == 1 for segment in model.segments())
    model.empty_cache()
    assert (model.reserved, model.segments()) == (0, ())


def test_a_larger_request_never_gets_a_smaller_block() -> None:
    rng = random.Random(0)
    for settings in (AllocatorSettings(), AllocatorSettings(roundup_divisions=8)):
        sizes = sorted(rng.randrange(1, LARGEST) for _ in range(2000))
        rounded = [settings.rounded(size) for size in sizes]
        assert rounded == sorted(rounded)
        assert all(size <= block for size, block in zip(sizes, rounded, strict=True))


# torch's own tests: what they expect of a GPU, expected of the model.


def copied(nbytes: int, settings: AllocatorSettings) -> CachingAllocator:
    """What `b = a.clone()` and then five times `b = b.clone() + 1` allocate and free, without a; b is left."""
    model = CachingAllocator(settings=settings)
    model.allocate(0, nbytes)
    for b in range(0, 10, 2):
        model.allocate(b + 1, nbytes)  # the clone
        model.allocate(b + 2, nbytes)  # the sum, which is the next b
        model.free(b + 1)
        model.free(b)
    return model


@pytest.mark.parametrize("settings", [AllocatorSettings(), EXPANDABLE], ids=["plain", "expandable"])
@pytest.mark.parametrize(
    ("nbytes", "count", "reserved", "reserved_for_b", "expandable"),
    [
        (512, 1, 2 * MIB, 2 * MIB, (2 * MIB, 2 * MIB)),
        (MIB, 2, 4 * MIB, 2 * MIB, (4 * MIB, 2 * MIB)),
        (MIB + 512, 1, 20 * MIB, 20 * MIB, (20 * MIB, 20 * MIB)),
        (10 * MIB - 512, 2, 40 * MIB, 20 * MIB, (40 * MIB, 40 * MIB)),
        (10 * MIB + 512, 3, 36 * MIB, 12 * MIB, (40 * MIB, 20 * MIB)),
    ],
)
def test_copies_reserve_what_torchs_test_of_a_graphs_memory_expects(
    nbytes: int,
    count: int,
    reserved: int,
    reserved_for_b: int,
    expandable: tuple[int, int],
    settings: AllocatorSettings,
) -> None:
    """test/test_cuda.py, `test_graph_memory_stats_and_use_result_after_destroy_graph`: its `cases`, for a pool that is
    empty at first, before and after what is unused was released. `expandable`: the two that differ there."""
    model = copied(nbytes, settings)
    expected, for_b = expandable if settings.expandable else (reserved, reserved_for_b)
    assert model.reserved == expected
    if not settings.expandable:
        assert len(model.segments()) == count
    model.empty_cache()
    assert model.reserved == for_b
    assert [
        allocated for segment in [segment.blocks for segment in model.segments()] for _, allocated in segment
    ].count(True) == 1


def test_two_tensors_of_1_mib_share_a_segment_as_torchs_test_expects() -> None:
    """test/test_xpu.py, `test_1mb_allocation_uses_small_block`, whose allocator has the same rules."""
    model = CachingAllocator()
    model.allocate(-1, MIB)  # a
    model.allocate(0, MIB)
    for b in range(0, 10, 2):
        model.allocate(b + 1, MIB)
        model.allocate(b + 2, MIB)
        model.free(b + 1)
        model.free(b)
    assert (model.allocated, model.reserved) == (2 * MIB, 4 * MIB)


def power2_div(size: int, divisions: int) -> int:
    """The expectation of torch's test of the setting, in the words of that test: steps from the lower power of 2."""
    power = 1
    while power < size:
        power *= 2
    if power == size:
        return power
    block = power // 2
    while block < size:
        block += power // 2 // divisions
    return block


def one_block(nbytes: int, settings: AllocatorSettings) -> int:
    model = CachingAllocator(settings=settings)
    model.allocate(0, nbytes)
    return model.allocated


@pytest.mark.parametrize(("nbytes", "divisions"), [(84 * MIB, 4), (84 * MIB, 8), (400 * MIB, 2)])
def test_divisions_allocate_what_torchs_test_of_the_settings_expects(nbytes: int, divisions: int) -> None:
    """test/test_cuda.py, `test_allocator_settings`."""
    assert one_block(nbytes, AllocatorSettings()) == nbytes
    assert one_block(nbytes, AllocatorSettings(roundup_divisions=divisions)) == power2_div(nbytes, divisions)


@pytest.mark.parametrize("settings", [AllocatorSettings(), EXPANDABLE], ids=["plain", "expandable"])
def test_three_large_tensors_at_a_time_have_the_segments_that_torchs_test_expects(settings: AllocatorSettings) -> None:
    """test/test_cuda.py, `test_allocate_in_thread_to_pool`: a small tensor, then ten times three of 20 MiB."""
    model = CachingAllocator(settings=settings)
    model.allocate(0, 16)
    model.free(0)
    for _ in range(10):
        for key in (1, 2, 3):
            model.allocate(key, LARGE_SEGMENT)
        for key in (1, 2, 3):
            model.free(key)
    assert len(model.segments()) == (2 if settings.expandable else 4)


@pytest.mark.parametrize("settings", [AllocatorSettings(), EXPANDABLE], ids=["plain", "expandable"])
def test_half_of_a_device_fits_once_as_torchs_test_expects(settings: AllocatorSettings) -> None:
    """test/test_cuda.py, `test_out_of_memory_retry`: a context leaves less than two halves."""
    model = CachingAllocator(80 * GIB - 500 * MIB, settings)
    model.allocate(0, 40 * GIB)
    with pytest.raises(OutOfDeviceMemory):
        model.allocate(1, 40 * GIB)
    model.free(0)
    model.allocate(1, 40 * GIB)
    assert model.allocated == 40 * GIB


# The comparison with a GPU (tests/gpu/test_cuda_allocator.py), rehearsed with a second model in its place.


class StandIn:
    """A model with addresses of its own in the place of torch's allocator."""

    def __init__(self, settings: AllocatorSettings, limit: int | None) -> None:
        self.model = CachingAllocator(limit, settings)

    def allocate(self, key: int, nbytes: int, stream: int) -> int | None:
        try:
            self.model.allocate(key, nbytes, stream)
        except OutOfDeviceMemory:
            return None
        return self.model.address(key)

    def free(self, key: int) -> None:
        self.model.free(key)

    def empty_cache(self) -> None:
        self.model.empty_cache()

    def totals(self) -> tuple[int, int]:
        return self.model.allocated, self.model.reserved

    def segments(self) -> Segments:
        return [(one.address, one.stream, one.blocks) for one in self.model.segments()]


@MODES
def test_the_comparison_with_a_gpu_finds_no_difference_between_equal_allocators(
    settings: AllocatorSettings, limit: int | None
) -> None:
    assert first_difference(StandIn(settings, limit), settings, limit, 0, 1000) is None


@pytest.mark.parametrize(
    ("settings", "limit"),
    [(EXPANDABLE, None), (AllocatorSettings(max_split=24 * MIB), None), (AllocatorSettings(), LIMIT)],
    ids=["expandable", "max_split", "limited"],
)
def test_the_comparison_with_a_gpu_finds_a_difference_between_others(
    settings: AllocatorSettings, limit: int | None
) -> None:
    difference = first_difference(StandIn(settings, limit), AllocatorSettings(), None, 0, 1000)
    assert difference is not None
    assert "the model's" in difference
