"""Each operation of reference.py as a call of the compiled library, or of the reference for unsupported tensors.

The operations have the names, arguments and bits of the reference; they use torch's number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from functools import cache

import torch

from zero_runtime.kernels import reference
from zero_runtime.kernels.block_formats import dynamic_codes
from zero_runtime.kernels.cpu.build import load_library
from zero_runtime.kernels.settings import AdamNumbers

CODE_OF = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_Argument = ctypes._SimpleCData


@cache
def library() -> ctypes.CDLL:
    """The compiled library, loaded once per process. BuildError if it cannot be compiled or loaded."""
    loaded = load_library()
    loaded.zlab_checksum.restype = ctypes.c_uint32
    return loaded


def adamw_(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad_scale: torch.Tensor,
    numbers: Sequence[float],
    param_out: torch.Tensor | None = None,
) -> None:
    if not _takes(master, grad, param_out, exp_avg, exp_avg_sq, fp32=(grad_scale,)):
        reference.adamw_(master, grad, exp_avg, exp_avg_sq, grad_scale, numbers, param_out)
        return
    moments, scale = (*_typed(exp_avg), *_typed(exp_avg_sq)), _pointer(grad_scale)
    tensors = (*_typed(master), *_typed(grad), *moments, scale, *_typed(param_out))
    library().zlab_adamw(*tensors, *_extent(master), *_floats(numbers))


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
    states = (exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale)
    scales = (exp_avg_scale, exp_avg_sq_scale, grad_scale)
    if not _takes(master, grad, param_out, fp32=scales, bytes_=(exp_avg, exp_avg_sq)):
        reference.adamw8bit_(master, grad, *states, grad_scale, numbers, param_out)
        return
    tables = [dynamic_codes(master.device, signed=signed) for signed in (True, False)]
    rest = map(_pointer, (*states, *tables, grad_scale))
    tensors = (*_typed(master), *_typed(grad), *rest, *_typed(param_out))
    library().zlab_adamw8bit(*tensors, *_extent(master), *_floats(numbers))


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
    if not _takes(master, grad, param_out, momentum_buffer, fp32=(grad_scale,)):
        reference.sgd_(master, grad, momentum_buffer, grad_scale, numbers, nesterov, is_first, param_out)
        return
    kind = 0 if momentum_buffer is None else 1 if is_first else 2
    rest = (*_typed(momentum_buffer), _pointer(grad_scale))
    library().zlab_sgd(
        *(*_typed(master), *_typed(grad), *rest, *_typed(param_out), *_extent(master)),
        *(ctypes.c_int32(kind), ctypes.c_int32(nesterov), *_floats(numbers)),
    )


def lion_(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    grad_scale: torch.Tensor,
    numbers: Sequence[float],
    param_out: torch.Tensor | None = None,
) -> None:
    if not _takes(master, grad, param_out, exp_avg, fp32=(grad_scale,)):
        reference.lion_(master, grad, exp_avg, grad_scale, numbers, param_out)
        return
    rest = (*_typed(exp_avg), _pointer(grad_scale))
    tensors = (*_typed(master), *_typed(grad), *rest, *_typed(param_out))
    library().zlab_lion(*tensors, *_extent(master), *_floats(numbers))


def lamb_moments_(
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad_scale: torch.Tensor,
    numbers: Sequence[float],
) -> None:
    if not _takes(grad, fp32=(exp_avg, exp_avg_sq, grad_scale)):
        reference.lamb_moments_(grad, exp_avg, exp_avg_sq, grad_scale, numbers)
        return
    adam = AdamNumbers(*numbers)
    weights = (adam.weight1, adam.beta2, adam.weight2)
    tensors = (*_typed(grad), *map(_pointer, (exp_avg, exp_avg_sq, grad_scale)))
    library().zlab_lamb_moments(*tensors, *_extent(grad), *_floats(weights))


def lamb_squares(
    master: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, numbers: Sequence[float]
) -> torch.Tensor:
    if not _takes(master, fp32=(exp_avg, exp_avg_sq)):
        return reference.lamb_squares(master, exp_avg, exp_avg_sq, numbers)
    totals, groups = torch.empty(2, dtype=torch.float64), _group_sums(2 * master.numel() + reference.GROUP_NUMEL)
    tensors = (*_typed(master), *map(_pointer, (exp_avg, exp_avg_sq, groups, totals)))
    library().zlab_lamb_squares(*tensors, *_extent(master), *_floats(numbers[:-1]))
    return totals


def lamb_(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    ratio: torch.Tensor,
    numbers: Sequence[float],
    param_out: torch.Tensor | None = None,
) -> None:
    if not _takes(master, param_out, fp32=(exp_avg, exp_avg_sq, ratio)):
        reference.lamb_(master, exp_avg, exp_avg_sq, ratio, numbers, param_out)
        return
    tensors = (*_typed(master), *map(_pointer, (exp_avg, exp_avg_sq, ratio)), *_typed(param_out))
    library().zlab_lamb(*tensors, *_extent(master), *_floats(numbers))


def accumulate_(target: torch.Tensor, values: torch.Tensor, scale: float) -> None:
    if not _takes(target, values):
        reference.accumulate_(target, values, scale)
        return
    library().zlab_accumulate(*_typed(target), *_typed(values), *_extent(target), ctypes.c_float(scale))


def cast_copy_(target: torch.Tensor, values: torch.Tensor) -> None:
    if not _takes(target, values):
        reference.cast_copy_(target, values)
        return
    library().zlab_cast_copy(*_typed(target), *_typed(values), *_extent(target))


def sum_of_squares(values: torch.Tensor) -> torch.Tensor:
    if not _takes(values):
        return reference.sum_of_squares(values)
    total, groups = torch.empty((), dtype=torch.float64), _group_sums(values.numel())
    library().zlab_sum_of_squares(*_typed(values), _pointer(groups), _pointer(total), *_extent(values))
    return total


def has_checksum() -> bool:
    """Whether this processor has the instruction that `checksum` needs."""
    return bool(library().zlab_has_checksum())


def checksum(data: torch.Tensor) -> int:
    """See checksum.py; call it only if `has_checksum()`."""
    assert data.is_contiguous()
    return int(library().zlab_checksum(_pointer(data), ctypes.c_int64(data.nbytes)))


def _takes(
    *wide: torch.Tensor | None, fp32: tuple[torch.Tensor, ...] = (), bytes_: tuple[torch.Tensor, ...] = ()
) -> bool:
    """Whether the library supports these tensors: all contiguous, `wide` in a dtype of CODE_OF, `fp32` in fp32, and
    `bytes_` with one byte per element."""
    given = [tensor for tensor in wide if tensor is not None]
    return (
        all(tensor.is_contiguous() for tensor in (*given, *fp32, *bytes_))
        and all(tensor.dtype in CODE_OF for tensor in given)
        and all(tensor.dtype == torch.float32 for tensor in fp32)
        and all(tensor.element_size() == 1 for tensor in bytes_)
    )


def _pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _typed(tensor: torch.Tensor | None) -> tuple[_Argument, _Argument]:
    return _pointer(tensor), ctypes.c_int32(0 if tensor is None else CODE_OF[tensor.dtype])


def _extent(tensor: torch.Tensor) -> tuple[_Argument, _Argument]:
    return ctypes.c_int64(tensor.numel()), ctypes.c_int64(torch.get_num_threads())


def _group_sums(numel: int) -> torch.Tensor:
    return torch.empty(-(-numel // reference.GROUP_NUMEL) + 1, dtype=torch.float64)


def _floats(numbers: Iterable[float]) -> tuple[_Argument, ...]:
    return tuple(map(ctypes.c_float, numbers))
