"""What of a unit rests elsewhere, and what the tier where it rests does for that unit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Rests:
    """Which shards have no memory with the device between their uses: param_shard, and master and states.

    apart: what rests does so in memory that the device cannot compute with. So a master in the parameters' dtype is a
    tensor of its own where it rests and the parameters do not.
    """

    params: bool = False
    optimizer: bool = False
    apart: bool = False


class ShardLocation(Protocol):
    """Where a unit's shards rest. A verb already done is a no-op."""

    def begin_fetch(self) -> None:
        """param_shard sets out for the device. Does not block."""

    def fetch(self) -> torch.Tensor | None:
        """[S] param_dtype, current, for a gather that is issued now; None: the unit's own param_shard is that."""

    def drop(self) -> None:
        """The gather has read what `fetch` gave, or nobody will."""

    def send_grad(self) -> None:
        """grad_shard is complete for this step."""

    def settle(self) -> None:
        """Block until nothing of the unit is under way, so that its shards may be read and written."""


class OnDevice:
    """The place of a unit that rests nowhere else."""

    def begin_fetch(self) -> None:
        """There is nothing to bring."""

    def fetch(self) -> torch.Tensor | None:
        return None

    def drop(self) -> None:
        """There is nothing to take away."""

    def send_grad(self) -> None:
        """The update runs where it is."""

    def settle(self) -> None:
        """Nothing is ever under way."""


ON_DEVICE = OnDevice()
