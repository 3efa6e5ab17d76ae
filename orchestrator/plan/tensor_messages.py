"""The messages of tensor parallelism in a step, by the formulas of docs/parallel.md. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.config.schema import RunConfig
from zero_runtime.activations.rule import RecomputeRule
from zero_runtime.precision import ITEMSIZE_BYTES

NUMBER_BYTES = 4  # of the fp32 numbers of a token's loss


@dataclass(frozen=True)
class TensorSent:
    """Bytes and calls of a rank in one micro-batch. elements: those of `nbytes`, a loss's numbers included."""

    elements: int = 0
    nbytes: int = 0
    calls: int = 0


@dataclass(frozen=True)
class TensorMessages:
    """What the ranks of a tensor-parallel group exchange, as counts that depend on the model alone.

    widths: elements of each sum for a token, in forward and backward. repeated: by block, the widths of the sums that a
    recomputation of the block repeats. parameters: elements of the gradients of replicated parameters that are summed.
    loss_numbers: fp32 numbers of a token that the loss gathers; 0 if the head is not divided.
    """

    widths: tuple[int, ...] = ()
    repeated: tuple[tuple[int, ...], ...] = ()
    parameters: tuple[int, ...] = ()
    loss_numbers: int = 0

    @classmethod
    def of_plain(cls, data: Mapping[str, Any]) -> TensorMessages:
        repeated = tuple(tuple(block) for block in data["repeated"])
        return cls(tuple(data["widths"]), repeated, tuple(data["parameters"]), data["loss_numbers"])

    def plain(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return asdict(self)

    def sent(self, degree: int, tokens: int, recompute: RecomputeRule, itemsize: int) -> TensorSent:
        """Of one micro-batch with `tokens` tokens on a rank. itemsize: bytes of a number of the computation.

        A sum of n elements over k ranks sends 2 (k-1)/k n, and a gather of n elements of each rank (k-1) n.
        """
        if degree == 1:
            return TensorSent()
        sizes = [tokens * width for width in self.widths]
        sizes += [tokens * width for block in recompute.picks(self.repeated) for width in block]
        sizes += self.parameters
        summed = sum(2 * (degree - 1) * size // degree for size in sizes)
        gathered = (degree - 1) * self.loss_numbers * tokens
        calls = len(sizes) + bool(gathered)
        return TensorSent(summed + gathered, summed * itemsize + gathered * NUMBER_BYTES, calls)


def messages_in(config: RunConfig, messages: TensorMessages) -> TensorSent:
    """What a rank sends to its tensor-parallel group in one micro-batch of a resolved configuration."""
    mixed, tokens = config.precision.mixed, config.batch.micro * config.batch.seq
    return messages.sent(config.parallel.tp, tokens, config.recompute, ITEMSIZE_BYTES[mixed.compute or mixed.param])
