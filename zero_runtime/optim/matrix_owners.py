"""Which rank orthogonalises each matrix, and what the ranks send each other for it. Standard library only.

A matrix is split over the shards of its unit, wherever the shards' borders fall. One rank of the shard group, its
owner, receives the parts of the matrix's direction from the ranks that hold them, orthogonalises the whole matrix and
sends each part of the result back. A step has two messages from each rank to each other one, over all units: towards
the owners and back. Every element that its owner does not hold travels once in each direction, in the dtype of the
orthogonalisation.

With tensor parallelism the shards of a group of data ranks hold a slice of a matrix. The owners of its slices, one of
each such group, then gather the slices from each other, and each of them orthogonalises the whole matrix and keeps the
slice of the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from zero_runtime.flat_layout import FlatLayout

WORKING = 4  # matrices that a Newton-Schulz step holds: the input, its square, the polynomial of that, the output


class MatrixPart(NamedTuple):
    """Elements [start, stop) of a matrix, held by the rank `holder` of the shard group."""

    holder: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class OwnedMatrix:
    """One matrix: its unit by number, its name and shape, the rank of the shard group that orthogonalises it, and the
    ranks that hold it, in order. With tensor parallelism all of them are those of a slice of `full_shape`."""

    unit: int
    name: str
    shape: tuple[int, int]
    owner: int
    parts: tuple[MatrixPart, ...]
    full_shape: tuple[int, int]

    @property
    def numel(self) -> int:
        """Elements of the slice, or of the whole matrix if it is not divided."""
        return self.shape[0] * self.shape[1]

    @property
    def full_numel(self) -> int:
        return self.full_shape[0] * self.full_shape[1]

    @property
    def gathered_numel(self) -> int:
        """Elements that an owner sends to the owners of the other slices: its own to each of them."""
        return self.full_numel - self.numel


def newton_schulz_work(shape: tuple[int, int]) -> int:
    """Multiplications of one Newton-Schulz step: three products of matrices with the smaller side s and the larger l,
    s*s*l + s*s*s + s*s*l."""
    small, large = sorted(shape)
    return small * small * (2 * large + small)


def owned_matrices(
    layouts: Sequence[FlatLayout], shard_count: int, full_shapes: Mapping[str, tuple[int, ...]] | None = None
) -> list[OwnedMatrix]:
    """The matrices of these units, in order; every rank computes the same ones.

    full_shapes: of the matrices of which these units have slices, by name.
    """
    found = []
    for unit, layout in enumerate(layouts):
        for segment in layout.segments:
            rows, columns = segment.shape
            full_rows, full_columns = (full_shapes or {}).get(segment.name, segment.shape)
            parts = _parts(layout, segment.offset, segment.numel)
            found.append(OwnedMatrix(unit, segment.name, (rows, columns), 0, parts, (full_rows, full_columns)))
    # By the work: the largest matrix first, each to the rank with the least so far, and among those to the one that
    # holds most of it.
    work = [0] * shard_count
    owners = {}
    for place in sorted(range(len(found)), key=lambda place: (-newton_schulz_work(found[place].full_shape), place)):
        matrix = found[place]
        held = {part.holder: part.numel for part in matrix.parts}
        owner = min(range(shard_count), key=lambda rank: (work[rank], -held.get(rank, 0), rank))
        work[owner] += newton_schulz_work(matrix.full_shape)
        owners[place] = owner
    return [replace(matrix, owner=owners[place]) for place, matrix in enumerate(found)]


def _parts(layout: FlatLayout, offset: int, numel: int) -> tuple[MatrixPart, ...]:
    size = layout.shard_numel
    first, last = offset // size, (offset + max(numel, 1) - 1) // size
    parts = (
        MatrixPart(holder, max(holder * size - offset, 0), min((holder + 1) * size - offset, numel))
        for holder in range(first, last + 1)
    )
    return tuple(part for part in parts if part.numel)


def towards_owners(matrices: Iterable[OwnedMatrix], rank: int) -> dict[int, int]:
    """Elements of directions that `rank` sends to each other rank, by that rank."""
    sent: dict[int, int] = {}
    for matrix in matrices:
        for part in matrix.parts:
            if part.holder == rank != matrix.owner:
                sent[matrix.owner] = sent.get(matrix.owner, 0) + part.numel
    return sent


def towards_holders(matrices: Iterable[OwnedMatrix], rank: int) -> dict[int, int]:
    """Elements of updates that `rank` sends back to each other rank, by that rank."""
    sent: dict[int, int] = {}
    for matrix in matrices:
        for part in matrix.parts:
            if part.holder != rank == matrix.owner:
                sent[part.holder] = sent.get(part.holder, 0) + part.numel
    return sent


def sent_elements(matrices: Sequence[OwnedMatrix], rank: int) -> int:
    """Elements that `rank` sends in a step in both directions, and to the owners of other slices."""
    of_slices = sum(matrix.gathered_numel for matrix in matrices if matrix.owner == rank)
    return sum(towards_owners(matrices, rank).values()) + sum(towards_holders(matrices, rank).values()) + of_slices


def most_sent_elements(matrices: Sequence[OwnedMatrix], shard_count: int) -> int:
    """The most elements that any rank of the shard group sends in a step."""
    sent = [0] * shard_count
    for matrix in matrices:
        sent[matrix.owner] += matrix.gathered_numel
        for part in matrix.parts:
            if part.holder != matrix.owner:
                sent[part.holder] += part.numel
                sent[matrix.owner] += part.numel
    return max(sent)


def working_bytes(matrices: Sequence[OwnedMatrix], shard_count: int, itemsize: int) -> int:
    """Bytes of the tensors that exist on a rank only while matrices are updated; the most of any rank.

    With one shard a matrix needs no message, and its direction is the only buffer.
    """
    largest = max((matrix.numel for matrix in matrices), default=0)
    largest_full = max((matrix.full_numel for matrix in matrices), default=0)
    if shard_count == 1:
        return (largest + WORKING * largest_full) * itemsize
    held, owned, owned_full = ([0] * shard_count for _ in range(3))
    for matrix in matrices:
        owned[matrix.owner] += matrix.numel
        owned_full[matrix.owner] += matrix.full_numel
        for part in matrix.parts:
            held[part.holder] += part.numel
    if not any(matrix.gathered_numel for matrix in matrices):
        return (max(map(sum, zip(held, owned, strict=True))) + WORKING * largest) * itemsize
    # With slices: what is sent to the other owners, a copy of it, and what comes from them, of which the joined form is
    # made when the copy is gone; then that alone, of which one matrix at a time is the input of a step.
    return itemsize * max(
        mine + theirs + max(2 * theirs + full, theirs + 2 * full, full + (WORKING - 1) * largest_full)
        for mine, theirs, full in zip(held, owned, owned_full, strict=True)
    )
