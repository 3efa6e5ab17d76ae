"""Which rank orthogonalises each matrix, and what the ranks send each other for it. Standard library only.

[Note: whole matrices by owner]
A matrix is split over the shards of its unit, wherever the shards' borders fall. One rank of the shard group, its
owner, receives the parts of the matrix's direction from the ranks that hold them, orthogonalises the whole matrix and
sends each part of the result back. A step has two messages from each rank to each other one, over all units: towards
the owners and back. Every element that its owner does not hold travels once in each direction, in the dtype of the
orthogonalisation. Owners are chosen by the work: the largest matrix first, each to the rank with the least so far, and
among those to the one that holds most of it. Every rank computes the same table from the layouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
    ranks that hold it, in order."""

    unit: int
    name: str
    shape: tuple[int, int]
    owner: int
    parts: tuple[MatrixPart, ...]

    @property
    def numel(self) -> int:
        return self.shape[0] * self.shape[1]


def newton_schulz_work(shape: tuple[int, int]) -> int:
    """Multiplications of one Newton-Schulz step: three products of matrices with the smaller side s and the larger l,
    s*s*l + s*s*s + s*s*l."""
    small, large = sorted(shape)
    return small * small * (2 * large + small)


def owned_matrices(layouts: Sequence[FlatLayout], shard_count: int) -> list[OwnedMatrix]:
    """The matrices of these units, in order. See [Note: whole matrices by owner]."""
    found = []
    for unit, layout in enumerate(layouts):
        for segment in layout.segments:
            rows, columns = segment.shape
            found.append(
                OwnedMatrix(unit, segment.name, (rows, columns), 0, _parts(layout, segment.offset, segment.numel))
            )
    work = [0] * shard_count
    owners = {}
    for place in sorted(range(len(found)), key=lambda place: (-newton_schulz_work(found[place].shape), place)):
        matrix = found[place]
        held = {part.holder: part.numel for part in matrix.parts}
        owner = min(range(shard_count), key=lambda rank: (work[rank], -held.get(rank, 0), rank))
        work[owner] += newton_schulz_work(matrix.shape)
        owners[place] = owner
    return [
        OwnedMatrix(matrix.unit, matrix.name, matrix.shape, owners[place], matrix.parts)
        for place, matrix in enumerate(found)
    ]


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
    """Elements that `rank` sends in a step in both directions."""
    return sum(towards_owners(matrices, rank).values()) + sum(towards_holders(matrices, rank).values())


def most_sent_elements(matrices: Sequence[OwnedMatrix], shard_count: int) -> int:
    """The most elements that any rank of the shard group sends in a step."""
    sent = [0] * shard_count
    for matrix in matrices:
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
    held, owned = [0] * shard_count, [0] * shard_count
    for matrix in matrices:
        owned[matrix.owner] += matrix.numel
        for part in matrix.parts:
            held[part.holder] += part.numel
    buffers = max(map(sum, zip(held, owned, strict=True))) if shard_count > 1 else largest
    return (buffers + WORKING * largest) * itemsize
