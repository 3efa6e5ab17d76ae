"""The tiled cross entropy of a head that a tensor-parallel group divides by the vocabulary.

As tiled_loss.py, with the messages of parallel/tensor/cross_entropy.py: forward finds three numbers of each token,
which are gathered once for all tiles, and backward computes each tile's logits again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from zero_runtime.activations.tiled_loss import head_gradients, tiles
from zero_runtime.parallel.tensor.axis import TensorAxis
from zero_runtime.parallel.tensor.cross_entropy import joined_losses, labels_here, numbers_of, rows_here


def tiled_vocabulary_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    axis: TensorAxis,
    *,
    vocabulary: int,
    tile: int,
    ignored: int = -100,
) -> torch.Tensor:
    """Sum of the token losses in fp32: 0-dim, the same on every rank of the group.

    hidden: [..., D], whose gradient is this rank's term of a sum over the group. weight: [rows, D] and bias: [rows],
    those of the vocabulary that this rank holds, padding included. labels: int64 of hidden's shape without D, in terms
    of the full vocabulary, `ignored` for tokens that do not count. At most [tile, rows] logits exist.
    """
    axis.batch.note(labels)
    loss: torch.Tensor = _TiledVocabularyCrossEntropy.apply(
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels.reshape(-1), axis, vocabulary, tile, ignored
    )
    return loss


class _TiledVocabularyCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        axis: TensorAxis,
        vocabulary: int,
        tile: int,
        ignored: int,
    ) -> torch.Tensor:
        low, valid = rows_here(axis, weight.shape[0], vocabulary)
        numbers = torch.empty((3, len(labels)), dtype=torch.float32, device=hidden.device)
        for part in tiles(hidden, tile):
            numbers[:, part] = numbers_of(_logits(hidden[part], weight, bias, valid), labels[part], low)[0]
        loss, peak, total = joined_losses(axis.gather(numbers), labels != ignored)
        ctx.save_for_backward(hidden, weight, bias, labels, peak, total)
        ctx.low, ctx.valid, ctx.tile, ctx.ignored = low, valid, tile, ignored
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, labels, peak, total = ctx.saved_tensors

        def parts() -> Iterator[tuple[slice, torch.Tensor]]:
            for part in tiles(hidden, ctx.tile):
                found = _logits(hidden[part], weight, bias, ctx.valid).sub_(peak[part, None])
                found.exp_().div_(total[part, None])
                counts = labels[part] != ctx.ignored
                here, place = labels_here(labels[part], ctx.low, ctx.valid)
                if ctx.valid:
                    found.scatter_add_(1, place[:, None], -here[:, None].to(torch.float32))
                yield part, found.mul_((counts * grad)[:, None]).to(hidden.dtype)

        return (*head_gradients(ctx.needs_input_grad, (hidden, weight, bias), parts()), *(None,) * 5)


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, valid: int) -> torch.Tensor:
    """[tokens, valid] fp32, rounded to the dtype of `hidden` first."""
    logits = F.linear(hidden, weight[:valid], None if bias is None else bias[:valid])
    return logits.to(torch.float32, copy=True)
