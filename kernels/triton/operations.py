"""Each operation of reference.py as a launch of a Triton kernel.

All tensors are contiguous, and no value is read on the host. The compiler must not fuse a multiplication with an
addition (UNFUSED), and divisions and roots are correctly rounded, so updates have the reference's bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

import triton
from zero_runtime.kernels import reference
from zero_runtime.kernels.block_formats import BLOCK_NUMEL, ZERO_CODE, blocks_of, code_lines, dynamic_codes
from zero_runtime.kernels.settings import AdamNumbers
from zero_runtime.kernels.triton import moments, streams, updates

BLOCK = 1024
MOMENT_ROWS, MOMENT_WARPS = 1, 1  # a block of 8-bit moments in one warp: its largest element needs no shared memory
FOLD_LEVELS = 11  # a program of the fold adds 2^11 numbers
GROUP = {"ROWS": reference.GROUP_NUMEL // reference.LANES, "LANES": reference.LANES}
UNFUSED = {"enable_fp_fusion": False}


def adamw_(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad_scale: torch.Tensor,
    numbers: Sequence[float],
    param_out: torch.Tensor | None = None,
) -> None:
    adam = AdamNumbers(*numbers)
    _launch_over(
        *(master, updates.adamw_kernel),
        *(master, grad, exp_avg, exp_avg_sq, grad_scale, _target(param_out, master), master.numel()),
        *adam,
        HAS_OUT=param_out is not None,
        FROM_END=adam.weight1 >= 0.5,
        L2=adam.l2 != 0,
    )


def adamw8bit_(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_scale: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    exp_avg_sq_scale: torch.Tensor,
    grad_scale: torch.Tensor,
    numbers: Sequence[float],
    param_out: torch.Tensor | None = None,
) -> None:
    blocks, adam = blocks_of(master.numel()), AdamNumbers(*numbers)
    _launch(
        *(moments.adamw8bit_kernel, (triton.cdiv(blocks, MOMENT_ROWS),)),
        *(master, grad, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale, grad_scale),
        *(_target(param_out, master), master.numel(), blocks, *_tables(master.device), *adam),
        HAS_OUT=param_out is not None,
        FROM_END=adam.weight1 >= 0.5,
        L2=adam.l2 != 0,
        ZERO=ZERO_CODE,
        SIGNED_LINES=code_lines(signed=True),
        UNSIGNED_LINES=code_lines(signed=False),
        ROWS=MOMENT_ROWS,
        PER=BLOCK_NUMEL,
        num_warps=MOMENT_WARPS,
    )


def sgd_(
    master: torch.Tensor,
    grad: torch.Tensor,
    momentum_buffer: torch.Tensor | None,
    grad_scale: torch.Tensor,
    numbers: Sequence[float],
    nesterov: bool,
    is_first: bool,
    param_out: torch.Tensor | None = None,
) -> None:
    _launch_over(
        *(master, updates.sgd_kernel),
        *(master, grad, _target(momentum_buffer, master), grad_scale, _target(param_out, master), master.numel()),
        *numbers,
        HAS_OUT=param_out is not None,
        KIND=0 if momentum_buffer is None else 1 if is_first else 2,
        NESTEROV=nesterov,
    )


def lion_(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    grad_scale: torch.Tensor,
    numbers: Sequence[float],
    param_out: torch.Tensor | None = None,
) -> None:
    _launch_over(
        *(master, updates.lion_kernel),
        *(master, grad, exp_avg, grad_scale, _target(param_out, master), master.numel()),
        *numbers,
        HAS_OUT=param_out is not None,
    )


def lamb_moments_(
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad_scale: torch.Tensor,
    numbers: Sequence[float],
) -> None:
    adam = AdamNumbers(*numbers)
    _launch_over(
        *(grad, updates.lamb_moments_kernel),
        *(grad, exp_avg, exp_avg_sq, grad_scale, grad.numel(), adam.weight1, adam.beta2, adam.weight2),
        FROM_END=adam.weight1 >= 0.5,
    )


def lamb_squares(
    master: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, numbers: Sequence[float]
) -> torch.Tensor:
    count = triton.cdiv(master.numel(), reference.GROUP_NUMEL)
    groups = _groups(2, count, master.device)
    squared = (master, exp_avg, exp_avg_sq, groups)
    _launch(updates.lamb_squares_kernel, (count,), *squared, master.numel(), count, *numbers[:-1], **GROUP)
    return folded(groups)


def lamb_(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    ratio: torch.Tensor,
    numbers: Sequence[float],
    param_out: torch.Tensor | None = None,
) -> None:
    _launch_over(
        *(master, updates.lamb_kernel),
        *(master, exp_avg, exp_avg_sq, ratio, _target(param_out, master), master.numel()),
        *numbers,
        HAS_OUT=param_out is not None,
    )


def accumulate_(target: torch.Tensor, values: torch.Tensor, scale: float) -> None:
    _launch_over(target, streams.accumulate_kernel, target, values, target.numel(), scale)


def cast_copy_(target: torch.Tensor, values: torch.Tensor) -> None:
    _launch_over(target, streams.cast_copy_kernel, target, values, target.numel())


def sum_of_squares(values: torch.Tensor) -> torch.Tensor:
    count = triton.cdiv(values.numel(), reference.GROUP_NUMEL)
    groups = _groups(1, count, values.device)
    _launch(streams.squares_kernel, (count,), values, groups, values.numel(), **GROUP)
    return folded(groups)[0]


def folded(groups: torch.Tensor) -> torch.Tensor:
    """reference.folded for [rows, n] fp64, with the same bits: [rows]. One launch for each FOLD_LEVELS halvings."""
    while groups.shape[1] > 1:
        rows, count = groups.shape
        columns = max(triton.next_power_of_2(count) >> FOLD_LEVELS, 1)
        sums = torch.empty(rows, columns, dtype=torch.float64, device=groups.device)
        _launch(streams.fold_kernel, (columns, rows), groups, sums, count, columns, LEVELS=FOLD_LEVELS)
        groups = sums
    return groups[:, 0]


def _groups(rows: int, count: int, device: torch.device) -> torch.Tensor:
    """[rows, count] fp64 for the sums of groups, which a kernel writes; one zero a row if there are no groups."""
    make = torch.empty if count else torch.zeros
    return make(rows, max(count, 1), dtype=torch.float64, device=device)


class _Tables(NamedTuple):
    """The values of the codes of both moments, and the borders halfway between them."""

    signed: torch.Tensor
    signed_borders: torch.Tensor
    unsigned: torch.Tensor
    unsigned_borders: torch.Tensor


@cache
def _tables(device: torch.device) -> _Tables:
    """The tables on a device, created once per process: creating them copies from the host and waits for the device."""
    tables = [dynamic_codes(device, signed=signed) for signed in (True, False)]
    signed, unsigned = ((table, (table[:-1] + table[1:]) / 2) for table in tables)
    return _Tables(*signed, *unsigned)


def _launch_over(tensor: torch.Tensor, kernel, *args, **constants) -> None:
    """Launch with one program per BLOCK elements of the tensor."""
    _launch(kernel, (triton.cdiv(tensor.numel(), BLOCK),), *args, BLOCK=BLOCK, **constants)


def _launch(kernel, grid: tuple[int, ...], *args, **constants) -> None:
    """Launch a grid of programs, if it has any, on the device of the first argument; no launch is made elsewhere.

    Triton launches on the current device and its stream, which need not be those of the arguments.
    """
    if all(grid):
        with torch.cuda.device_of(args[0]):
            kernel[grid](*args, **constants, **UNFUSED)


def _target(tensor: torch.Tensor | None, stand_in: torch.Tensor) -> torch.Tensor:
    """The tensor, or `stand_in` if it is None: a kernel needs some address for a tensor that it does not access."""
    return stand_in if tensor is None else tensor
