"""The cross entropy of logits that are divided over a tensor-parallel group by the vocabulary.

[Note: one message a loss]
Each rank sends three numbers of each token: the maximum of its logits, the sum of their exponentials relative to it,
and the label's logit if it holds it, else 0. Every rank combines them in rank order, so the loss has the same bits on
all of them. Backward sends nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from zero_runtime.errors import PlanError
from zero_runtime.parallel.tensor.axis import TensorAxis

NUMBERS_PER_TOKEN = 3


def vocabulary_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, axis: TensorAxis, *, vocabulary: int, ignored: int = -100
) -> torch.Tensor:
    """Sum of the token losses in fp32 over the labels that are not `ignored`: 0-dim, the same on every rank.

    logits: [..., rows], those of the rows of the vocabulary that this rank holds, padding included. labels: int64 of
    the same shape without the last dimension, in terms of the full vocabulary.
    """
    rows = -(-vocabulary // axis.degree)
    if logits.shape[-1] != rows:
        raise PlanError(
            f"vocabulary_cross_entropy: expected the {rows} rows of {vocabulary} logits that this rank holds, found "
            f"{logits.shape[-1]}; give the head's output as it is, of TensorParallel(gathers_logits=False)"
        )
    axis.batch.note(labels)
    loss: torch.Tensor = _VocabularyCrossEntropy.apply(
        logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), axis, vocabulary, ignored
    )
    return loss


def rows_here(axis: TensorAxis, rows: int, vocabulary: int) -> tuple[int, int]:
    """The first row of the vocabulary that this rank holds, and how many of its `rows` are not padding."""
    low = axis.rank * rows
    return low, min(max(vocabulary - low, 0), rows)


def labels_here(labels: torch.Tensor, low: int, valid: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether this rank holds each label, and its row there; 0 for others."""
    here = (labels >= low) & (labels < low + valid)
    return here, (labels - low).where(here, 0)


def numbers_of(own: torch.Tensor, labels: torch.Tensor, low: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The three numbers of each token, [3, tokens], and the exponentials relative to the first, [tokens, rows].

    own: fp32 logits of this rank's rows without padding.
    """
    valid = own.shape[1]
    lowest = torch.finfo(torch.float32).min  # of a rank that holds padding alone: its sum is zero
    largest = own.amax(1) if valid else own.new_full((len(own),), lowest)
    scores = (own - largest[:, None]).exp_()
    here, place = labels_here(labels, low, valid)
    target = own.gather(1, place[:, None])[:, 0].where(here, 0.0) if valid else torch.zeros_like(largest)
    return torch.stack([largest, scores.sum(1), target]), scores


def joined_losses(every: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sum of the losses of the tokens that count, 0-dim; and of each token the largest logit, and the sum of the
    exponentials relative to it.

    every: the numbers of all ranks, [degree, 3, tokens].
    """
    peak = every[:, 0].amax(0)
    total = torch.zeros_like(peak)
    for part in every:
        total = total + part[1] * (part[0] - peak).exp()
    return (total.log() + peak - every[:, 2].sum(0)).where(counts, 0.0).sum(), peak, total


class _VocabularyCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, axis: TensorAxis, vocabulary: int, ignored: int
    ) -> torch.Tensor:
        low, valid = rows_here(axis, logits.shape[1], vocabulary)
        numbers, scores = numbers_of(logits[:, :valid].float(), labels, low)
        losses, peak, total = joined_losses(axis.gather(numbers), labels != ignored)
        scores.mul_(((numbers[0] - peak).exp() / total)[:, None])
        here, place = labels_here(labels, low, valid)
        counts = labels != ignored
        ctx.save_for_backward(scores, place, here & counts, counts)
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return losses

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        shares, place, here, counts = ctx.saved_tensors
        found = shares * (counts * grad)[:, None]
        valid = found.shape[1]
        if valid:
            found.scatter_add_(1, place[:, None], -(here * grad)[:, None])
        result = found.to(ctx.dtype)
        if valid < ctx.shape[1]:
            result = torch.nn.functional.pad(result, (0, ctx.shape[1] - valid))
        return result, None, None, None, None
