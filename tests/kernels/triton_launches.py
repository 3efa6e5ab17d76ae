"""Calls of the Triton operations that cover the variants which the runtime launches: each kernel with all its
constants, and with each layout of the tensors. The dtypes alternate, so each kernel gets all of them over the list.

The tensors are on the meta device: they have dtypes, lengths and (as offsets from 0) addresses, and no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import NamedTuple

import torch

from zero_runtime.kernels.block_formats import BLOCK_NUMEL, blocks_of
from zero_runtime.kernels.settings import Adam, AdamW, Lamb, Lion, Sgd

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


class Layout(NamedTuple):
    """`offset` elements from a 16-byte boundary begin tensors of `numel` elements."""

    name: str
    numel: int
    offset: int

    @property
    def is_aligned(self) -> bool:
        """Addresses at 16 bytes and a length that is a multiple of 16, so that accesses may be vectors."""
        return self.offset == 0 and self.numel % 16 == 0


class Dtypes(NamedTuple):
    """Of the master, of the gradient and of the rounded copy that an update writes (None: no copy)."""

    master: torch.dtype
    grad: torch.dtype
    out: torch.dtype | None


class Launch(NamedTuple):
    """One call of an operation. `reads`, `writes`: the tensors of one element per element of the layout."""

    operation: str
    variant: str
    layout: Layout
    call: Callable[[object], object]
    reads: tuple[torch.Tensor, ...]
    writes: tuple[torch.Tensor, ...]

    def __str__(self) -> str:
        dtypes = ", ".join(str(tensor.dtype).removeprefix("torch.") for tensor in (*self.reads, *self.writes))
        return f"{self.operation} {self.variant} of {dtypes}, {self.layout.name}"


# Shards begin at 64 bytes and are multiples of 32 elements; a run of a parameter group is any part of one. All have
# several groups of 16,384 elements, whose sums the norm folds.
LAYOUTS = (Layout("aligned", 65536, 0), Layout("ragged", 65337, 0), Layout("unaligned", 65337, 3))
HUGE = Layout("more than 2^31 elements", 2**31 + 4096, 0)
# fp32; bf16 and fp16 with gradients reduced in fp32 or not; bf16 without a master.
DTYPES = (
    Dtypes(F32, F32, None),
    Dtypes(F32, F32, BF16),
    Dtypes(F32, BF16, BF16),
    Dtypes(F32, F32, F16),
    Dtypes(F32, F16, F16),
    Dtypes(BF16, BF16, None),
)
ADAM = {
    "adamw": AdamW(1e-2, 0.9, 0.95, 1e-8, 0.1, 3),
    "adam": Adam(1e-2, 0.9, 0.95, 1e-8, 0.1, 3),
    "adam from the end": Adam(1e-2, 0.4, 0.95, 1e-8, 0.0, 1),
}
SGD = {
    "first": Sgd(1e-2, 0.9, 0.1, 0.1, False, 1),
    "later": Sgd(1e-2, 0.9, 0.1, 0.1, False, 2),
    "plain": Sgd(1e-2, 0.0, 0.0, 0.1, False, 2),
    "nesterov": Sgd(1e-2, 0.9, 0.0, 0.1, True, 2),
}
LION = Lion(1e-2, 0.9, 0.98, 0.1)
LAMB = {"lamb": Lamb(1e-2, 0.9, 0.95, 1e-6, 0.1, 3), "lamb from the end": Lamb(1e-2, 0.4, 0.95, 1e-6, 0.1, 1)}


def of(layout: Layout, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(layout.numel + layout.offset, dtype=dtype, device="meta")[layout.offset :]


def launches(layouts: tuple[Layout, ...] = LAYOUTS, dtypes: tuple[Dtypes, ...] = DTYPES) -> Iterator[Launch]:
    turn = count()
    for layout in layouts:
        for part in (_adam, _sgd, _lion, _lamb, _adamw8bit):
            yield from part(layout, dtypes, turn)
        yield from _streams(layout, dtypes)


def _scalar() -> torch.Tensor:
    return torch.empty((), device="meta")


def _next(dtypes: tuple[Dtypes, ...], turn: Iterator[int]) -> Dtypes:
    return dtypes[next(turn) % len(dtypes)]


def _tensors(layout: Layout, chosen: Dtypes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    out = None if chosen.out is None else of(layout, chosen.out)
    return of(layout, chosen.master), of(layout, chosen.grad), out


def _given(*tensors: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    return tuple(tensor for tensor in tensors if tensor is not None)


def _adam(layout: Layout, dtypes: tuple[Dtypes, ...], turn: Iterator[int]) -> Iterator[Launch]:
    for name, settings in ADAM.items():
        master, grad, out = _tensors(layout, _next(dtypes, turn))
        first, second = of(layout, F32), of(layout, F32)
        arguments = (master, grad, first, second, _scalar(), settings.numbers, out)
        yield Launch(
            "adamw_",
            name,
            layout,
            lambda which, arguments=arguments: which.adamw_(*arguments),
            (master, grad, first, second),
            _given(master, first, second, out),
        )


def _sgd(layout: Layout, dtypes: tuple[Dtypes, ...], turn: Iterator[int]) -> Iterator[Launch]:
    for name, settings in SGD.items():
        master, grad, out = _tensors(layout, _next(dtypes, turn))
        momentum = None if name == "plain" else of(layout, F32)
        arguments = (master, grad, momentum, _scalar(), settings.numbers, settings.nesterov, settings.is_first, out)
        yield Launch(
            "sgd_",
            name,
            layout,
            lambda which, arguments=arguments: which.sgd_(*arguments),
            _given(master, grad, None if settings.is_first else momentum),
            _given(master, momentum, out),
        )


def _lion(layout: Layout, dtypes: tuple[Dtypes, ...], turn: Iterator[int]) -> Iterator[Launch]:
    master, grad, out = _tensors(layout, _next(dtypes, turn))
    first = of(layout, F32)
    arguments = (master, grad, first, _scalar(), LION.numbers, out)
    yield Launch(
        "lion_",
        "lion",
        layout,
        lambda which: which.lion_(*arguments),
        (master, grad, first),
        _given(master, first, out),
    )


def _lamb(layout: Layout, dtypes: tuple[Dtypes, ...], turn: Iterator[int]) -> Iterator[Launch]:
    for name, settings in LAMB.items():
        master, grad, out = _tensors(layout, _next(dtypes, turn))
        states = (of(layout, F32), of(layout, F32))
        moments = (grad, *states, _scalar(), settings.numbers)
        yield Launch(
            "lamb_moments_",
            name,
            layout,
            lambda which, moments=moments: which.lamb_moments_(*moments),
            (grad, *states),
            states,
        )
        if name != "lamb":
            continue  # the other two parts have no such variant
        arguments = (master, *states, _scalar(), settings.lamb_numbers, out)
        yield Launch(
            "lamb_",
            name,
            layout,
            lambda which, arguments=arguments: which.lamb_(*arguments),
            (master, *states),
            _given(master, out),
        )
        squares = (master, *states, settings.lamb_numbers)
        yield Launch(
            "lamb_squares",
            name,
            layout,
            lambda which, squares=squares: which.lamb_squares(*squares),
            (master, *states),
            (),
        )


def _adamw8bit(layout: Layout, dtypes: tuple[Dtypes, ...], turn: Iterator[int]) -> Iterator[Launch]:
    """In the runtime all tensors begin at blocks of 256 elements, so they are aligned; the last one may be ragged."""
    if layout.offset % BLOCK_NUMEL:
        return
    for name, settings in ADAM.items():
        if name == "adam":
            continue
        master, grad, out = _tensors(layout, _next(dtypes, turn))
        codes = (of(layout, torch.uint8), of(layout, torch.uint8))
        scales = (
            torch.empty(blocks_of(layout.numel), device="meta"),
            torch.empty(blocks_of(layout.numel), device="meta"),
        )
        states = (codes[0], scales[0], codes[1], scales[1])
        arguments = (master, grad, *states, _scalar(), settings.numbers, out)
        yield Launch(
            "adamw8bit_",
            name,
            layout,
            lambda which, arguments=arguments: which.adamw8bit_(*arguments),
            (master, grad, *codes),
            _given(master, *codes, out),
        )


def _streams(layout: Layout, dtypes: tuple[Dtypes, ...]) -> Iterator[Launch]:
    pairs = dict.fromkeys((chosen.master, chosen.grad) for chosen in dtypes)
    for target_dtype, values_dtype in pairs:
        target, values = of(layout, target_dtype), of(layout, values_dtype)
        yield Launch(
            "accumulate_",
            "sum",
            layout,
            lambda which, both=(target, values): which.accumulate_(*both, 0.5),
            (target, values),
            (target,),
        )
    for copy in dict.fromkeys(chosen.out for chosen in dtypes if chosen.out is not None):
        target, values = of(layout, copy), of(layout, F32)
        yield Launch(
            "cast_copy_",
            "copy",
            layout,
            lambda which, both=(target, values): which.cast_copy_(*both),
            (values,),
            (target,),
        )
    for dtype in dict.fromkeys(chosen.grad for chosen in dtypes):
        values = of(layout, dtype)
        yield Launch(
            "sum_of_squares",
            "squares",
            layout,
            lambda which, values=values: which.sum_of_squares(values),
            (values,),
            (),
        )
