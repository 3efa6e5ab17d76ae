"""Counts the work of each segment of a step while it is traced on fake tensors.

[Note: counted bytes]
An operation reads the tensors that it is given and writes those that it returns; an expanded tensor counts as the bytes
of its storage. A view moves nothing. An operation that fills a tensor reads nothing, and one that picks elements reads
as many as it returns. That is the traffic of kernels that run one after the other, each with memory of its own: what a
cache keeps between two of them is not subtracted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from zero_runtime.predict.memory.activation_count import Trace
from zero_runtime.predict.timing.segments import SegmentTable
from zero_runtime.predict.timing.work import Work

_aten = torch.ops.aten
_Formula = Callable[..., int]


class _Moves(Enum):
    """Which bytes an operation that is no product moves."""

    NOTHING = "nothing"
    RESULT = "result"  # it writes its result, and reads no tensor
    COPY = "copy"  # it writes its first argument, and reads the others
    PICKED = "picked"  # of its first argument it reads as much as it returns
    ALL = "all"


_NOTHING = (
    *("_unsafe_view", "_reshape_alias", "detach", "lift_fresh", "_local_scalar_dense", "record_stream"),
    "device",  # prim::device: a question that a fake tensor answers
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
)
_RESULT = (
    *("zeros", "zeros_like", "ones", "ones_like", "full", "full_like", "new_zeros", "new_ones", "new_full"),
    *("zero_", "fill_", "arange", "scalar_tensor"),
)
_PICKED = ("embedding", "index", "index_select", "gather", "nll_loss_forward")
_RULES = dict.fromkeys(_NOTHING, _Moves.NOTHING) | dict.fromkeys(_RESULT, _Moves.RESULT)
_RULES |= dict.fromkeys(_PICKED, _Moves.PICKED) | {"copy_": _Moves.COPY}

# The CPU's attention has the formulas of CUDA's, which torch lists.
_ATTENTION = "_scaled_dot_product"
_LISTED_AS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}


class WorkCounter:
    """Sums the work of operations by segment. An instance is `trace_step`'s `observe`."""

    def __init__(self) -> None:
        self._segments: dict[int, list[int]] = {}
        self._rules: dict[OpOverload, _Moves | _Formula] = {}

    def __call__(
        self, segment: int, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Add an operation that comes after so many marks."""
        rule = self._rules.get(func)
        if rule is None:
            rule = self._rules[func] = _rule_of(func)
        if rule is not _Moves.NOTHING:
            self._add(rule, segment, func, args, kwargs, result)

    def _add(
        self,
        rule: _Moves | _Formula,
        segment: int,
        func: OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> None:
        sums = self._segments.setdefault(segment, [0] * len(Work._fields))
        sums[4] += 1
        if isinstance(rule, _Moves):
            sums[3] += _moved(rule, args, kwargs, result)
            return
        product = _product(rule, func, args, kwargs, result)
        sums[product.is_attention] += product.flops
        sums[2] += _moved(_Moves.ALL, args, kwargs, result)

    def table(self, trace: Trace) -> SegmentTable[Work]:
        """The work of each segment of the trace."""
        marks = [(kind, unit) for _, kind, unit in trace.marks]
        none: list[int] = []
        return SegmentTable.of(marks, (Work(*self._segments.get(place, none)) for place in range(len(marks) + 1)))


class Product(NamedTuple):
    """A matrix product or an attention kernel: its operations, where a multiplication and an addition are two. A causal
    kernel counts half of the scores."""

    flops: int
    is_attention: bool


def product_of(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Product | None:
    """The operations of one call; None if it is neither a product nor attention."""
    rule = _rule_of(func)
    return None if isinstance(rule, _Moves) else _product(rule, func, args, kwargs, result)


def _product(
    formula: _Formula, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> Product:
    flops = formula(*args, **kwargs, out_val=result)
    is_attention = _ATTENTION in func.name()
    return Product(flops // 2 if is_attention and _is_causal(func, args, kwargs) else flops, is_attention)


def _rule_of(func: OpOverload) -> _Moves | _Formula:
    packet = func.overloadpacket
    formula: _Formula | None = flop_registry.get(_LISTED_AS.get(packet, packet))
    if formula is not None:
        return formula
    return _Moves.NOTHING if func.is_view else _RULES.get(packet.__name__, _Moves.ALL)


def _moved(rule: _Moves, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    written = _nbytes(result)
    if rule is _Moves.RESULT:
        return written
    first = 1 if rule in (_Moves.COPY, _Moves.PICKED) else 0
    read = _all_nbytes(args[first:]) + (_all_nbytes(kwargs.values()) if kwargs else 0)
    return written + read + (written if rule is _Moves.PICKED else 0)


def _all_nbytes(values: Iterable[Any]) -> int:
    return sum(_nbytes(value) for value in values)


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return min(value.nbytes, value.untyped_storage().nbytes())
    return _all_nbytes(value) if isinstance(value, (list, tuple)) else 0


def _is_causal(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    place = names.index("is_causal")
    return bool(args[place] if place < len(args) else kwargs.get("is_causal", False))
