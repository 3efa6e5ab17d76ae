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
from zero_runtime.kernels.block_formats import BLOCK_NUMEL, ZERO_CODE, blocks_of, dynamic_codes
from zero_runtime.kernels.settings import AdamNumbers
from zero_runtime.kernels.triton import moments, streams, updates

BLOCK = 1024
MOMENT_ROWS = 4  # blocks of 8-bit moments per program
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
    _over(master, updates.adamw_kernel)(
        *(master, grad, exp_avg, exp_avg_sq, grad_scale, _target(param_out, master), master.numel()),
        *adam,
        HAS_OUT=param_out is not None,
        FROM_END=adam.weight1 >= 0.5,
        L2=adam.l2 != 0,
        BLOCK=BLOCK,
        **UNFUSED,
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
    if not blocks:
        return
    moments.adamw8bit_kernel[(triton.cdiv(blocks, MOMENT_ROWS),)](
        *(master, grad, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale, grad_scale),
        *(_target(param_out, master), master.numel(), blocks, *_tables(master.device), *adam),
        HAS_OUT=param_out is not None,
        FROM_END=adam.weight1 >= 0.5,
        L2=adam.l2 != 0,
        ZERO=ZERO_CODE,
        ROWS=MOMENT_ROWS,
        PER=BLOCK_NUMEL,
        **UNFUSED,
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
    _over(master, updates.sgd_kernel)(
        *(master, grad, _target(momentum_buffer, master), grad_scale, _target(param_out, master), master.numel()),
        *numbers,
        HAS_OUT=param_out is not None,
        KIND=0 if momentum_buffer is None else 1 if is_first else 2,
        NESTEROV=nesterov,
        BLOCK=BLOCK,
        **UNFUSED,
    )


def lion_(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    grad_scale: torch.Tensor,
    numbers: Sequence[float],
    param_out: torch.Tensor | None = None,
) -> None:
    _over(master, updates.lion_kernel)(
        *(master, grad, exp_avg, grad_scale, _target(param_out, master), master.numel()),
        *numbers,
        HAS_OUT=param_out is not None,
        BLOCK=BLOCK,
        **UNFUSED,
    )


def lamb_moments_(
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad_scale: torch.Tensor,
    numbers: Sequence[float],
) -> None:
    adam = AdamNumbers(*numbers)
    _over(grad, updates.lamb_moments_kernel)(
        *(grad, exp_avg, exp_avg_sq, grad_scale, grad.numel(), adam.weight1, adam.beta2, adam.weight2),
        FROM_END=adam.weight1 >= 0.5,
        BLOCK=BLOCK,
        **UNFUSED,
    )


def lamb_squares(
    master: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, numbers: Sequence[float]
) -> torch.Tensor:
    count = -(-master.numel() // reference.GROUP_NUMEL)
    groups = torch.zeros(2, max(count, 1), dtype=torch.float64, device=master.device)
    if count:
        sizes = {"ROWS": reference.GROUP_NUMEL // reference.LANES, "LANES": reference.LANES, **UNFUSED}
        updates.lamb_squares_kernel[(count,)](
            master, exp_avg, exp_avg_sq, groups, master.numel(), count, *numbers[:-1], **sizes
        )
    return reference.folded(groups)


def lamb_(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    ratio: torch.Tensor,
    numbers: Sequence[float],
    param_out: torch.Tensor | None = None,
) -> None:
    _over(master, updates.lamb_kernel)(
        *(master, exp_avg, exp_avg_sq, ratio, _target(param_out, master), master.numel()),
        *numbers,
        HAS_OUT=param_out is not None,
        BLOCK=BLOCK,
        **UNFUSED,
    )


def accumulate_(target: torch.Tensor, values: torch.Tensor, scale: float) -> None:
    _over(target, streams.accumulate_kernel)(target, values, target.numel(), scale, BLOCK=BLOCK, **UNFUSED)


def cast_copy_(target: torch.Tensor, values: torch.Tensor) -> None:
    _over(target, streams.cast_copy_kernel)(target, values, target.numel(), BLOCK=BLOCK, **UNFUSED)


def sum_of_squares(values: torch.Tensor) -> torch.Tensor:
    count = -(-values.numel() // reference.GROUP_NUMEL)
    groups = torch.zeros(max(count, 1), dtype=torch.float64, device=values.device)
    rows = reference.GROUP_NUMEL // reference.LANES
    if count:
        streams.squares_kernel[(count,)](values, groups, values.numel(), ROWS=rows, LANES=reference.LANES, **UNFUSED)
    return reference.folded(groups)


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


def _over(tensor: torch.Tensor, kernel):
    """The kernel with one program per block of the tensor; for an empty tensor, a function that does nothing."""
    if tensor.numel() == 0:
        return lambda *_, **__: None
    return kernel[(triton.cdiv(tensor.numel(), BLOCK),)]


def _target(tensor: torch.Tensor | None, stand_in: torch.Tensor) -> torch.Tensor:
    """The tensor, or `stand_in` if it is None: a kernel needs some address for a tensor that it does not access."""
    return stand_in if tensor is None else tensor
