"""All-gather, reduce-scatter and all-to-all over gloo, as messages between the ranks of a group.

gloo's own all-gather allocates a temporary of the full size, and its reduce-scatter is an all-reduce of a copy, which
sends twice the bytes. Its threads also keep a collective's tensors alive until they start the next one. Messages go
directly from tensor to tensor: each of n ranks sends n - 1 of them, in total as many bytes as in a ring. A rank adds up
the received terms in rank order, so that all ZeRO plans give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

TAGS = 2**16  # numbers of collectives; fewer than this are under way at a time
PLACES = 2**15  # of what is gathered; a tag, which is 31 bits, has both


def messages_over(group: dist.ProcessGroup) -> Any:
    """The collectives over a group of CPU ranks: its own, which then has this class's methods, or messages."""
    own = getattr(group, "own_messages", None)
    return Messages(group) if own is None else own()


class Messages:
    """The collectives over one group, whose ranks must all call them in the same order."""

    holds_terms = True  # a reduction under way holds the other ranks' terms in tensors

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group or dist.group.WORLD
        self._rank = dist.get_rank(self._group)
        self._peers = [rank for rank in range(dist.get_world_size(self._group)) if rank != self._rank]
        self._count = 0

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, place: int = 0) -> Callable[[], None]:
        """Start filling `full` [P] from every rank's `shard` [S], which may be its own slice of `full`.

        place: of the unit, which the messages' tag names. Returns a function that waits for the result.
        """
        slices = full.chunk(len(self._peers) + 1)
        wait = self._exchange(dict.fromkeys(self._peers, shard), {peer: slices[peer] for peer in self._peers}, place)
        if slices[self._rank].data_ptr() != shard.data_ptr():
            slices[self._rank].copy_(shard)
        return wait

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> Callable[[], None]:
        """Start summing this rank's slice of every rank's `full` [P] into `shard` [S].

        `shard` may be this rank's slice of `full`. Returns a function that waits for the result.
        """
        slices = full.chunk(len(self._peers) + 1)
        received = {peer: torch.empty_like(shard) for peer in self._peers}
        wait = self._exchange({peer: slices[peer] for peer in self._peers}, received)

        def wait_and_add() -> None:
            wait()
            # In rank order, whichever came first: so all plans give the same bits.
            terms = [received.get(rank, slices[self._rank]) for rank in range(len(slices))]
            _add_in_order(terms, self._rank, shard)

        return wait_and_add

    def all_reduce(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Start summing every rank's `tensor` [P], P divisible by the ranks, in place; returns what waits for it."""
        own = tensor.chunk(len(self._peers) + 1)[self._rank]
        wait = self.reduce_scatter(own, tensor)

        def wait_and_gather() -> None:
            wait()
            self.all_gather(tensor, own)()

        return wait_and_gather

    def exchange(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Start sending `sent[r]` to each rank r of the group and receiving `received[r]` from it.

        Empty tensors are not sent. Returns a function that waits for all of them.
        """
        return self._exchange(
            {peer: sent[peer] for peer in self._peers if sent[peer].numel()},
            {peer: received[peer] for peer in self._peers if received[peer].numel()},
        )

    def _exchange(
        self, sent: dict[int, torch.Tensor], received: dict[int, torch.Tensor], place: int = 0
    ) -> Callable[[], None]:
        self._count += 1
        # Ranks that call different modules gather different units. gloo would abort a rank that receives more than it
        # expects, and one unit's weights would fill another of equal size. With the unit in the tag their messages do
        # not meet: the ranks wait until the watch compares their journals and names both units. Nothing more is sent.
        tag = place % PLACES * TAGS + self._count % TAGS
        works = [
            *(dist.irecv(tensor, group_src=peer, group=self._group, tag=tag) for peer, tensor in received.items()),
            *(dist.isend(tensor, group_dst=peer, group=self._group, tag=tag) for peer, tensor in sent.items()),
        ]

        def wait() -> None:
            for work in works:
                assert work is not None  # torch returns None only to ranks outside the group
                work.wait()

        return wait


def _add_in_order(terms: list[torch.Tensor], own: int, total: torch.Tensor) -> None:
    """Set `total` to ((terms[0] + terms[1]) + ...).

    terms[own] may be `total` itself and is not written before it is read. The other terms are overwritten.
    """
    with torch.no_grad():
        so_far = terms[0]
        for term in terms[1:-1]:
            so_far = torch.add(so_far, term, out=term if so_far is terms[own] else so_far)
        torch.add(so_far, terms[-1], out=total)
