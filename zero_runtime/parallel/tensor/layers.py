"""Forwards of divided layers: column and row linear layers, and an embedding and a head divided by the vocabulary.

[Note: divided layers]
A column layer holds some of the outputs, a row layer the inputs that belong to them; what is between the two (an
activation, some attention heads) is computed by one rank alone. The row layer sums the partial results over the group
in forward; the input of the column layers sums its gradient over the group in backward. So a pair costs two sums of the
size of the hidden states, and everything outside of the pairs has the same values on every rank. In training of a model
whose structure is known, the ranks hold parts of the tokens outside of the pairs: see [Note: parts of tokens].

Forwards are installed on the instances, where module.__call__ looks first. The classes stay as they are, for the units,
for initial values and for the loss.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from zero_runtime.parallel.tensor.axis import TensorAxis
from zero_runtime.parallel.tensor.cross_entropy import vocabulary_cross_entropy
from zero_runtime.parallel.tensor.tiled_cross_entropy import tiled_vocabulary_cross_entropy
from zero_runtime.parallel.tensor.tokens import Read, TokenParts


class _SumOfGradients(torch.autograd.Function):
    """The identity; in backward the gradient is summed over the group."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, axis: TensorAxis) -> torch.Tensor:
        ctx.axis = axis
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        # A copy: autograd may hand the same gradient to other functions.
        return ctx.axis.sum_(grad.clone(memory_format=torch.contiguous_format)), None


class _Sum(torch.autograd.Function):
    """The sum over the group; in backward the identity, since every rank has the full gradient."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, axis: TensorAxis) -> torch.Tensor:
        # A copy: a recomputation by operation may keep the product that the sum starts from.
        return axis.sum_(values.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    """The slices of all ranks next to each other in the last dimension, without padding; in backward the own slice."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, axis: TensorAxis, size: int) -> torch.Tensor:
        ctx.axis, ctx.own = axis, values.shape[-1]
        return torch.cat(axis.gather(values.contiguous()).unbind(0), dim=-1)[..., :size].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        missing = ctx.own * ctx.axis.degree - grad.shape[-1]
        return F.pad(grad, (0, missing)).chunk(ctx.axis.degree, dim=-1)[ctx.axis.rank].contiguous(), None, None


