"""What a rank holds of one unit for its shard group, of which it owns a part: see `Collectives`."""

from __future__ import annotations

import torch

from zero_runtime.collectives import Collectives, Pending


class GroupShard:
    """The parameters [P / G] of one unit from which the ranks of a shard group gather full copies.

    values: the tensor, param_dtype. own: this rank's part [P / N] of it, which an update changes; a view. The other
    parts are those of the ranks at the same position of the other groups, and are stale until they are exchanged.
    """

    def __init__(self, unit: str, values: torch.Tensor, collectives: Collectives) -> None:
        self.values = values
        self.own = values.chunk(collectives.group_count)[collectives.group]
        self._unit = unit
        self._collectives = collectives
        self._is_current = False
        self._exchange: Pending | None = None  # under way, if current

    def renew(self) -> None:
        """Start exchanging the parts between the groups; a no-op if they are current. Does not block."""
        if not self._is_current and self._collectives.group_count > 1:
            self._is_current = True
            self._exchange = self._collectives.gather_across(self.values, self.own, self._unit)

    def ready(self) -> Pending | None:
        """What a gather from `values` must wait for, started if necessary; None if they can be read now.

        Where the host must wait, it waits here for an exchange that began earlier, so that the gather begins here too.
        """
        if not self.values.is_cuda:
            self.wait()
        self.renew()
        return self._exchange

    def wait(self) -> None:
        """Block until no exchange is under way, which would read this rank's part."""
        if self._exchange is not None:
            self._exchange.wait()
            self._exchange = None

    def make_stale(self) -> None:
        """Declare the parts of the other groups stale: this rank's own changes, and so do theirs."""
        self.wait()
        self._is_current = False

    def free(self) -> None:
        """Release the tensor."""
        self.wait()
        self.values = self.own = self.values.new_empty(0)
