"""Every parameter element lies in exactly one shard's pieces, padding in none; shards are aligned and of equal size."""

from __future__ import annotations

import math
from functools import cache
from itertools import chain, pairwise, product

import pytest

from zero_runtime.flat_layout import SHARD_ALIGNMENT_NUMEL, FlatLayout

A = SHARD_ALIGNMENT_NUMEL
# Empty, 0-dim, one element, and sizes around the alignment of a shard.
SHAPES = [(0,), (3, 0), (), (1,), (A - 1,), (A,), (A + 1,), (5, 7, 3)]


@cache
def layouts() -> list[FlatLayout]:
    return [
        FlatLayout.build([(f"p{i}", shape) for i, shape in enumerate(shapes)], shard_count=shards, world=world)
        for count in range(4)
        for shapes in product(SHAPES, repeat=count)
        for world in (1, 2, 3, 8)
        for shards in {1, world}
    ]


def test_each_block_holds_the_same_elements_of_one_parameter_in_every_layout() -> None:
    shapes = [("a", (3, 100)), ("b", (7,)), ("c", (0,)), ("d", (256,)), ("e", (1000,))]
    wanted = {(name, block) for name, shape in shapes for block in range(-(-math.prod(shape) // 256))}
    for world, shards in ((1, 1), (2, 2), (3, 3), (4, 1), (6, 2), (8, 8)):
        layout = FlatLayout.build(shapes, shard_count=shards, world=world, block_numel=256)
        found = []
        for shard in range(shards):
            for piece in layout.pieces(shard):
                assert piece.start % 256 == piece.shard_offset % 256 == 0
                found += [(piece.name, start // 256) for start in range(piece.start, piece.stop, 256)]
        assert len(found) == len(wanted)
        assert set(found) == wanted
        assert layout.shard_numel % 256 == 0
        assert layout.numel == 300 + 7 + 256 + 1000
        padding = [place for start, stop in layout.gaps for place in range(start, stop)]
        held = [place for one in layout.segments for place in range(one.offset, one.offset + one.numel)]
        assert sorted(padding + held) == list(range(layout.padded_numel))
        assert len(padding) == layout.padded_numel - layout.numel


def test_segments_follow_each_other_in_the_order_given() -> None:
    for layout in layouts():
        offset = 0
        for index, segment in enumerate(layout.segments):
            assert (segment.name, segment.offset) == (f"p{index}", offset)
            assert segment.numel == math.prod(segment.shape)
            offset += segment.numel
        assert layout.numel == offset


def test_the_pieces_of_all_shards_cover_every_element_exactly_once_and_no_padding() -> None:
    for layout in layouts():
        offsets = {segment.name: segment.offset for segment in layout.segments}
        covered: list[int] = []
        for shard in range(layout.shard_count):
            low, high = layout.shard_range(shard)
            for piece in layout.pieces(shard):
                places = range(low + piece.shard_offset, low + piece.shard_offset + piece.stop - piece.start)
                assert places.start == offsets[piece.name] + piece.start
                assert low <= places.start < places.stop <= high
                covered.extend(places)
        assert covered == list(range(layout.numel))


def test_a_piece_stays_inside_its_parameter() -> None:
    for layout in layouts():
        numel = {segment.name: segment.numel for segment in layout.segments}
        for shard in range(layout.shard_count):
            for piece in layout.pieces(shard):
                assert 0 <= piece.start < piece.stop <= numel[piece.name]


def test_segments_pieces_and_shards_select_the_same_elements() -> None:
    for layout in layouts():
        flat = list(range(layout.padded_numel))
        shards = [layout.shard_of(flat, shard) for shard in range(layout.shard_count)]
        assert list(chain(*shards)) == flat
        for segment in layout.segments:
            pieces = [
                piece.of(shard)
                for index, shard in enumerate(shards)
                for piece in layout.pieces(index)
                if piece.name == segment.name
            ]
            assert list(chain(*pieces)) == segment.of(flat) == flat[segment.offset :][: segment.numel]


def test_shards_are_aligned_equal_in_size_and_cover_the_padded_tensor() -> None:
    for layout in layouts():
        assert layout.shard_numel * layout.shard_count == layout.padded_numel
        assert layout.shard_numel % A == 0
        ranges = [layout.shard_range(shard) for shard in range(layout.shard_count)]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == layout.padded_numel
        assert all(stop == start for (_, stop), (start, _) in pairwise(ranges))


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_padding_is_the_minimum_that_gives_every_rank_an_aligned_part(world: int) -> None:
    """Padding counts all ranks, not only the shards, because an all-reduce among replicas splits the shard again."""
    for numel in range(3 * world * A):
        for shards in {1, world}:
            layout = FlatLayout.build([("p", (numel,))], shard_count=shards, world=world)
            assert layout.padded_numel % (world * A) == 0
            # A unit of empty parameters has one part per rank too, so that there is something to gather.
            padding = layout.padded_numel - numel
            assert 0 <= padding < world * A or (numel == 0 and padding == world * A)


def test_the_layout_of_full_tensors_is_the_same_for_every_shard_count() -> None:
    shapes = [("a", (5, 7)), ("b", (3,))]
    one, eight = (FlatLayout.build(shapes, shard_count=count, world=8) for count in (1, 8))
    assert (one.segments, one.padded_numel) == (eight.segments, eight.padded_numel)
