"""A few of a rank's weights, by whose change an update is seen."""

from __future__ import annotations

from typing import Any

import torch

from orchestrator.wings.engines.checksums import checksum
from orchestrator.wings.engines.contract import TrainingEngine
from orchestrator.worker.listeners import RankRun

TENSORS, OF_EACH = 64, 16  # at most so many, evenly spread: a read takes some operations on 1024 elements


class Probe:
    """Reads the same elements again and again, without waiting for the device."""

    def __init__(self, run: RankRun) -> None:
        runtime: Any = run.runtime
        self._runtime = runtime
        self._is_own = run.config.engine.is_own
        self._views: list[torch.Tensor] = []
        if not self._is_own:
            engine: TrainingEngine = runtime.engine
            held = engine.held()
            weights = held.get("master") or held["params"]
            # An odd step: tensors often come in pairs, of which one may have no gradient in the first step (LoRA).
            self._views = [_some(one) for one in weights[:: len(weights) // TENSORS | 1]]

    def read(self) -> torch.Tensor:
        """A checksum of the present values: a 0-dim int64 tensor on their device."""
        return checksum(torch.cat(self._own_weights() if self._is_own else self._views))

    def _own_weights(self) -> list[torch.Tensor]:
        runtime, found = self._runtime, list[torch.Tensor]()
        for unit in runtime.units:
            if unit.trainable:
                with runtime.resident(unit):  # which waits for an update that the host still makes
                    found.append(_some(unit.weights_shard).to(runtime.device, copy=True))
        return found


def _some(tensor: torch.Tensor) -> torch.Tensor:
    """Elements from the whole tensor, as a view of it."""
    flat = tensor.view(-1)
    return flat[:: flat.numel() // OF_EACH | 1][:OF_EACH]
