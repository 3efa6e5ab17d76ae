"""Divides the sequences of a model's batches over ranks: installs its forward and its attention, until removed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from zero_runtime.collectives import Collectives
from zero_runtime.divisions import SequencePart, WholeSequences
from zero_runtime.errors import PlanError
from zero_runtime.parallel.sequence.attention import InstalledAttention, check_model
from zero_runtime.parallel.sequence.axis import SequenceAxis
from zero_runtime.parallel.sequence.messages import PartMessages

# Arguments of a forward that would need all of a sequence, and why.
_WHOLE = {
    "past_key_values": "a cache needs whole sequences",
    "labels": "the loss is computed from the logits and `runtime.sequence.part(labels)`",
    "attention_mask": "padding and packed sequences are not divided",
    "position_ids": "each rank's positions are those of its part",
    "inputs_embeds": "the input is token ids",
}


@dataclass(frozen=True)
class SequenceParallel(WholeSequences):
    """Settings of sequence parallelism.

    degree: number of consecutive ranks that hold the parts of the same sequences, and exchange them for heads.
    """

    degree: int = 1

    def __post_init__(self) -> None:
        if self.degree < 1:
            raise PlanError(f"parallel.sp: expected at least 1, found {self.degree}; use parallel.sp=1")

    def check(self, model: nn.Module, *, ranks: int, tensor_degree: int = 1) -> None:
        """Raise PlanError if the ranks or the model do not divide; it names the nearest degrees that do.

        ranks: those of the data axis.
        """
        if self.degree == 1:
            return
        if tensor_degree > 1:
            raise PlanError(
                f"parallel.sp={self.degree}: expected parallel.tp=1, found {tensor_degree}: heads are divided once, "
                "over one of the two; use parallel.tp=1, or parallel.sp=1"
            )
        if ranks % self.degree:
            raise PlanError(
                f"parallel.sp={self.degree}: expected a divisor of the {ranks} ranks; start a multiple of "
                f"{self.degree} ranks, or use parallel.sp=1"
            )
        check_model(model, self.degree)

    def part(self, collectives: Collectives) -> SequencePart:
        return SequencePart() if self.degree == 1 else SequenceAxis(PartMessages(collectives))

    def install(self, model: nn.Module, part: SequencePart) -> DividedSequences | None:
        return DividedSequences(model, part) if isinstance(part, SequenceAxis) else None


class DividedSequences:
    """The installed forward and attention of a model. It is called with full sequences, and returns its part.

    Its `generate` is refused: without a cache it would take each token from the end of the rank's part. The model must
    have passed `SequenceParallel.check`.
    """

    def __init__(self, model: nn.Module, axis: SequenceAxis) -> None:
        self.batch = axis.batch
        self._model = model
        self._attention = InstalledAttention(model, axis)
        own: dict[str, Any] = {"forward": PartForward(model.forward, axis)}
        if callable(getattr(model, "generate", None)):
            own["generate"] = NoGenerate(axis)
        # What other code has set on this instance; None for what is of the class.
        self._installed = {name: (one, vars(model).get(name)) for name, one in own.items()}
        vars(model).update(own)

    def full_logits(self) -> AbstractContextManager[None]:
        return nullcontext()  # each rank has all logits of its part

    def remove(self) -> None:
        """Restore the model's own forward, `generate` and attention. Idempotent."""
        for name, (own, before) in self._installed.items():
            if vars(self._model).get(name) is own:
                del vars(self._model)[name]
                if before is not None:
                    vars(self._model)[name] = before
        self._attention.remove()


class NoGenerate:
    """The `generate` of a model whose sequences are divided."""

    def __init__(self, axis: SequenceAxis) -> None:
        self._axis = axis

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise PlanError(
            f"parallel.sp={self._axis.degree}: `generate` needs whole sequences, and each rank has a part of them; use "
            "parallel.sp=1"
        )


class PartForward:
    """The forward of a model for this rank's part of token ids [B, T]: its outputs are those of T/degree tokens."""

    def __init__(self, forward: Callable[..., Any], axis: SequenceAxis) -> None:
        self._forward, self._axis = forward, axis

    def __call__(self, input_ids: torch.Tensor, **others: Any) -> Any:
        for name, why in _WHOLE.items():
            if others.pop(name, None) is not None:
                raise PlanError(
                    f"parallel.sp={self._axis.degree}: expected a forward without {name}, found one: {why}; leave it "
                    "out, or use parallel.sp=1"
                )
        others["use_cache"] = False
        part = self._axis.part(input_ids)
        return self._forward(input_ids=part, position_ids=self._axis.positions(part), **others)
