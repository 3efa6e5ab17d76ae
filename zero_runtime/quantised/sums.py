"""Reductions of codes: each rank quantises its gradient of every other rank's shard."""

from __future__ import annotations

import torch

from zero_runtime.collectives import Collectives, Pending
from zero_runtime.flat_layout import FlatLayout
from zero_runtime.kernels.wire_format import dequantise_, packed_numel, quantise_
from zero_runtime.wire import BITS, Wire


class QuantisedSums:
    """The reductions of one unit.

    errors: what quantising took from the last gradients, [P] fp32, if it is fed back; from the first reduction on.
    """

    def __init__(self, wire: Wire, unit: str, layout: FlatLayout, collectives: Collectives) -> None:
        self.errors: torch.Tensor | None = None
        self._bits, self._feeds_back = BITS[wire.reduce or ""], wire.error_feedback
        self._unit, self._layout, self._collectives = unit, layout, collectives

    def start(self, full: torch.Tensor, out: torch.Tensor) -> tuple[Pending, torch.Tensor, torch.Tensor]:
        """Send the codes of every other rank's shard of `full` [P]; this rank's own gradient is put into `out` [S].

        Returns the exchange and what `add` needs: `out`, and the codes and scales of each rank of the group.
        """
        layout, own = self._layout, self._collectives.shard_rank
        numel = packed_numel(layout.shard_numel, self._bits) * layout.shard_count
        sent, received = (torch.empty(numel, dtype=torch.uint8, device=full.device) for _ in range(2))
        if self._feeds_back and self.errors is None:
            self.errors = torch.zeros(layout.padded_numel, dtype=torch.float32, device=full.device)
        for shard, codes in enumerate(sent.chunk(layout.shard_count)):
            values = layout.shard_of(full, shard)
            if shard == own:
                out.copy_(values)
            elif self.errors is None:
                quantise_(codes, values, self._bits)
            else:
                self._feed_back(codes, values, layout.shard_of(self.errors, shard))
        return self._collectives.trade(received, sent, self._unit), out, received

    def _feed_back(self, codes: torch.Tensor, values: torch.Tensor, errors: torch.Tensor) -> None:
        """Quantise the gradient with the earlier errors, and keep what this takes from it."""
        errors.add_(values)
        quantise_(codes, errors, self._bits)
        read = torch.empty_like(errors)
        dequantise_(read, codes, self._bits)
        errors.sub_(read)
        errors.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)  # of a gradient that is not finite, whose step is skipped

    def add(self, out: torch.Tensor, received: torch.Tensor) -> None:
        """Sum the ranks' gradients in fp32 in the order of the ranks into `out`, then sum its replicas."""
        total = torch.zeros(out.numel(), dtype=torch.float32, device=out.device)
        for rank, codes in enumerate(received.chunk(self._layout.shard_count)):
            if rank == self._collectives.shard_rank:
                total.add_(out)
            else:
                dequantise_(total, codes, self._bits, adds=True)
        out.copy_(total)
        self._collectives.all_reduce_replicas(out, self._unit).wait()
