"""The messages of one sequence-parallel group, by the runtime's collectives."""

from __future__ import annotations

import torch

from zero_runtime.collectives import Collectives


class PartMessages:
    """Exchanges between the ranks that hold the parts of the same sequences."""

    def __init__(self, collectives: Collectives) -> None:
        self.sequence_degree, self.sequence_rank = collectives.sequence_degree, collectives.sequence_rank
        self._collectives = collectives

    def trade_parts(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Send the r-th of equal parts of `sent` to rank r of this group, and receive the parts of `received` in rank
        order; both are contiguous. Blocks.

        The journal gets no size, because only the ranks of one group must have batches of one shape.
        """
        degree, collectives = self.sequence_degree, self._collectives
        if degree == 1:
            received.copy_(sent)
            return
        kind, group = "sequence_all_to_all", collectives.groups.sequence
        collectives.ledger.record(kind, "", (degree - 1) * sent.numel() // degree, sent.dtype)
        into, out = received.view(-1), sent.view(-1)
        start = collectives.all_to_all_over(into, out, group, degree)
        if collectives.sends_messages(group):  # which leave this rank's own part
            into.chunk(degree)[self.sequence_rank].copy_(out.chunk(degree)[self.sequence_rank])
        collectives.issue(kind, "", sent.new_empty(0), start)()
