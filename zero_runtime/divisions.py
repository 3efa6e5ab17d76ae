"""What ranks divide besides the model's states: its layers and its sequences. The classes here divide neither.

They are the contracts of the wing `parallel`, whose settings RuntimeSettings hand to the runtime. A group of
consecutive ranks then holds slices of one model, or parts of the same sequences, and is given one batch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from zero_runtime.collectives import Collectives
from zero_runtime.optim.config_base import OptimizerConfig
from zero_runtime.slices import WHOLE, Slices


class Divided(Protocol):
    """What a division has installed in a model, until `remove`. batch: compares what the ranks of a group were given
    since the last step (parallel/group_batch.py). full_logits: a context in which a head that keeps this
    rank's logits returns all of them."""

    batch: Any

    def full_logits(self) -> AbstractContextManager[None]: ...
    def remove(self) -> None: ...


class LayerDivision:
    """The division of one model's layers, decided before its parameters are replaced: here each rank holds all."""

    def slices(self, collectives: Collectives) -> Slices:
        """What this rank holds of the parameters."""
        return WHOLE

    def install(self, model: nn.Module) -> Divided | None:
        """Install the forwards of divided layers. Call it after `slices`, when the parameters are slices."""
        return None


class WholeLayers:
    """The settings by which layers are divided over `degree` consecutive ranks: here they are not."""

    degree: int = 1

    def data_world(self, world: int) -> int:
        """Number of ranks along the data axis. PlanError if the degree does not divide the ranks."""
        return world

    def check(self, optimizer: OptimizerConfig | None) -> None:
        """Raise ConfigError if the optimizer does not know divided parameters. optimizer: None for inference."""

    def division(self, model: nn.Module, *, trains: bool) -> LayerDivision:
        """How the full model is divided; changes nothing. PlanError if it does not divide."""
        return LayerDivision()


class SequencePart:
    """This rank's part of each sequence, of the `degree` ranks that hold its parts: here all of it."""

    rank: int = 0
    degree: int = 1

    def part(self, values: torch.Tensor) -> torch.Tensor:
        """This rank's part of token ids or labels [B, T]: a view [B, T/degree]. PlanError if T does not divide.

        Labels must have been shifted before: `labels[b, i]` is the target of `input_ids[b, i]`.
        """
        return values


class WholeSequences:
    """The settings by which sequences are divided over `degree` consecutive ranks: here they are not."""

    degree: int = 1

    def check(self, model: nn.Module, *, ranks: int, tensor_degree: int = 1) -> None:
        """Raise PlanError if the ranks of the data axis or the model do not divide."""

    def part(self, collectives: Collectives) -> SequencePart:
        """This rank's part."""
        return SequencePart()

    def install(self, model: nn.Module, part: SequencePart) -> Divided | None:
        """Install the forward and the attention of a part in a model that `check` has accepted."""
        return None
