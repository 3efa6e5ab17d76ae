"""Declares all operations with torch.library, in the namespace `zero_lab`, and defines the functions to call them.

The functions take the same arguments as those of reference.py, which specifies what each computes, and run the
implementation for the tensors' device (backends.py). All tensors are flat, on one device and, unless stated otherwise,
of one length n; `float` stands for fp32, bf16 or fp16. Operations whose name ends in `_` write into their arguments and
return nothing. No operation reads a tensor's value on the host.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from zero_runtime.kernels.backends import backend_for
from zero_runtime.kernels.block_formats import BLOCK_NUMEL, blocks_of, codes_numel
from zero_runtime.kernels.settings import Adam, AdamW, Lamb, Lion, Sgd

_ADAM = "float lr, float beta1, float beta2, float eps, float weight_decay, int step"
_ops = torch.ops.zero_lab


def _declare(name: str, schema: str, fake: Callable[..., object]) -> Callable[[Callable[..., object]], None]:
    """Declare the operation `name`; `fake` computes its result on fake tensors. The decorated function runs on every
    device."""

    def register(function: Callable[..., object]) -> None:
        torch.library.define(f"zero_lab::{name}", schema)
        torch.library.impl(f"zero_lab::{name}", "default")(function)
        torch.library.register_fake(f"zero_lab::{name}")(fake)

    return register


def _nothing(*_: object) -> None:
    """The implementation on fake tensors of operations that only write into their arguments."""


def prepare(device: torch.device) -> None:
    """Compile the kernels for `device` now, so that no step waits for it. Does nothing if they are compiled."""
    backend_for(device)


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
    master, grad, param_out: float; exp_avg (m), exp_avg_sq (v): fp32; grad_scale: 0-dim fp32.
    """
    numbers = _adam_numbers(settings)
    _ops.adamw_(*(master, grad, exp_avg, exp_avg_sq, grad_scale, param_out), *numbers, isinstance(settings, Adam))


@_declare(
    "adamw_",
    "(Tensor(a!) master, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor grad_scale, "
    f"Tensor(d!)? param_out, {_ADAM}, bool l2) -> ()",
    _nothing,
)
def _adamw(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad_scale: torch.Tensor,
    param_out: torch.Tensor | None,
    *numbers: float,
) -> None:
    _check("adamw_", master, grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, param_out=param_out)
    _check_scalar("adamw_", grad_scale)
    settings = _adam_settings(numbers)
    backend_for(master.device).adamw(master, grad, exp_avg, exp_avg_sq, grad_scale, settings, param_out)


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
    states = (exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale)
    numbers = _adam_numbers(settings)
    _ops.adamw8bit_(*(master, grad, *states, grad_scale, param_out), *numbers, isinstance(settings, Adam))


@_declare(
    "adamw8bit_",
    "(Tensor(a!) master, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_scale, Tensor(d!) exp_avg_sq, "
    f"Tensor(e!) exp_avg_sq_scale, Tensor grad_scale, Tensor(f!)? param_out, {_ADAM}, bool l2) -> ()",
    _nothing,
)
def _adamw8bit(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_scale: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    exp_avg_sq_scale: torch.Tensor,
    grad_scale: torch.Tensor,
    param_out: torch.Tensor | None,
    *numbers: float,
) -> None:
    _check("adamw8bit_", master, grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, param_out=param_out)
    scales = {"exp_avg_scale": exp_avg_scale, "exp_avg_sq_scale": exp_avg_sq_scale}
    _check_lengths("adamw8bit_", blocks_of(master.numel()), master.device, scales)
    _check_scalar("adamw8bit_", grad_scale)
    states = (exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale)
    settings = _adam_settings(numbers)
    backend_for(master.device).adamw8bit(master, grad, *states, grad_scale, settings, param_out)


def sgd_(
    master: torch.Tensor,
    grad: torch.Tensor,
    momentum_buffer: torch.Tensor | None,
    grad_scale: torch.Tensor,
    settings: Sgd,
    param_out: torch.Tensor | None = None,
) -> None:
    """SGD with momentum; the buffer (fp32) is None if momentum is 0.

    g = grad * grad_scale + weight_decay * w; b = momentum * b + (1 - dampening) * g, in the first step b = g;
    w -= lr * (g, b, or g + momentum * b with nesterov); param_out = w. master, grad, param_out: float.
    """
    numbers = (settings.lr, settings.momentum, settings.dampening, settings.weight_decay)
    tensors = (master, grad, momentum_buffer, grad_scale, param_out)
    _ops.sgd_(*tensors, *numbers, settings.nesterov, settings.step)


