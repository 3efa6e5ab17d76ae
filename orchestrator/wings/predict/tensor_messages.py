"""The messages of tensor and of sequence parallelism in a step, by the formulas of docs/parallel.md. Pure."""

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
    """What the ranks of a tensor- or sequence-parallel group exchange, as counts that depend on model and degree.

    widths: elements of each sum for a token, in forward and backward. repeated: by block, the widths of the sums that a
    recomputation of the block repeats. parameters: elements of the gradients of replicated parameters that are summed.
    loss_numbers: fp32 numbers of a token that the loss gathers; 0 if the head is not divided. traded: by block, the
    widths of the messages between parts of sequences and heads for a token, in forward.
    """

    widths: tuple[int, ...] = ()
    repeated: tuple[tuple[int, ...], ...] = ()
    parameters: tuple[int, ...] = ()
    loss_numbers: int = 0
    traded: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of_plain(cls, data: Mapping[str, Any]) -> TensorMessages:
        repeated, traded = (tuple(tuple(block) for block in data[name]) for name in ("repeated", "traded"))
        return cls(tuple(data["widths"]), repeated, tuple(data["parameters"]), data["loss_numbers"], traded)

    def plain(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return asdict(self)

    def traded_parts(self, degree: int, tokens: int, recompute: RecomputeRule, itemsize: int) -> TensorSent:
        """Of one micro-batch with sequences of `tokens` tokens in parts, in forward, recomputation and backward.

        An exchange of n elements between k ranks sends (k-1)/k n.
        """
        blocks = [*self.traded, *self.traded, *recompute.picks(self.traded)]
        sizes = [tokens // degree * width for block in blocks for width in block]
        elements = sum((degree - 1) * size // degree for size in sizes)
        return TensorSent(elements, elements * itemsize, len(sizes))

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
    """What a rank sends to its group in one micro-batch of a resolved configuration."""
    mixed, tokens = config.precision.mixed, config.batch.micro * config.batch.seq
    itemsize = ITEMSIZE_BYTES[mixed.compute or mixed.param]
    if config.parallel.sp > 1:
        return messages.traded_parts(config.parallel.sp, tokens, config.recompute, itemsize)
    return messages.sent(config.parallel.tp, tokens, config.recompute, itemsize)


def words(config: RunConfig, sent: TensorSent) -> str:
    """Such as "18 sums of parallel.tp": the messages of a micro-batch."""
    return f"{sent.calls} {'exchanges of parallel.sp' if config.parallel.sp > 1 else 'sums of parallel.tp'}"
