"""The messages of tensor and of sequence parallelism in a step, by the formulas of docs/parallel.md. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.config.schema import Batch, RunConfig
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

    widths: elements of each sum for a token, in forward and backward. parts: those of each gather of parts of hidden
    states, and of each sum to parts; empty if hidden states are whole. head: of them, that of the head's input which
    the gradient of its weight needs, unless the loss is tiled; 0 if there is none. repeated: by block, the widths of
    the sums, or with parts of their messages, that a recomputation of the block repeats. parameters: elements of the
    gradients of replicated parameters that are summed. loss_numbers: fp32 numbers of a token that the loss gathers; 0
    if the head is not divided. traded: by block, the widths of the messages between parts of sequences and heads for a
    token, in forward.
    """

    widths: tuple[int, ...] = ()
    repeated: tuple[tuple[int, ...], ...] = ()
    parameters: tuple[int, ...] = ()
    loss_numbers: int = 0
    traded: tuple[tuple[int, ...], ...] = ()
    parts: tuple[int, ...] = ()
    head: int = 0

    @classmethod
    def of_plain(cls, data: Mapping[str, Any]) -> TensorMessages:
        blocks = {name: tuple(tuple(block) for block in data[name]) for name in ("repeated", "traded")}
        return cls(**{**data, **{name: tuple(data[name]) for name in ("widths", "parameters", "parts")}, **blocks})

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

    def sent(self, degree: int, batch: Batch, recompute: RecomputeRule, itemsize: int, *, tiled: bool) -> TensorSent:
        """Of one micro-batch. itemsize: bytes of a number of the computation. tiled: the loss is.

        A sum of n elements over k ranks sends 2 (k-1)/k n, and a gather of n elements of each rank, or a sum to as many
        of each, (k-1) n. Parts are those of sequences that are padded to a multiple of k.
        """
        if degree == 1:
            return TensorSent()
        tokens, own_tokens = batch.micro * batch.seq, batch.micro * -(-batch.seq // degree)
        repeated = [width for block in recompute.picks(self.repeated) for width in block]
        parts = [*self.parts, *repeated] if self.parts else []
        if self.head and not tiled:
            parts.append(self.head)
        sizes = [tokens * width for width in (self.widths if parts else [*self.widths, *repeated])]
        sizes += self.parameters
        summed = sum(2 * (degree - 1) * size // degree for size in sizes)
        summed += sum((degree - 1) * own_tokens * width for width in parts)
        gathered = (degree - 1) * self.loss_numbers * tokens
        calls = len(sizes) + len(parts) + bool(gathered)
        return TensorSent(summed + gathered, summed * itemsize + gathered * NUMBER_BYTES, calls)


def messages_in(config: RunConfig, messages: TensorMessages) -> TensorSent:
    """What a rank sends to its group in one micro-batch of a resolved configuration."""
    mixed, batch = config.precision.mixed, config.batch
    itemsize = ITEMSIZE_BYTES[mixed.compute or mixed.param]
    if config.parallel.sp > 1:
        return messages.traded_parts(config.parallel.sp, batch.micro * batch.seq, config.recompute, itemsize)
    tiled = config.loss.tile_tokens is not None
    return messages.sent(config.parallel.tp, batch, config.recompute, itemsize, tiled=tiled)


def words(config: RunConfig, sent: TensorSent) -> str:
    """Such as "18 messages of parallel.tp": those of a micro-batch."""
    return f"{sent.calls} {'exchanges of parallel.sp' if config.parallel.sp > 1 else 'messages of parallel.tp'}"
