"""The runtime's own collectives over a SharedGroup, as zero_runtime/gloo.py has them over gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zero_runtime.same_host import operations
from zero_runtime.same_host.group import SharedGroup
from zero_runtime.same_host.progress import Operation


class SharedMessages:
    """The collectives of one group, whose ranks must all call them in the same order."""

    holds_terms = False

    def __init__(self, group: SharedGroup) -> None:
        self._group = group
        self._rank, self._size = group.rank(), group.size()

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, place: int = 0) -> Callable[[], None]:
        """Start filling `full` [P] from every rank's `shard` [S], which may be its own slice of `full`.

        place: of the unit, about which the ranks must agree. Returns a function that waits for the result.
        """
        self._group.observe("all_gather", full, shard)
        parts = full.chunk(self._size)
        return self._waiting(
            self._group.start(
                "all_gather", full, lambda call: operations.all_gather(call, parts, shard), place=place, held=(shard,)
            )
        )

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> Callable[[], None]:
        """Start summing this rank's slice of every rank's `full` [P] into `shard` [S], which may be that slice."""
        self._group.observe("reduce_scatter", shard, full)
        parts = full.chunk(self._size)
        return self._waiting(
            self._group.start(
                "reduce_scatter",
                full,
                lambda call: operations.reduce_scatter(call, shard, parts, torch.add),
                held=(shard,),
            )
        )

    def all_reduce(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Start summing every rank's `tensor` in place. Returns a function that waits for the result."""
        self._group.observe("all_reduce", tensor, tensor)
        return self._waiting(
            self._group.start("all_reduce", tensor, lambda call: operations.all_reduce(call, tensor, torch.add))
        )

    def exchange(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Start sending `sent[r]` to each rank r of the group and receiving `received[r]` from it.

        The part of this rank itself is left as it is. Returns a function that waits for all of them.
        """
        for peer, part in enumerate(sent):  # each, since they may differ in size
            if peer != self._rank and part.numel():
                self._group.observe("send", None, part)
        into = [*received[: self._rank], sent[self._rank], *received[self._rank + 1 :]]
        return self._waiting(
            self._group.start(
                "all_to_all",
                sent[self._rank],
                lambda call: operations.exchange(call, into, sent),
                held=(received, sent),
                numel=0,
            )
        )

    def _waiting(self, operation: Operation) -> Callable[[], None]:
        return lambda: self._group.wait(operation)
