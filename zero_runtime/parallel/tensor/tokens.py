"""Hidden states between divided layers: in training each rank of a group holds those of its part of every sequence.

[Note: parts of tokens]
Norms, residuals, biases and block inputs treat each token alone, so each of k ranks keeps them for T/k consecutive
tokens (arXiv 2205.05198). The column layers of a module need all tokens: their input is gathered before the module, and
its gradient is summed to the parts. A row layer sums its result to the parts instead of to all ranks, and its gradient
is gathered. A gather and a sum to parts send together what a sum over all ranks sends. For the gradient of their
weights the column layers gather their input once more, so that no rank keeps it whole; see `_LinearOfWhole`.

What is before the first block and after the last norm is whole, as without parts: positions, masks and rotary angles
are those of all tokens. Sequences that k does not divide are padded with zeros, which no attention, loss or weight
reads. A forward without gradients (validation, generation) has no parts.

Parameters that are used by parts alone get a term of their gradient on each rank, which is summed over the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from zero_runtime.errors import PlanError
from zero_runtime.parallel.tensor.axis import TensorAxis
from zero_runtime.unit_planner import block_modules

# The norm behind the last block, beside the list of blocks, by `model_type`: architectures of which tests compare the
# loss and the gradients with those of one process.
FINAL_NORMS = {
    **dict.fromkeys(("gemma", "granite", "llama", "mistral", "qwen2", "qwen3", "smollm3"), "norm"),
    "gpt2": "ln_f",
    "gpt_neox": "final_layer_norm",
}


@dataclass(frozen=True)
class TokenPlan:
    """Paths of the first block, at which hidden states are divided, and of the norm behind which they are gathered.

    inside: paths of the blocks and of the norm, with a dot behind each.
    """

    first: str
    norm: str
    inside: tuple[str, ...]

    def summed(self, model: nn.Module, splits: Mapping[str, Any]) -> Iterator[str]:
        """Names of the parameters that are used by parts of tokens: all that are not slices, in blocks and the norm."""
        names = (name for name, _ in model.named_parameters() if name not in splits)
        return (name for name in names if name.startswith(self.inside))


def token_plan(model: nn.Module) -> TokenPlan | None:
    """Where hidden states are divided and gathered; None for a model whose structure is not known."""
    config = getattr(model, "config", None)
    norm = FINAL_NORMS.get(getattr(config, "model_type", ""))
    if norm is None or getattr(config, "add_cross_attention", False):
        return None
    paths = {id(module): path for path, module in model.named_modules()}
    blocks = [paths[id(block)] for block in block_modules(model)]
    owner = blocks[0].rpartition(".")[0].rpartition(".")[0]
    last = f"{owner}.{norm}" if owner else norm
    return TokenPlan(blocks[0], last, tuple(f"{path}." for path in (*blocks, last)))


class TokenParts:
    """The hidden states of the last training forward. `axis`: the group whose ranks hold the parts."""

    def __init__(self, axis: TensorAxis) -> None:
        self._axis = axis
        self._length = 0  # tokens of the sequences
        self._ended: tuple[torch.Tensor, torch.Tensor] | None = None  # whole and part, behind the last norm

    @property
    def held(self) -> bool:
        """Whether a layer that is called now reads and returns parts."""
        return self._length > 0 and torch.is_grad_enabled()

    def begin(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part [B, P/k, D] of hidden states [B, T, D], with P the next multiple of k; zeros behind T."""
        self._length, self._ended = whole.shape[1], None
        part: torch.Tensor = _ToPart.apply(whole, self._axis, own_part)
        return part

    def summed(self, terms: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sum of every rank's terms [B, T, D]."""
        part: torch.Tensor = _ToPart.apply(terms, self._axis, summed_part)
        return part

    def read(self, part: torch.Tensor, whole: torch.Tensor | None = None) -> Read:
        """The hidden states of all tokens, for layers of which this rank computes a term of their gradient.

        whole: what was gathered of them before.
        """
        expected = -(-self._length // self._axis.degree)
        if part.shape[1] != expected:
            raise PlanError(
                f"parallel.tp={self._axis.degree}: expected hidden states of {expected} of {self._length} tokens, "
                f"found {part.shape[1]}; call the blocks with sequences of one length until their backward has ended"
            )
        return Read(part, self._axis, self._length, whole)

    def end(self, part: torch.Tensor) -> torch.Tensor:
        """The hidden states of all tokens, [B, T, D], for any use: their gradient is the same on every rank."""
        whole: torch.Tensor = _Joined.apply(part, self._axis, self._length)
        self._ended = whole, part
        return whole

    def read_by_head(self, values: torch.Tensor) -> Read | None:
        """The input of the head, if it is what `end` has returned, or a view of all of it."""
        ended, self._ended = self._ended, None
        if ended is None or not self.held or not _is_same(values, ended[0]):
            return None
        return self.read(ended[1], values.detach())


def _is_same(values: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are views of all of the same elements."""
    bases = [one if one._base is None else one._base for one in (values, other)]
    return bases[0] is bases[1] and values.shape == other.shape and values.stride() == other.stride()


class Read:
    """The whole input of column layers, and this rank's part of it, which is kept for backward."""

    def __init__(self, part: torch.Tensor, axis: TensorAxis, length: int, whole: torch.Tensor | None) -> None:
        self.whole: torch.Tensor = _Whole.apply(part, whole, axis, length)
        self._part, self._again = part.detach(), _Again(axis, length)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """whole @ weight.T + bias. weight: [out, D]."""
        result: torch.Tensor = _LinearOfWhole.apply(self.whole, self._part, weight, bias, self._again)
        return result


class _Again:
    """The whole input in backward: gathered for the first layer that needs it, dropped after the last one."""

    def __init__(self, axis: TensorAxis, length: int) -> None:
        self._axis, self._length = axis, length
        self._readers = self._left = 0
        self._whole: torch.Tensor | None = None

    def expect(self) -> None:
        self._readers += 1
        self._left += 1

    def rows(self, part: torch.Tensor) -> torch.Tensor:
        """[tokens, D]; each layer that was expected calls it once in a backward."""
        whole = joined(part, self._axis, self._length) if self._whole is None else self._whole
        self._left -= 1
        self._whole = whole if self._left else None
        self._left = self._left or self._readers  # for another backward of the same graph
        return whole.flatten(0, -2)


def own_part(whole: torch.Tensor, axis: TensorAxis) -> torch.Tensor:
    """A copy of this rank's part of [B, T, D]."""
    return _padded(whole, axis.degree).chunk(axis.degree, dim=1)[axis.rank].clone(memory_format=torch.contiguous_format)


def joined(part: torch.Tensor, axis: TensorAxis, length: int) -> torch.Tensor:
    """[B, length, D] from the parts of all ranks."""
    every = axis.gather_parts(part.contiguous()).transpose(0, 1)
    return every.reshape(part.shape[0], -1, part.shape[2])[:, :length].contiguous()


def summed_part(terms: torch.Tensor, axis: TensorAxis) -> torch.Tensor:
    """This rank's part of the sum of every rank's [B, T, D]."""
    split = _padded(terms, axis.degree).unflatten(1, (axis.degree, -1)).transpose(0, 1).contiguous()
    return axis.sum_to_parts(split)


def _padded(values: torch.Tensor, degree: int) -> torch.Tensor:
    missing = -values.shape[1] % degree
    return F.pad(values, (0, 0, 0, missing)) if missing else values


Divide = Callable[[torch.Tensor, TensorAxis], torch.Tensor]


class _ToPart(torch.autograd.Function):
    """This rank's part of a tensor that all ranks have, or of the sum of their terms (`divide`: own_part, summed_part);
    in backward the parts of all ranks, since what is before has the same gradient on each."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, axis: TensorAxis, divide: Divide) -> torch.Tensor:
        ctx.axis, ctx.length = axis, whole.shape[1]
        return divide(whole, axis)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return joined(grad, ctx.axis, ctx.length), None, None


class _Joined(torch.autograd.Function):
    """The parts of all ranks; in backward this rank's part, since every rank has the full gradient."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, axis: TensorAxis, length: int) -> torch.Tensor:
        ctx.axis = axis
        return joined(part, axis, length)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return own_part(grad, ctx.axis), None, None


class _Whole(torch.autograd.Function):
    """The parts of all ranks, or `known`, which was gathered before; in backward the terms of all ranks are summed to
    the parts."""

    @staticmethod
    def forward(
        ctx: Any, part: torch.Tensor, known: torch.Tensor | None, axis: TensorAxis, length: int
    ) -> torch.Tensor:
        ctx.axis = axis
        return joined(part, axis, length) if known is None else known.view_as(known)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return summed_part(grad, ctx.axis), None, None, None


class _LinearOfWhole(torch.autograd.Function):
    """whole @ weight.T + bias; keeps `part` for backward, and gathers it there if the weight is trained."""

    @staticmethod
    def forward(
        ctx: Any,
        whole: torch.Tensor,
        part: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        again: _Again,
    ) -> torch.Tensor:
        is_trained = ctx.needs_input_grad[2]
        ctx.save_for_backward(weight, part if is_trained else None)
        ctx.again = again
        if is_trained:
            again.expect()
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, part = ctx.saved_tensors
        needs_whole, _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        grad_weight = rows.t() @ ctx.again.rows(part) if needs_weight else None
        return grad @ weight if needs_whole else None, None, grad_weight, rows.sum(0) if needs_bias else None, None
