"""Normalizations as CUDA computes them, on fake CPU tensors: what they keep for backward, in which dtype.

Both of CUDA's kernels keep their statistics in the dtype in which they sum: fp32 for 16-bit inputs (torch's
aten/src/ATen/native/cuda/layer_norm_kernel.cu: `layer_norm_cuda`, `_fused_rms_norm_cuda`). LayerNorm keeps its input, a
mean and a deviation for each row; RMSNorm its input and a deviation. A CPU keeps LayerNorm's in the input's dtype, and
composes RMSNorm of operations that keep several fp32 copies of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

SUMMED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # every other dtype: itself
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by number of dimensions


def cuda_layer_norm(output: torch.Tensor, *statistics: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The results of LayerNorm, whose statistics have CUDA's dtype."""
    return output, *(one.to(_summed_in(output)) for one in statistics)


class CudaRMSNorm(TorchFunctionMode):
    """Mode in which RMSNorm is one operation where CUDA has one kernel for it."""

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.rms_norm, torch.rms_norm):
            return _rms_norm(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _rms_norm(
    func: Callable[..., torch.Tensor],
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """As rms_norm_symint in torch's aten/src/ATen/native/layer_norm.cpp chooses."""
    is_fake = any(isinstance(one, FakeTensor) for one in (input, weight))
    is_one_dtype = weight is None or weight.dtype == input.dtype
    order = CHANNELS_LAST.get(input.dim())
    is_in_order = order is None or input.is_contiguous() or not input.is_contiguous(memory_format=order)
    if is_fake and is_one_dtype and is_in_order and not input.is_complex():
        result: torch.Tensor = _FusedRMSNorm.apply(input, len(normalized_shape), weight)
        return result
    return func(input, normalized_shape, weight, eps)


class _FusedRMSNorm(torch.autograd.Function):
    """The tensors of torch's _fused_rms_norm and its backward, as zeros. dims: how many of the last are normalized."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, dims: int, weight: torch.Tensor | None) -> torch.Tensor:
        rows = (*input.shape[: input.dim() - dims], *(1,) * dims)
        deviations = input.new_zeros(rows, dtype=_summed_in(input))
        ctx.save_for_backward(input, weight, deviations)
        return torch.zeros_like(input, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, torch.Tensor | None]:
        input, weight, _ = ctx.saved_tensors
        own, _, other = ctx.needs_input_grad
        # One operation in torch: both gradients exist before the input is released.
        of_input = torch.zeros_like(input, memory_format=torch.contiguous_format) if own else None
        return of_input, None, torch.zeros_like(weight) if other else None


def _summed_in(values: torch.Tensor) -> torch.dtype:
    return SUMMED_IN.get(values.dtype, values.dtype)
