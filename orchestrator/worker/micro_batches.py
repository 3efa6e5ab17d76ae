"""The micro-batches of one rank: its slice of a step's samples, on the device, and the sum of their losses."""

from __future__ import annotations

from typing import Any

import torch

from orchestrator.config.schema import RunConfig
from orchestrator.workloads.data import IGNORED_LABEL, TokenData, slice_for_rank
from orchestrator.workloads.models import token_losses
from orchestrator.workloads.sources import IntArray
from zero_runtime.runtime import ZeroRuntime
from zero_runtime.wings import HEAD_OF, load


class MicroBatches:
    """What this rank computes of each step's global batch."""

    def __init__(self, config: RunConfig, runtime: ZeroRuntime, data: TokenData) -> None:
        self._config, self._runtime, self._data = config, runtime, data
        # A head whose logits stay divided between ranks; None if there are none such.
        self._head = load(HEAD_OF)(runtime.model) if runtime.collectives.tensor_degree > 1 else None

    def of_step(self, samples: int) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], int]:
        """This rank's slice of the global batch after so many samples, split into micro-batches of [micro, seq] int64.

        Also the number of the tokens of its sequences, or of its parts of them, that have a label, counted on the host:
        a GPU would have to be waited for.
        """
        size, micro = self._config.batch.global_size, self._config.batch.micro
        assert size is not None
        collectives = self._runtime.collectives
        offset, count = slice_for_rank(size, collectives.batch_rank, collectives.batch_world)
        ids, labels = self._data.train_batch(samples + offset, count)
        parts = [
            (self.on_device(ids[start : start + micro]), self.on_device(labels[start : start + micro]))
            for start in range(0, count, micro)
        ]
        return parts, self.count(labels)

    def count(self, labels: IntArray) -> int:
        """The labels of this rank's part of the sequences."""
        degree, rank = self._runtime.sequence.degree, self._runtime.sequence.rank
        length = labels.shape[1] // degree
        return int((labels[:, rank * length : (rank + 1) * length] != IGNORED_LABEL).sum())

    def on_device(self, array: Any) -> torch.Tensor:
        """The array on the device. On a GPU the host does not wait for the copy: it is from pinned memory, which
        torch gives to no other tensor before the copy has ended."""
        tensor, device = torch.from_numpy(array), self._runtime.device
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    def losses(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The sum of the losses of a micro-batch's tokens, or of this rank's part of them."""
        tile, sequence = self._config.loss.tile_tokens, self._runtime.sequence
        return token_losses(self._runtime.model, ids, labels, tile, self._head, sequence)