class ColumnInput:
    """The input of the column layers of one module, whose gradient is summed over the group once for all of them.

    tokens: the hidden states of which the ranks hold parts; None if the model is not known.
    """

    def __init__(self, axis: TensorAxis, tokens: TokenParts | None = None) -> None:
        self._axis, self._tokens = axis, tokens
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None
        self._read: Read | None = None

    def begin(self, part: torch.Tensor) -> torch.Tensor:
        """The hidden states of all tokens, for a module that is about to be called with this rank's part of them."""
        assert self._tokens is not None
        self._read = self._tokens.read(part)
        return self._read.whole

    def linear(self, module: nn.Module, values: torch.Tensor) -> torch.Tensor:
        """The product of a column layer; `values`: the same tensor for all layers that share their input."""
        weight, bias = weight_of(module), module.bias
        assert bias is None or isinstance(bias, torch.Tensor)
        if self._read is None:
            return F.linear(self._summed(values), weight, bias)
        # A tensor that was made from the input has a path to it in the graph, where the gradient is summed.
        return self._read.linear(weight, bias) if values is self._read.whole else F.linear(values, weight, bias)

    def _summed(self, values: torch.Tensor) -> torch.Tensor:
        if not values.requires_grad:
            return values
        if self._last is None or self._last[0] is not values:
            self._last = values, _SumOfGradients.apply(values, self._axis)
        return self._last[1]

    def end(self) -> None:
        """Drop the input. The row layer of the module calls it first, which runs after all column layers: a
        recomputation ends as soon as that layer has computed its product."""
        self._last = self._read = None

    def sum_of(self, terms: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's terms of the row layer: all of it, or this rank's part of the tokens."""
        if self._tokens is not None and self._tokens.held:
            return self._tokens.summed(terms)
        total: torch.Tensor = _Sum.apply(terms, self._axis)
        return total


def weight_of(module: nn.Module) -> torch.Tensor:
    """The weight [out, in] of an nn.Linear, or of a Conv1D of transformers, which has it transposed."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight if isinstance(module, nn.Linear) else weight.t()


class ColumnForward:
    """The forward of a linear layer that holds some of the outputs, or of one that such a layer follows: [..., in] to
    [..., own out]."""

    def __init__(self, module: nn.Module, shared: ColumnInput) -> None:
        self._module, self._shared = module, shared

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return self._shared.linear(self._module, values)


class RowForward:
    """The forward of a linear layer that holds some of the inputs: [..., own in] to [..., out], the same on all ranks,
    or this rank's part of the tokens.

    The bias is replicated and is added once, after the sum.
    """

    def __init__(self, module: nn.Module, shared: ColumnInput) -> None:
        self._module, self._shared = module, shared

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        self._shared.end()
        total = self._shared.sum_of(F.linear(values, weight_of(self._module)))
        bias = self._module.bias
        if bias is None:
            return total
        assert isinstance(bias, torch.Tensor)
        return total + bias


class EmbeddingForward:
    """The forward of an embedding that holds some rows of the vocabulary: ids [...] to [..., width].

    Each row is held by one rank and the others add zeros, so the sum is exact.
    """

    def __init__(self, module: nn.Embedding, axis: TensorAxis) -> None:
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise NotImplementedError("max_norm, scale_grad_by_freq and sparse embeddings cannot be divided")
        self._module, self._axis = module, axis

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        self._axis.batch.note(ids)
        weight, rows = self._module.weight, self._module.weight.shape[0]
        low = self._axis.rank * rows
        own = (ids >= low) & (ids < low + rows)
        padding = self._module.padding_idx  # its row gets no gradient
        inside = padding is not None and low <= padding < low + rows
        found = F.embedding(
            (ids - low).where(own, 0), weight, padding - low if padding is not None and inside else None
        )
        total: torch.Tensor = _Sum.apply(found.masked_fill(~own[..., None], 0.0), self._axis)
        return total


class HeadForward:
    """The forward of an output head that holds some rows of the vocabulary: [..., in] to logits.

    gathers: return the logits of all ranks, [..., vocabulary], for any loss; else this rank's own, padding included,
    for `vocabulary_cross_entropy`.
    """

    def __init__(
        self, module: nn.Linear, axis: TensorAxis, vocabulary: int, *, gathers: bool, tokens: TokenParts | None = None
    ) -> None:
        self.axis, self.vocabulary, self.gathers = axis, vocabulary, gathers
        self._module, self._tokens = module, tokens

    def _read(self, values: torch.Tensor) -> Read | None:
        return None if self._tokens is None else self._tokens.read_by_head(values)

    def _summed(self, values: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _SumOfGradients.apply(values, self.axis) if values.requires_grad else values
        return found

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        read, module = self._read(values), self._module
        if read is None:
            logits = F.linear(self._summed(values), module.weight, module.bias)
        else:
            logits = read.linear(module.weight, module.bias)
        return _Gather.apply(logits, self.axis, self.vocabulary) if self.gathers else logits

    def loss(self, logits: torch.Tensor, labels: torch.Tensor, *, ignored: int) -> torch.Tensor:
        """`vocabulary_cross_entropy` of this rank's own logits."""
        return vocabulary_cross_entropy(logits, labels, self.axis, vocabulary=self.vocabulary, ignored=ignored)

    def tiled_loss(self, hidden: torch.Tensor, labels: torch.Tensor, *, tile: int, ignored: int) -> torch.Tensor:
        """The same loss of the head's input, with the logits of at most `tile` tokens at a time."""
        read, module = self._read(hidden), self._module
        hidden = self._summed(hidden) if read is None else read.whole
        settings = {"vocabulary": self.vocabulary, "tile": tile, "ignored": ignored}
        return tiled_vocabulary_cross_entropy(hidden, module.weight, module.bias, labels, self.axis, **settings)