@_declare(
    "sgd_",
    "(Tensor(a!) master, Tensor grad, Tensor(b!)? momentum_buffer, Tensor grad_scale, Tensor(c!)? param_out, "
    "float lr, float momentum, float dampening, float weight_decay, bool nesterov, int step) -> ()",
    _nothing,
)
def _sgd(
    master: torch.Tensor,
    grad: torch.Tensor,
    momentum_buffer: torch.Tensor | None,
    grad_scale: torch.Tensor,
    param_out: torch.Tensor | None,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    step: int,
) -> None:
    _check("sgd_", master, grad=grad, momentum_buffer=momentum_buffer, param_out=param_out)
    _check_scalar("sgd_", grad_scale)
    settings = Sgd(lr, momentum, dampening, weight_decay, nesterov, step)
    backend_for(master.device).sgd(master, grad, momentum_buffer, grad_scale, settings, param_out)


def lion_(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    grad_scale: torch.Tensor,
    settings: Lion,
    param_out: torch.Tensor | None = None,
) -> None:
    """Lion: g = grad * grad_scale; w = (1 - lr * weight_decay) * w - lr * sign(beta1 * m + (1 - beta1) * g);
    m = beta2 * m + (1 - beta2) * g; param_out = w. master, grad, param_out: float; exp_avg (m): fp32."""
    numbers = (settings.lr, settings.beta1, settings.beta2, settings.weight_decay)
    _ops.lion_(master, grad, exp_avg, grad_scale, param_out, *numbers)


@_declare(
    "lion_",
    "(Tensor(a!) master, Tensor grad, Tensor(b!) exp_avg, Tensor grad_scale, Tensor(c!)? param_out, "
    "float lr, float beta1, float beta2, float weight_decay) -> ()",
    _nothing,
)
def _lion(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    grad_scale: torch.Tensor,
    param_out: torch.Tensor | None,
    *numbers: float,
) -> None:
    _check("lion_", master, grad=grad, exp_avg=exp_avg, param_out=param_out)
    _check_scalar("lion_", grad_scale)
    backend_for(master.device).lion(master, grad, exp_avg, grad_scale, Lion(*numbers), param_out)


def lamb_moments_(
    grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, grad_scale: torch.Tensor, settings: Lamb
) -> None:
    """The first of LAMB's three parts: updates the moments as Adam does. grad: float; moments: fp32."""
    _ops.lamb_moments_(grad, exp_avg, exp_avg_sq, grad_scale, *_adam_numbers(settings))


