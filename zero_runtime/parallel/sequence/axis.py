"""The sequence-parallel group of a rank: its part of each sequence, and the exchange of parts and heads.

[Note: parts and heads]
Everything in a transformer but the attention treats tokens alone, so each of k ranks computes it for T/k consecutive
tokens of a sequence. Attention treats heads alone: before it the ranks exchange queries, keys and values, so that each
holds all T tokens of 1/k of the heads, and after it they exchange back. Both are the same all-to-all of k equal
parts, which is its own inverse and therefore its own backward.
"""

from __future__ import annotations

from typing import Any

import torch

from zero_runtime.divisions import SequencePart
from zero_runtime.errors import PlanError
from zero_runtime.parallel.group_batch import GroupBatch
from zero_runtime.parallel.sequence.messages import PartMessages


class SequenceAxis(SequencePart):
    """The ranks that hold the parts of one sequence. They are given the same batch, which `batch` checks.

    All of them must run the same layers in the same order, since each attention exchanges. With a degree of 1 every
    part is the whole.
    """

    def __init__(self, collectives: PartMessages | AloneInSequence) -> None:
        self.rank = collectives.sequence_rank
        self.degree = collectives.sequence_degree
        self.batch = GroupBatch("parallel.sp", self.rank, self.degree)
        self._collectives = collectives

    def part(self, values: torch.Tensor) -> torch.Tensor:
        if self.degree == 1:
            return values
        self._check_length(values.shape[1])
        self.batch.note(values)
        return values.chunk(self.degree, dim=1)[self.rank]

    def positions(self, part: torch.Tensor) -> torch.Tensor:
        """The positions of a part [B, t] in its sequence: int64 [1, t]."""
        length = part.shape[1]
        return torch.arange(self.rank * length, (self.rank + 1) * length, device=part.device)[None]

    def _check_length(self, length: int) -> None:
        left = length % self.degree
        if not left:
            return
        fits = [one for one in (length - left, length - left + self.degree) if one]
        raise PlanError(
            f"parallel.sp={self.degree}: expected sequences whose length {self.degree} divides, found {length} "
            f"tokens; use {' or '.join(map(str, fits))}, or parallel.sp=1"
        )

    def heads(self, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of queries, keys and values [B, H, t, D] of this rank's tokens, its heads of all tokens [B, H/degree, T, D].

        H may differ between them, D may not. Of fewer heads than ranks each is copied to several ranks, consecutive
        ones. One message for all of them.
        """
        k = self.degree
        split = [_for_all(one, k).unflatten(1, (k, -1)).transpose(0, 1) for one in states]
        own = _Trade.apply(torch.cat(split, dim=2).contiguous(), self._collectives)  # [k, B, h, t, D]
        whole = own.permute(1, 2, 0, 3, 4).flatten(2, 3)
        return tuple(whole.split([one.shape[2] for one in split], dim=1))

    def tokens(self, states: torch.Tensor) -> torch.Tensor:
        """The inverse for an attention's result: [B, T, H/degree, D] of this rank's heads to [B, t, H, D]."""
        split = states.unflatten(1, (self.degree, -1)).transpose(0, 1).contiguous()
        own: torch.Tensor = _Trade.apply(split, self._collectives)  # [k, B, t, h, D]
        return own.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _for_all(states: torch.Tensor, ranks: int) -> torch.Tensor:
    """Heads [B, H, t, D], repeated for as many ranks if they are fewer; their gradients are summed."""
    heads = states.shape[1]
    return states if heads % ranks == 0 else states.repeat_interleave(ranks // heads, dim=1)


class _Trade(torch.autograd.Function):
    """Sends part r of a contiguous [degree, ...] to rank r of the group, and receives its part there; see
    [Note: parts and heads]."""

    @staticmethod
    def forward(ctx: Any, sent: torch.Tensor, collectives: PartMessages | AloneInSequence) -> torch.Tensor:
        ctx.collectives = collectives
        received = torch.empty_like(sent)
        collectives.trade_parts(received, sent)
        return received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        sent = grad.contiguous()
        received = torch.empty_like(sent)
        ctx.collectives.trade_parts(received, sent)
        return received, None


class AloneInSequence:
    """Stands in for the collectives where no ranks are: in a trace on fake tensors, which only needs shapes."""

    def __init__(self, degree: int) -> None:
        self.sequence_degree, self.sequence_rank = degree, 0

    def trade_parts(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        pass
