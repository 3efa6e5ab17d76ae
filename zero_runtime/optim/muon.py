"""Muon: matrices of the blocks are updated by their orthogonalised momentum, all other parameters by AdamW.

See matrix_owners.py, and [Note: matrices] in unit_planner.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from zero_runtime.collectives import Collectives
from zero_runtime.dtypes import TORCH_DTYPE
from zero_runtime.kernels import ops
from zero_runtime.kernels.reference import muon_, muon_direction_, orthogonalised
from zero_runtime.kernels.settings import Muon, MuonNumbers
from zero_runtime.optim.configs import MuonConfig
from zero_runtime.optim.matrix_owners import MatrixPart, OwnedMatrix, owned_matrices
from zero_runtime.optim.rules import ElementwiseRule, Held, ShardSlice, StepNumbers, UpdateRule, part_of, pieces_of
from zero_runtime.slices import WHOLE
from zero_runtime.unit import Unit

SLICES = "matrix_all_gather"  # the kind of the message between the owners of a matrix's slices


class _Own(NamedTuple):
    """The part of one matrix on this rank: its elements of the shard, and the numbers of the step."""

    part: ShardSlice
    numbers: MuonNumbers


class MuonRule(UpdateRule):
    """Updates the matrices with two messages between each pair of ranks of a shard group, and the rest by AdamW."""

    def __init__(self, config: MuonConfig, helds: Sequence[Held], collectives: Collectives) -> None:
        self._config = config
        self._collectives = collectives
        self._rank = collectives.shard_rank
        self._adamw = ElementwiseRule(config.adamw)
        with_matrices = [held.unit for held in helds if isinstance(held.unit, Unit) and held.unit.matrices]
        splits = {name: split for unit in with_matrices for name, split in unit.slices.splits.items()}
        self._slices = with_matrices[0].slices if with_matrices else WHOLE  # the same of all units
        full_shapes = {name: split.shape for name, split in splits.items()}
        self._matrices = owned_matrices([unit.layout for unit in with_matrices], collectives.shard_count, full_shapes)
        self._splits = {matrix.name: splits[matrix.name] for matrix in self._matrices if matrix.name in splits}
        self._numel = sum(matrix.numel for matrix in self._matrices)
        self._dtype = TORCH_DTYPE[config.ns_dtype]

    def update(self, helds: Sequence[Held], numbers: StepNumbers) -> None:
        config = self._config
        rate = numbers.rate
        adamw = replace(numbers, rate=lambda settings: rate(settings) * config.adamw_lr_ratio)
        self._adamw.update([held for held in helds if not _has_matrices(held)], adamw)
        own = self._own_parts([held for held in helds if _has_matrices(held)], numbers)
        if self._collectives.shard_count == 1:
            for matrix in self._matrices:
                self._update_alone(matrix, own[matrix.name], numbers)
        elif self._matrices:
            self._update_together(own, numbers)

    def _own_parts(self, helds: Sequence[Held], numbers: StepNumbers) -> dict[str, _Own]:
        momentum = self._config.momentum if numbers.momentum is None else numbers.momentum
        shapes = {matrix.name: matrix.full_shape for matrix in self._matrices}
        found = {}
        for held in helds:
            for name, start, stop, run in pieces_of(held, self._rank):
                lr, factor = numbers.rate(run.settings), lr_factor(shapes[name], self._config)
                settings = Muon(lr, momentum, run.settings.weight_decay, factor)
                found[name] = _Own(part_of(held, start, stop), settings.numbers)
        return found

    def _update_alone(self, matrix: OwnedMatrix, own: _Own, numbers: StepNumbers) -> None:
        direction = torch.empty(matrix.numel, dtype=self._dtype, device=own.part.master.device)
        self._direct(own, numbers, direction)
        whole = self._whole({matrix.name: direction}, direction.device)[matrix.name]
        muon_(own.part.master, self._orthogonalised(matrix, whole), own.numbers, own.part.param_out)

    def _whole(self, directions: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
        """The directions of whole matrices, flattened, from those of slices.

        All ranks call it equally often, and those of a tensor-parallel group with the same matrices.
        """
        if not self._splits:
            return directions
        # Each owner of a slice orthogonalises the whole matrix: that repeats the work, but needs one message of a
        # matrix instead of two. One gather has all matrices of an owner; with one shard each matrix has its own.
        own = [direction for name, direction in directions.items() if name in self._splits]
        if not own:  # a rank that owns none: its group takes part, as all groups do in the same order
            nothing = torch.zeros(1, dtype=self._dtype, device=device)
            self._slices.axis.gather(nothing, counted=False, kind=SLICES)
            return directions
        slices = self._slices.axis.gather(torch.cat(own), kind=SLICES)
        found, start = dict(directions), 0
        for name, direction in directions.items():
            if name in self._splits:
                found[name] = self._splits[name].join(slices[:, start : start + direction.numel()]).view(-1)
                start += direction.numel()
        return found

    def _orthogonalised(self, matrix: OwnedMatrix, whole: torch.Tensor) -> torch.Tensor:
        """The update of a matrix from its direction, or of this rank's slice of it."""
        split, squares = self._splits.get(matrix.name), ops.sum_of_squares(whole)
        found = orthogonalised(whole.view(matrix.full_shape), squares, self._config.ns_steps)
        return (found if split is None else split.cut(found, self._slices.rank)).view(-1)

    def _direct(self, own: _Own, numbers: StepNumbers, out: torch.Tensor) -> None:
        (buffer,) = own.part.states
        muon_direction_(buffer, own.part.grad, numbers.grad_scale, own.numbers, self._config.nesterov, out)

    def _update_together(self, own: dict[str, _Own], numbers: StepNumbers) -> None:
        """Send directions to the owners, orthogonalise what this rank owns, and send the updates back."""
        rank, ranks = self._rank, self._collectives.shard_count
        pieces = [_Piece(matrix, part) for matrix in self._matrices for part in matrix.parts]
        held = _Places([one for one in pieces if one.part.holder == rank], lambda one: one.matrix.owner, rank, ranks)
        owned = _Places([one for one in pieces if one.matrix.owner == rank], lambda one: one.part.holder, rank, ranks)
        device = numbers.grad_scale.device
        mine, theirs = (torch.empty(places.numel, dtype=self._dtype, device=device) for places in (held, owned))
        for piece in held.pieces:
            self._direct(own[piece.matrix.name], numbers, held.of(mine, piece))
        self._exchange((owned, theirs), (held, mine))
        here = {
            matrix.name: [owned.of(theirs, _Piece(matrix, part)) for part in matrix.parts]
            for matrix in self._matrices
            if matrix.owner == rank
        }
        whole = {name: torch.cat(parts) for name, parts in here.items()} if self._splits else {}
        whole = self._whole(whole, device)
        for matrix in (one for one in self._matrices if one.owner == rank):
            parts = here[matrix.name]
            update = self._orthogonalised(matrix, whole.pop(matrix.name) if whole else torch.cat(parts))
            for values, part in zip(parts, matrix.parts, strict=True):
                values.copy_(update[part.start : part.stop])
        self._exchange((held, mine), (owned, theirs))
        for piece in held.pieces:
            one = own[piece.matrix.name]
            muon_(one.part.master, held.of(mine, piece), one.numbers, one.part.param_out)

    def _exchange(self, into: tuple[_Places, torch.Tensor], out: tuple[_Places, torch.Tensor]) -> None:
        (to, received), (of, sent) = into, out
        received[to.exchanged :].copy_(sent[of.exchanged :])  # what stays on this rank
        collectives, kind = self._collectives, "all_to_all"
        if collectives.shard_count == 1:
            return
        collectives.ledger.record(kind, "", sum(of.counts), sent.dtype)
        # Parts differ in size between the ranks: the journal compares the elements that all ranks exchange.
        alike = torch.empty(self._numel, dtype=sent.dtype, device="meta")
        parts = received[: to.exchanged], sent[: of.exchanged]
        start = collectives.parts_over(*parts, (to.counts, of.counts), collectives.groups.reduce)
        collectives.issue(kind, "", alike, start)()