@_declare(
    "lamb_moments_",
    f"(Tensor grad, Tensor(a!) exp_avg, Tensor(b!) exp_avg_sq, Tensor grad_scale, {_ADAM}) -> ()",
    _nothing,
)
def _lamb_moments(
    grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, grad_scale: torch.Tensor, *numbers: float
) -> None:
    _check("lamb_moments_", grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    _check_scalar("lamb_moments_", grad_scale)
    backend_for(grad.device).lamb_moments(grad, exp_avg, exp_avg_sq, grad_scale, _lamb_settings(numbers))


def lamb_squares(master: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, settings: Lamb) -> torch.Tensor:
    """The second part: [2] fp64, the sums of the squares of w and of LAMB's update u, which is not stored.

    u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * w.
    """
    return _ops.lamb_squares(master, exp_avg, exp_avg_sq, *_adam_numbers(settings))


@_declare(
    "lamb_squares",
    f"(Tensor master, Tensor exp_avg, Tensor exp_avg_sq, {_ADAM}) -> Tensor",
    lambda master, *_: master.new_empty(2, dtype=torch.float64),
)
def _lamb_squares(
    master: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, *numbers: float
) -> torch.Tensor:
    _check("lamb_squares", master, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    return backend_for(master.device).lamb_squares(master, exp_avg, exp_avg_sq, _lamb_settings(numbers))


def lamb_(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    ratio: torch.Tensor,
    settings: Lamb,
    param_out: torch.Tensor | None = None,
) -> None:
    """The third part: w -= lr * ratio * u; param_out = w. ratio: that of the elements' parameter, 0-dim fp32."""
    _ops.lamb_(master, exp_avg, exp_avg_sq, ratio, param_out, *_adam_numbers(settings))


@_declare(
    "lamb_",
    "(Tensor(a!) master, Tensor exp_avg, Tensor exp_avg_sq, Tensor ratio, Tensor(b!)? param_out, " + f"{_ADAM}) -> ()",
    _nothing,
)
def _lamb(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    ratio: torch.Tensor,
    param_out: torch.Tensor | None,
    *numbers: float,
) -> None:
    _check("lamb_", master, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, param_out=param_out)
    _check_scalar("lamb_", ratio)
    backend_for(master.device).lamb(master, exp_avg, exp_avg_sq, ratio, _lamb_settings(numbers), param_out)


# ---- streams ---------------------------------------------------------------------------------------------------------


def accumulate_(target: torch.Tensor, values: torch.Tensor, scale: float = 1.0) -> None:
    """target += scale * values, in fp32 with one rounding. Both: float."""
    _ops.accumulate_(target, values, scale)


@_declare("accumulate_", "(Tensor(a!) target, Tensor values, float scale) -> ()", _nothing)
def _accumulate(target: torch.Tensor, values: torch.Tensor, scale: float) -> None:
    _check("accumulate_", target, values=values)
    backend_for(target.device).accumulate(target, values, scale)


def cast_copy_(target: torch.Tensor, values: torch.Tensor) -> None:
    """target = values, rounded to nearest, ties to even. Both: float."""
    _ops.cast_copy_(target, values)


@_declare("cast_copy_", "(Tensor(a!) target, Tensor values) -> ()", _nothing)
def _cast_copy(target: torch.Tensor, values: torch.Tensor) -> None:
    _check("cast_copy_", target, values=values)
    backend_for(target.device).cast_copy(target, values)


def sum_of_squares(values: torch.Tensor) -> torch.Tensor:
    """0-dim fp64: the sum of the squares, finite if and only if every element is. values: float."""
    return _ops.sum_of_squares(values)


@_declare("sum_of_squares", "(Tensor values) -> Tensor", lambda values: values.new_empty((), dtype=torch.float64))
def _sum_of_squares(values: torch.Tensor) -> torch.Tensor:
    return backend_for(values.device).sum_of_squares(values)


# ---- block formats ---------------------------------------------------------------------------------------------------


def quantise_(codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, bits: int) -> None:
    """codes = values / scale, rounded to nearest; scale = max |values| / (2^(bits - 1) - 1) per 256 elements.

    values: float; scales: fp32 [ceil(n / 256)]; codes: int8 [n] for 8 bits, uint8 [ceil(n / 2)] for 4.
    """
    _ops.quantise_(codes, scales, values, bits)


@_declare("quantise_", "(Tensor(a!) codes, Tensor(b!) scales, Tensor values, int bits) -> ()", _nothing)
def _quantise(codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, bits: int) -> None:
    _check_blocks("quantise_", values, codes, scales, bits)
    backend_for(values.device).quantise(codes, scales, values, bits)


def dequantise_(target: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bits: int) -> None:
    """target = codes * scale, which reverses quantise_ up to rounding. target: float."""
    _ops.dequantise_(target, codes, scales, bits)


@_declare("dequantise_", "(Tensor(a!) target, Tensor codes, Tensor scales, int bits) -> ()", _nothing)
def _dequantise(target: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bits: int) -> None:
    _check_blocks("dequantise_", target, codes, scales, bits)
    backend_for(target.device).dequantise(target, codes, scales, bits)


# ---- arguments -------------------------------------------------------------------------------------------------------


def _adam_numbers(settings: AdamW) -> tuple[float, ...]:
    betas = (settings.beta1, settings.beta2)
    return (settings.lr, *betas, settings.eps, settings.weight_decay, settings.step)


def _adam_settings(numbers: tuple[float, ...]) -> AdamW:
    lr, beta1, beta2, eps, weight_decay, step, l2 = numbers
    return (Adam if l2 else AdamW)(lr, beta1, beta2, eps, weight_decay, int(step))


def _lamb_settings(numbers: tuple[float, ...]) -> Lamb:
    lr, beta1, beta2, eps, weight_decay, step = numbers
    return Lamb(lr, beta1, beta2, eps, weight_decay, int(step))


def _check(name: str, first: torch.Tensor, **others: torch.Tensor | None) -> None:
    _check_lengths(name, first.numel(), first.device, others)


def _check_lengths(
    name: str, numel: int, device: torch.device, tensors: dict[str, torch.Tensor | None] | dict[str, torch.Tensor]
) -> None:
    """ValueError for a wrong length or device: implementations use addresses, and would access a short tensor past its
    end."""
    for label, tensor in tensors.items():
        if tensor is not None and (tensor.numel() != numel or tensor.device != device):
            raise ValueError(
                f"zero_lab::{name}: expected {label} of {numel} elements on {device}, found {tensor.numel()} on "
                f"{tensor.device}"
            )


def _check_scalar(name: str, scale: torch.Tensor) -> None:
    if scale.numel() != 1:
        raise ValueError(f"zero_lab::{name}: expected a scale of one element, found {scale.numel()}")


def _check_blocks(name: str, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bits: int) -> None:
    if bits not in (4, 8):
        raise ValueError(f"zero_lab::{name}: expected 4 or 8 bits, found {bits}")
    numel, device = values.numel(), values.device
    _check_lengths(name, codes_numel(numel, bits), device, {"codes": codes})
    _check_lengths(name, blocks_of(numel), device, {f"scales (one for {BLOCK_NUMEL})": scales})
