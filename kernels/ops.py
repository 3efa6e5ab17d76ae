"""The functions that call the operations: they check lengths and devices and compute the numbers of a step.

reference.py specifies what each operation computes. torch's dispatcher runs the implementation for the tensors' device,
which is the reference until `prepare` has registered compiled kernels (registration.py). All tensors are flat, on one
device and, unless stated otherwise, of one length n; `float` stands for fp32, bf16 or fp16. Operations whose name ends
in `_` write into their arguments and return nothing. No operation reads a tensor's value on the host. ValueError if a
length or a device is wrong: implementations use addresses, and would access a short tensor past its end.
"""

from __future__ import annotations

import torch

from zero_runtime.kernels.block_formats import blocks_of
from zero_runtime.kernels.registration import prepare as prepare  # the import declares the operations
from zero_runtime.kernels.settings import AdamW, Lamb, Lion, Sgd

_ops = torch.ops.zero_lab


# ---- updates ---------------------------------------------------------------------------------------------------------


def adamw_(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad_scale: torch.Tensor,
    settings: AdamW,
    param_out: torch.Tensor | None = None,
) -> None:
    """AdamW, or Adam if `settings` is an Adam, in one pass over memory.

    g = grad * grad_scale [+ weight_decay * w]; m += (1 - beta1) * (g - m); v = beta2 * v + (1 - beta2) * g^2;
    w = [(1 - lr * weight_decay) *] w - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps); param_out = w.
    master, grad, param_out: float; exp_avg (m), exp_avg_sq (v): fp32 or bf16; grad_scale: 0-dim fp32.
    """
    _check("adamw_", master, grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, param_out=param_out)
    _check_scalar("adamw_", grad_scale)
    _ops.adamw_(master, grad, exp_avg, exp_avg_sq, grad_scale, settings.numbers, param_out)


def adamw8bit_(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_scale: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    exp_avg_sq_scale: torch.Tensor,
    grad_scale: torch.Tensor,
    settings: AdamW,
    param_out: torch.Tensor | None = None,
) -> None:
    """adamw_ with moments stored as 8-bit dynamic codes. exp_avg, exp_avg_sq: uint8; their scales: fp32, one for each
    256 elements, all 0 before the first step. The other arguments are those of adamw_."""
    _check("adamw8bit_", master, grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, param_out=param_out)
    scales = {"exp_avg_scale": exp_avg_scale, "exp_avg_sq_scale": exp_avg_sq_scale}
    _check_lengths("adamw8bit_", blocks_of(master.numel()), master.device, scales)
    _check_scalar("adamw8bit_", grad_scale)
    states = (exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale)
    _ops.adamw8bit_(master, grad, *states, grad_scale, settings.numbers, param_out)


def sgd_(
    master: torch.Tensor,
    grad: torch.Tensor,
    momentum_buffer: torch.Tensor | None,
    grad_scale: torch.Tensor,
    settings: Sgd,
    param_out: torch.Tensor | None = None,
) -> None:
    """SGD with momentum; the buffer (fp32 or bf16) is None if momentum is 0.

    g = grad * grad_scale + weight_decay * w; b = momentum * b + (1 - dampening) * g, in the first step b = g;
    w -= lr * (g, b, or g + momentum * b with nesterov); param_out = w. master, grad, param_out: float.
    """
    _check("sgd_", master, grad=grad, momentum_buffer=momentum_buffer, param_out=param_out)
    _check_scalar("sgd_", grad_scale)
    flags = (settings.nesterov, settings.is_first)
    _ops.sgd_(master, grad, momentum_buffer, grad_scale, settings.numbers, *flags, param_out)


def lion_(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    grad_scale: torch.Tensor,
    settings: Lion,
    param_out: torch.Tensor | None = None,
) -> None:
    """Lion: g = grad * grad_scale; w = (1 - lr * weight_decay) * w - lr * sign(beta1 * m + (1 - beta1) * g);
    m = beta2 * m + (1 - beta2) * g; param_out = w. master, grad, param_out: float; exp_avg (m): fp32 or bf16."""
    _check("lion_", master, grad=grad, exp_avg=exp_avg, param_out=param_out)
    _check_scalar("lion_", grad_scale)
    _ops.lion_(master, grad, exp_avg, grad_scale, settings.numbers, param_out)


def lamb_moments_(
    grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, grad_scale: torch.Tensor, settings: Lamb
) -> None:
    """The first of LAMB's three parts: updates the moments as Adam does. grad: float; moments: fp32."""
    _check("lamb_moments_", grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    _check_scalar("lamb_moments_", grad_scale)
    _ops.lamb_moments_(grad, exp_avg, exp_avg_sq, grad_scale, settings.numbers)


def lamb_squares(master: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, settings: Lamb) -> torch.Tensor:
    """The second part: [2] fp64, the sums of the squares of w and of LAMB's update u, which is not stored.

    u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * w.
    """
    _check("lamb_squares", master, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    return _ops.lamb_squares(master, exp_avg, exp_avg_sq, settings.lamb_numbers)


def lamb_(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    ratio: torch.Tensor,
    settings: Lamb,
    param_out: torch.Tensor | None = None,
) -> None:
    """The third part: w -= lr * ratio * u; param_out = w. ratio: that of the elements' parameter, 0-dim fp32."""
    _check("lamb_", master, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, param_out=param_out)
    _check_scalar("lamb_", ratio)
    _ops.lamb_(master, exp_avg, exp_avg_sq, ratio, settings.lamb_numbers, param_out)


# ---- streams ---------------------------------------------------------------------------------------------------------


def accumulate_(target: torch.Tensor, values: torch.Tensor, scale: float = 1.0) -> None:
    """target += scale * values, in fp32 with one rounding. Both: float."""
    _check("accumulate_", target, values=values)
    _ops.accumulate_(target, values, scale)


def cast_copy_(target: torch.Tensor, values: torch.Tensor) -> None:
    """target = values, rounded to nearest, ties to even. Both: float."""
    _check("cast_copy_", target, values=values)
    _ops.cast_copy_(target, values)


def sum_of_squares(values: torch.Tensor) -> torch.Tensor:
    """0-dim fp64: the sum of the squares, finite if and only if every element is. values: float."""
    return _ops.sum_of_squares(values)


# ---- arguments -------------------------------------------------------------------------------------------------------


def _check(name: str, first: torch.Tensor, **others: torch.Tensor | None) -> None:
    _check_lengths(name, first.numel(), first.device, others)


def _check_lengths(
    name: str, numel: int, device: torch.device, tensors: dict[str, torch.Tensor | None] | dict[str, torch.Tensor]
) -> None:
    for label, tensor in tensors.items():
        if tensor is not None and (tensor.numel() != numel or tensor.device != device):
            raise ValueError(
                f"zero_lab::{name}: expected {label} of {numel} elements on {device}, found {tensor.numel()} on "
                f"{tensor.device}"
            )


def _check_scalar(name: str, scale: torch.Tensor) -> None:
    if scale.numel() != 1:
        raise ValueError(f"zero_lab::{name}: expected a scale of one element, found {scale.numel()}")
