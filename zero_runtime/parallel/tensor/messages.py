"""The messages of one tensor-parallel group, by the runtime's collectives.

The journal gets no sizes, because only the ranks of one group must have batches of one shape.
"""

from __future__ import annotations

import torch

from zero_runtime.collectives import Collectives

GATHER = "tensor_all_gather"  # the kind of a gather of layers
PART_GATHER, PART_SUM = "tensor_part_gather", "tensor_reduce_scatter"  # of hidden states


class SliceMessages:
    """Sums and gathers over the ranks that hold the slices of one model."""

    def __init__(self, collectives: Collectives) -> None:
        self.tensor_degree, self.tensor_rank = collectives.tensor_degree, collectives.tensor_rank
        self._collectives = collectives

    def sum_over_slices_(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a contiguous tensor over the ranks of this group, in place. Blocks.

        The result has the same bits on every rank of the group: each element is summed on one of them, over gloo in
        rank order.
        """
        degree, group, collectives = self.tensor_degree, self._collectives.groups.tensor, self._collectives
        if degree == 1 or values.numel() == 0:
            return values
        kind, flat = "tensor_all_reduce", values.view(-1)
        collectives.ledger.record(kind, "", 2 * (degree - 1) * flat.numel() // degree, values.dtype)
        if not collectives.sends_messages(group):
            collectives.issue(kind, "", values.new_empty(0), collectives.all_reduce_over(flat, group))()
            return values
        missing = -flat.numel() % degree  # messages exchange equal chunks
        padded = torch.cat([flat, flat.new_zeros(missing)]) if missing else flat
        own = padded.chunk(degree)[self.tensor_rank]
        for start in (
            collectives.reduce_scatter_over(own, padded, group),
            collectives.all_gather_over(padded, own, group),
        ):
            collectives.issue(kind, "", values.new_empty(0), start)()
        if missing:
            flat.copy_(padded[: flat.numel()])
        return values

    def gather_slices(self, values: torch.Tensor, *, counted: bool = True, kind: str = GATHER) -> torch.Tensor:
        """The tensors of all ranks of this group, [degree, *shape] in rank order. Blocks.

        counted: whether the ledger counts it, as a message of a training step of this kind.
        """
        full = values.new_empty((self.tensor_degree, *values.shape))
        if self.tensor_degree == 1 or values.numel() == 0:
            return full.copy_(values)
        collectives = self._collectives
        if counted:
            collectives.ledger.record(kind, "", (self.tensor_degree - 1) * values.numel(), values.dtype)
        start = collectives.all_gather_over(full.view(-1), values.contiguous().view(-1), collectives.groups.tensor)
        collectives.issue(kind, "", values.new_empty(0), start)()
        return full

    def sum_to_slices(self, values: torch.Tensor) -> torch.Tensor:
        """This rank's slice [*shape] of the sum of every rank's contiguous `values` [degree, *shape]. Blocks."""
        own = values.new_empty(values.shape[1:])
        if self.tensor_degree == 1 or values.numel() == 0:
            return own.copy_(values[0])
        collectives = self._collectives
        collectives.ledger.record(PART_SUM, "", (self.tensor_degree - 1) * own.numel(), own.dtype)
        start = collectives.reduce_scatter_over(own.view(-1), values.view(-1), collectives.groups.tensor)
        collectives.issue(PART_SUM, "", values.new_empty(0), start)()
        return own
