"""The tensor-parallel group of a rank, as the divided layers use it: sums and gathers, and the batch that they saw."""

from __future__ import annotations

from functools import partial

import torch

from zero_runtime.parallel.group_batch import GroupBatch
from zero_runtime.parallel.tensor.messages import GATHER, PART_GATHER, SliceMessages


class TensorAxis:
    """The ranks that hold the slices of one model. They compute on the same batch, which `batch` checks.

    All of them must run the same layers in the same order, since each sum and gather is a collective.
    """

    def __init__(self, collectives: SliceMessages | AloneOnAxis) -> None:
        self.rank = collectives.tensor_rank
        self.degree = collectives.tensor_degree
        self.batch = GroupBatch("parallel.tp", self.rank, self.degree)
        self._collectives = collectives

    def sum_(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a contiguous tensor over the group, in place; equal bits on every rank."""
        return self._collectives.sum_over_slices_(values)

    def check_batch(self) -> bool:
        """`GroupBatch.check_group` by a message that is not counted as one of a step."""
        return self.batch.check_group(partial(self.gather, counted=False))

    def gather(self, values: torch.Tensor, *, counted: bool = True, kind: str = GATHER) -> torch.Tensor:
        """The tensors of all ranks, [degree, *shape]. counted: as a message of a training step of this kind."""
        return self._collectives.gather_slices(values, counted=counted, kind=kind)

    def gather_parts(self, part: torch.Tensor) -> torch.Tensor:
        """The parts of hidden states of all ranks, [degree, *shape]."""
        return self._collectives.gather_slices(part, kind=PART_GATHER)

    def sum_to_parts(self, terms: torch.Tensor) -> torch.Tensor:
        """This rank's part [*shape] of the sum of every rank's contiguous terms [degree, *shape]."""
        return self._collectives.sum_to_slices(terms)


class AloneOnAxis:
    """Stands in for the collectives where no ranks are: in a trace on fake tensors, which only needs shapes."""

    def __init__(self, degree: int) -> None:
        self.tensor_degree, self.tensor_rank = degree, 0

    def sum_over_slices_(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def gather_slices(self, values: torch.Tensor, *, counted: bool = True, kind: str = GATHER) -> torch.Tensor:
        return values.new_empty((self.tensor_degree, *values.shape))

    def sum_to_slices(self, values: torch.Tensor) -> torch.Tensor:
        return values.new_empty(values.shape[1:])
