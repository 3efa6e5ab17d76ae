"""What an engine is to the program: a module with these names, listed in wings.ENGINES, and the object that it builds.

The command imports the module to check points, so it imports torch and its engine in `build` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from orchestrator.config.schema import RunConfig
from orchestrator.config.strict import Broken
from zero_runtime.predict.memory.peers import PeerMemory, PeerModel

if TYPE_CHECKING:
    import torch
    from torch import nn

    from zero_runtime.optim.lr_schedule import Rates


@dataclass(frozen=True)
class Task:
    """What an engine builds from. The default process group is there.

    model: parameters on the meta device, buffers with values; what is frozen does not require a gradient.
    first_value: the first value of a parameter by its name, on the CPU, as the model is saved (fp32 if it is drawn);
    it is the same on all ranks, and each call makes it anew.
    """

    config: RunConfig
    model: nn.Module
    first_value: Callable[[str, nn.Parameter], torch.Tensor]
    device: torch.device


class Updated(NamedTuple):
    """norm: of the gradients before they were clipped, summed over ranks and micro-batches, best as a 0-dim tensor that
    nobody has read on the host; None if the engine did not compute it. skipped: nothing was updated, because fp16
    gradients overflowed. loss_scale: of this step.
    """

    norm: torch.Tensor | float | None
    skipped: bool = False
    loss_scale: float = 1.0


class TrainingEngine(Protocol):
    """An engine at work on one rank. All ranks make the same calls.

    module: what is called with `input_ids`; its forward may differ from the model's in dtypes and messages only.
    """

    module: nn.Module

    def before_micro_batch(self, *, last: bool) -> None:
        """Comes before each forward; `last`: its backward ends the step."""

    def backward(self, loss: torch.Tensor) -> None:
        """loss: this rank's and micro-batch's share of the objective. Gradients are summed over both, not averaged."""

    def step(self, rates: Rates) -> Updated:
        """Clips by config.optimizer.clip_norm, updates every trained parameter once, drops the gradients."""

    def held(self) -> Mapping[str, Sequence[torch.Tensor]]:
        """The tensors of this rank that exist now: `params`, `grads`, `master`, and the optimizer's by their names
        (exp_avg, ...). Local shards, not what is gathered for a forward. fp32 weights that are both are `params` where
        the model computes in fp32, else `master`."""

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each parameter's name in the model and its full value, in the dtype of the master; one at a time. A
        collective, between two steps."""

    def begin_again(self, values: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Gives the trained parameters these values, whole and in fp32, by their names, and the optimizer and the loss
        scale the state that they had before the first step. A collective, between two steps."""

    def close(self) -> None:
        """Ends what the engine has started. The process ends soon after."""


class EngineModule(Protocol):
    """A module in wings.ENGINES.

    One whose forward runs under torch.autocast has `autocast_of(config) -> str | None` too: the dtype, or None at these
    settings. Its activations are then counted so, with the casts of its weights.

    PACKAGES: the distributions whose versions are part of a row. EXTRA: zero-lab's extra that installs the first of
    them; empty if it is always there.
    """

    PACKAGES: tuple[str, ...]
    EXTRA: str

    def problems_of(self, config: RunConfig) -> list[Broken]:
        """Why the engine cannot train this point; each fix is the nearest thing that it can do."""

    def notes_of(self, config: RunConfig) -> list[str]:
        """What it does otherwise than the others with the same words, one sentence each."""

    def meaning(self, config: RunConfig) -> RunConfig:
        """The point without what the engine ignores of it, so that points that are one to the engine are equal. It
        breaks no rules."""

    def settings_of(self, config: RunConfig) -> dict[str, Any]:
        """The engine's settings in its own words, as they are given to it: every default that is not what the
        configuration says is among them. Those of config.engine.native replace them."""

    def memory_of(self, model: PeerModel, config: RunConfig) -> PeerMemory | None:
        """The engine's bytes on one rank by its rules; None if they are not known for this point."""

    def build(self, task: Task) -> TrainingEngine:
        """Builds the engine with the model's first values. A collective. A module that imports a large library calls
        worker/measure.py's begin_peak then, whose count it is no part of."""