def lr_factor(shape: tuple[int, int], config: MuonConfig) -> float:
    """The factor of the rate for a matrix of this shape. See MuonConfig."""
    rows, columns = shape
    if config.lr_scaling == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


def _has_matrices(held: Held) -> bool:
    assert isinstance(held.unit, Unit), "offload refuses Muon"
    return held.unit.matrices


class _Piece(NamedTuple):
    """A part of a matrix that travels between its holder and the matrix's owner."""

    matrix: OwnedMatrix
    part: MatrixPart


class _Places:
    """The places of pieces in a flat tensor: in the order of the rank at their other end, then of the matrices.

    The pieces that stay on this rank follow after all others, which take the first `exchanged` elements. counts: the
    elements by the rank at the other end, 0 for this rank.
    """

    def __init__(self, pieces: Sequence[_Piece], end: Callable[[_Piece], int], rank: int, ranks: int) -> None:
        self.pieces = sorted(pieces, key=lambda piece: (end(piece) == rank, end(piece)))
        self.counts = [0] * ranks
        self.numel = 0
        self._starts: dict[tuple[str, int], int] = {}
        for piece in self.pieces:
            self._starts[piece.matrix.name, piece.part.start] = self.numel
            self.numel += piece.part.numel
            if end(piece) != rank:
                self.counts[end(piece)] += piece.part.numel
        self.exchanged = sum(self.counts)

    def of(self, values: torch.Tensor, piece: _Piece) -> torch.Tensor:
        """The elements of a piece; a view."""
        start = self._starts[piece.matrix.name, piece.part.start]
        return values[start : start + piece.part.numel]
