"""The model of torch's caching allocator in sequences: random ones, and those of torch's own tests."""

from __future__ import annotations

from itertools import pairwise

import pytest
from harness.allocator_comparison import Blocks, first_difference, segments_of, sequence

from zero_runtime.predict.memory.caching_allocator import BLOCK, LARGE_PAGE, MIB, SMALL_PAGE, CachingAllocator


@pytest.mark.parametrize("seed", [1, 2])
def test_blocks_add_up_and_what_is_freed_is_whole(seed: int) -> None:
    model, held, sizes = CachingAllocator(), {}, {}
    for what, key, nbytes in sequence(seed, 700):
        if what == "free":
            model.free(held.pop(key))
        else:
            held[key], sizes[key] = model.allocate(nbytes), nbytes
        assert all(held[key].allocated and held[key].size >= sizes[key] for key in held)
        check(model)
    for block in held.values():
        model.free(block)
    assert model.allocated == 0
    assert [len(blocks) for blocks in segments_of(model)] == [1, 1]


def check(model: CachingAllocator) -> None:
    """The blocks add up to the totals, and no two neighbours are free."""
    segments = segments_of(model)
    blocks = [block for segment in segments for block in segment]
    assert all(size % BLOCK == 0 and size >= BLOCK for size, _ in blocks)
    assert all(one[1] or other[1] for segment in segments for one, other in pairwise(segment))
    assert model.allocated == sum(size for size, allocated in blocks if allocated)
    assert model.reserved == sum(size for size, _ in blocks)


# torch's own tests: what they expect of a GPU, expected of the model.


@pytest.mark.parametrize(
    ("nbytes", "reserved"),
    [
        (512, 2 * MIB),
        (MIB, 4 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 40 * MIB),
        (10 * MIB + 512, 40 * MIB),
    ],
)
def test_copies_reserve_what_torchs_test_of_a_graphs_memory_expects(nbytes: int, reserved: int) -> None:
    """test/test_cuda.py, `test_graph_memory_stats_and_use_result_after_destroy_graph`: its `cases` with expandable
    segments, for `b = a.clone()` and then five times `b = b.clone() + 1`, without a."""
    model = CachingAllocator()
    b = model.allocate(nbytes)
    for _ in range(5):
        clone, total = model.allocate(nbytes), model.allocate(nbytes)
        model.free(clone)
        model.free(b)
        b = total
    assert model.reserved == reserved


def test_two_tensors_of_1_mib_share_a_page_as_torchs_test_expects() -> None:
    """test/test_xpu.py, `test_1mb_allocation_uses_small_block`, whose allocator has the same rules."""
    model = CachingAllocator()
    for _ in range(2):
        model.allocate(MIB)
    assert (model.allocated, model.reserved) == (2 * MIB, SMALL_PAGE)


def test_three_large_tensors_at_a_time_reserve_what_torchs_test_expects() -> None:
    """test/test_cuda.py, `test_allocate_in_thread_to_pool`: a small tensor, then ten times three of 20 MiB."""
    model = CachingAllocator()
    model.free(model.allocate(16))
    for _ in range(10):
        for block in [model.allocate(LARGE_PAGE) for _ in range(3)]:
            model.free(block)
    assert model.reserved == SMALL_PAGE + 3 * LARGE_PAGE


# The comparison with a GPU (tests/gpu/test_cuda_allocator.py), rehearsed with a second model in its place.


class StandIn:
    """A model in the place of torch's allocator. more: bytes that it adds to each request."""

    def __init__(self, more: int = 0) -> None:
        self.model, self.more, self.held = CachingAllocator(), more, {}

    def allocate(self, key: int, nbytes: int) -> None:
        self.held[key] = self.model.allocate(nbytes + self.more)

    def free(self, key: int) -> None:
        self.model.free(self.held.pop(key))

    def totals(self) -> tuple[int, int]:
        return self.model.allocated, self.model.reserved

    def segments(self) -> list[Blocks]:
        return segments_of(self.model)


def test_the_comparison_with_a_gpu_finds_no_difference_between_equal_allocators() -> None:
    assert first_difference(StandIn(), 0, 1000) is None


def test_the_comparison_with_a_gpu_finds_a_difference_between_others() -> None:
    assert "the model's totals" in str(first_difference(StandIn(more=BLOCK), 0, 1000))
