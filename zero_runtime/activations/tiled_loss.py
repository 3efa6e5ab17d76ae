"""The cross entropy of a linear head, computed tile by tile over the tokens, so that the full logits never exist."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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

        def parts() -> Iterator[tuple[slice, torch.Tensor]]:
            # Again, instead of gradients that forward has kept: the loss scale is in `grad`, and is applied before they
            # are rounded to 16 bits, as without tiles, at the cost of one more product with the weight.
            for part in tiles(hidden, ctx.tile):
                logits = F.linear(hidden[part], weight, bias).float()
                yield part, _grad_of_logits(logits, labels[part], ctx.ignored).mul_(grad).to(hidden.dtype)

        return (*head_gradients(ctx.needs_input_grad, (hidden, weight, bias), parts()), None, None, None)


def head_gradients(
    needs: Sequence[bool],
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    parts: Iterable[tuple[slice, torch.Tensor]],
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of a linear head's inputs, in their dtypes; those of weight and bias are summed in fp32.

    needs: which of the three are wanted, and maybe more. inputs: hidden [tokens, D], weight [V, D] and bias [V]. parts:
    the tokens of each tile, and the gradients of its logits, [tokens, rows], of the first rows of the weight.
    """
    hidden, weight, bias = inputs
    of_hidden = torch.empty_like(hidden) if needs[0] else None
    of_weight = torch.zeros_like(weight, dtype=torch.float32) if needs[1] else None
    of_bias = None if bias is None or not needs[2] else torch.zeros_like(bias, dtype=torch.float32)
    for part, grad_logits in parts:
        rows = grad_logits.shape[1]
        if of_hidden is not None:
            torch.mm(grad_logits, weight[:rows], out=of_hidden[part])
        if of_weight is not None:
            of_weight[:rows] += grad_logits.T @ hidden[part]
        if of_bias is not None:
            of_bias[:rows] += grad_logits.sum(0, dtype=torch.float32)
    return (of_hidden, *(None if one is None else one.to(weight.dtype) for one in (of_weight, of_bias)))


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
    for start in [0] * 3 if isinstance(hidden, FakeTensor) and count > tile else range(0, count, tile):
        yield slice(start, min(start + tile, count))
