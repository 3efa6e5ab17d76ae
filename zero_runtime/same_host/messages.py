"""The runtime's own collectives over a SharedGroup, as zero_runtime/gloo.py has them over gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zero_runtime.same_host import operations
from zero_runtime.same_host.group import SharedGroup
from zero_runtime.same_host.operations import Call
from zero_runtime.same_host.progress import Operation, Steps


class SharedMessages:
    """The collectives of one group, whose ranks must all call them in the same order."""

    holds_terms = False

    def __init__(self, group: SharedGroup) -> None:
        self._group = group
        self._rank, self._size = group.rank(), group.size()
        self._unread: list[Operation] = []  # each ends when the other ranks have read the shard of a gather

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, place: int = 0, *, settles_late: bool = False
    ) -> Callable[[], None]:
        """Start filling `full` [P] from every rank's `shard` [S], which may be its own slice of `full`.

        place: of the unit, about which the ranks must agree. settles_late: what waits for the result does not wait
        until the others have read `shard`, which must be kept as it is until `settle`. So a rank that comes first waits
        for what the others have begun, not for what they have come to. Returns a function that waits for the result.
        """
        self._group.observe("all_gather", full, shard)
        parts = full.chunk(self._size)

        def steps(call: Call) -> Steps:
            yield from operations.gather_parts(call, parts, shard)
            if settles_late:
                self._unread.append(self._group.follow(call, call.until_read(call.links), held=(shard,)))
            else:
                yield from call.until_read(call.links)

        return self._waiting(self._group.start("all_gather", full, steps, place=place, held=(shard,)))

    def settle(self) -> None:
        """Wait until the other ranks have read the shards of all gathers that have ended here and settle late."""
        while self._unread:
            self._group.wait(self._unread.pop())

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
