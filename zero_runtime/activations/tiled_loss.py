"""The cross entropy of a linear head, computed tile by tile over the tokens, so that the full logits never exist."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor


def tiled_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    *,
    tile: int,
    ignored: int = -100,
) -> torch.Tensor:
    """Sum of the token losses, 0-dim fp32, of logits = hidden @ weight.T + bias.

    hidden: [..., D]; weight: [V, D] and bias: [V] of its dtype; labels: int64 of hidden's shape without D, `ignored`
    for tokens that do not count. Logits are rounded to hidden's dtype and summed up in fp32, as without tiles; at most
    [tile, V] of them exist. Gradients of weight and bias are summed over tiles in fp32.
    """
    loss: torch.Tensor = _TiledCrossEntropy.apply(
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels.reshape(-1), tile, ignored
    )
    return loss


class _TiledCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        tile: int,
        ignored: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.tile, ctx.ignored = tile, ignored
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for part in tiles(hidden, tile):
            logits = F.linear(hidden[part], weight, bias).float()
            total += F.cross_entropy(logits, labels[part], ignore_index=ignored, reduction="sum")
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, labels = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        for part in tiles(hidden, ctx.tile):
            # Again, instead of gradients that forward has kept: the loss scale is in `grad`, and is applied before they
            # are rounded to 16 bits, as without tiles, at the cost of one more product with the weight.
            logits = F.linear(hidden[part], weight, bias).float()
            grad_logits = _grad_of_logits(logits, labels[part], ctx.ignored).mul_(grad).to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[part]
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0, dtype=torch.float32)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _grad_of_logits(logits: torch.Tensor, labels: torch.Tensor, ignored: int) -> torch.Tensor:
    """softmax(logits) - onehot(labels) in fp32, zero for tokens that do not count."""
    counts = labels != ignored
    found = torch.softmax(logits, dim=-1, dtype=torch.float32)
    found.scatter_add_(1, labels.where(counts, 0)[:, None], -counts[:, None].to(torch.float32))
    return found.mul_(counts[:, None])


def tiles(hidden: torch.Tensor, tile: int) -> Iterator[slice]:
    """The tiles of all tokens. On fake tensors, whose memory is traced, three of the full size stand for any number of
    them above one: each allocates and frees what the one before did."""
    count = hidden.shape[0]
    if isinstance(hidden, FakeTensor) and count > tile:
        yield from [slice(0, tile)] * 3
        return
    for start in range(0, count, tile):
        yield slice(start, min(start + tile, count))
