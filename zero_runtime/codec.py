"""How a unit's shards are sent and read back: here as they are. The wing `quantised` has the codes."""

from __future__ import annotations

import torch


class Codec:
    """What a rank sends of a shard, and how the full copy is read from what all ranks sent.

    This class sends values, which another dtype of the full copy is a cast of.
    """

    def encode(self, shard: torch.Tensor) -> torch.Tensor:
        """What is sent of a shard."""
        return shard

    def decode(self, full: torch.Tensor, sent: torch.Tensor) -> None:
        """Fill the full copy from what was sent of all shards, one after another."""
        full.copy_(sent)

    def round_(self, full: torch.Tensor) -> None:
        """Give a full copy, which may be a cast, the values that a gather would give it."""
