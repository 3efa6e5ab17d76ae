"""Registers each operation and its implementations with torch's dispatcher, in the namespace `zero_lab`.

[Note: prepare] On import the reference is registered for all devices. `prepare` registers the compiled kernels of one
device: C++ for CPU, Triton for CUDA. torch's dispatcher chooses by device alone, so `prepare` decides once per process
what the dispatcher cannot know: whether kernels can be compiled, whether their results are correct, and what
`ZLAB_KERNELS` allows. That is `auto` (the default), `reference`, or `cpp`. If the C++ kernels cannot be used on a CPU,
`cpp` raises an error, while `auto` warns and leaves the reference. A registration lasts as long as the process: code
that compares two implementations calls the functions of their modules.

The registered operations do not check lengths and devices. The functions of ops.py do, and then call them.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch

from zero_runtime.kernels import reference
from zero_runtime.kernels.block_formats import blocks_of
from zero_runtime.kernels.cpu import operations as cpu_operations
from zero_runtime.kernels.cpu.build import BuildError
from zero_runtime.kernels.settings import AdamW, Lamb

logger = logging.getLogger(__name__)

VARIABLE = "ZLAB_KERNELS"
REFERENCE = "reference"
CHOICES = ("auto", REFERENCE, "cpp")
COMPILED = {"cpu": "cpp", "cuda": "triton"}  # by type of device

_MOMENTS = "Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq"
_CODES = "Tensor(b!) exp_avg, Tensor(c!) exp_avg_scale, Tensor(d!) exp_avg_sq, Tensor(e!) exp_avg_sq_scale"
_NUMBERS = "float[] numbers"
_OUT = "Tensor(f!)? param_out=None"
# Each module of implementations has a function of each name, with these arguments. Defined by torch.library.define
# rather than custom_op, whose wrappers for autograd would make each call slower and do nothing here.
SCHEMAS = {
    "adamw_": f"(Tensor(a!) master, Tensor grad, {_MOMENTS}, Tensor grad_scale, {_NUMBERS}, {_OUT}) -> ()",
    "adamw8bit_": f"(Tensor(a!) master, Tensor grad, {_CODES}, Tensor grad_scale, {_NUMBERS}, {_OUT}) -> ()",
    "sgd_": "(Tensor(a!) master, Tensor grad, Tensor(b!)? momentum_buffer, Tensor grad_scale, "
    f"{_NUMBERS}, bool nesterov, bool is_first, {_OUT}) -> ()",
    "lion_": f"(Tensor(a!) master, Tensor grad, Tensor(b!) exp_avg, Tensor grad_scale, {_NUMBERS}, {_OUT}) -> ()",
    "lamb_moments_": f"(Tensor grad, {_MOMENTS}, Tensor grad_scale, {_NUMBERS}) -> ()",
    "lamb_squares": f"(Tensor master, Tensor exp_avg, Tensor exp_avg_sq, {_NUMBERS}) -> Tensor",
    "lamb_": f"(Tensor(a!) master, Tensor exp_avg, Tensor exp_avg_sq, Tensor ratio, {_NUMBERS}, {_OUT}) -> ()",
    "accumulate_": "(Tensor(a!) target, Tensor values, float scale) -> ()",
    "cast_copy_": "(Tensor(a!) target, Tensor values) -> ()",
    "sum_of_squares": "(Tensor values) -> Tensor",
}
# The results on fake tensors; operations that only write into their arguments have none.
_FAKES: dict[str, Callable[..., torch.Tensor]] = {
    "lamb_squares": lambda master, *_: master.new_empty(2, dtype=torch.float64),
    "sum_of_squares": lambda values: values.new_empty((), dtype=torch.float64),
}

for _name, _schema in SCHEMAS.items():
    torch.library.define(f"zero_lab::{_name}", _schema)
    torch.library.impl(f"zero_lab::{_name}", "default")(getattr(reference, _name))
    torch.library.register_fake(f"zero_lab::{_name}")(_FAKES.get(_name, lambda *_: None))


def prepare(device: torch.device) -> bool:
    """Compile and register the kernels for a type of device; done once per process.

    Returns whether compiled kernels are registered for it; otherwise its operations run the reference. Call it before
    other threads use the operations. Raises ValueError for an unknown value of ZLAB_KERNELS and, if that is `cpp`,
    BuildError. See [Note: prepare].
    """
    with _lock:
        return _prepared(device.type)


class Chosen(NamedTuple):
    """The implementation that `prepare` has chosen for a type of device: triton, cpp or reference.

    trouble: why it is the reference.
    """

    name: str
    trouble: str | None = None


def chosen(device: torch.device) -> Chosen | None:
    """What `prepare` has chosen for this type of device; None before its first call.

    Two implementations may differ in the last bits, so ranks that hold copies of one state must use the same one.
    """
    return _chosen.get(device.type)


_chosen: dict[str, Chosen] = {}


_lock = threading.Lock()  # an operation can be registered once


@cache
def _prepared(device_type: str) -> bool:
    kernels, trouble = _find(torch.device(device_type))
    _chosen[device_type] = Chosen(REFERENCE if kernels is None else COMPILED[device_type], trouble)
    if kernels is None:
        return False
    for name in SCHEMAS:
        torch.library.impl(f"zero_lab::{name}", device_type)(getattr(kernels, name))
    return True


def compiled_for(device: torch.device) -> ModuleType | None:
    """The module of the compiled kernels for this device; None if the reference has to be used. Errors of `prepare`."""
    return _find(device)[0]


def _find(device: torch.device) -> tuple[ModuleType | None, str | None]:
    """The module, or why the reference has to be used."""
    choice = os.environ.get(VARIABLE, "auto")
    if choice not in CHOICES:
        raise ValueError(f"{VARIABLE}: expected one of {', '.join(CHOICES)}, found {choice!r}")
    if choice == REFERENCE:
        return None, f"{VARIABLE}={choice}"
    if device.type not in COMPILED:
        return None, f"there are no kernels for {device.type}"
    return _cpp(strict=choice == "cpp") if device.type == "cpu" else _triton()


def _cpp(*, strict: bool) -> tuple[ModuleType | None, str | None]:
    try:
        cpu_operations.library()
        if (trouble := trouble_of(cpu_operations, torch.device("cpu"))) is not None:
            raise BuildError(f"compiled here, {trouble}")
    except BuildError as error:
        if strict:
            raise
        logger.warning("the CPU kernels cannot be used, and updates take the several times slower reference: %s", error)
        return None, str(error)
    return cpu_operations, None


def _triton() -> tuple[ModuleType | None, str | None]:
    try:
        from zero_runtime.kernels.triton import operations
    except ImportError as error:
        trouble: str | None = f"{error}; install triton"
    else:
        trouble = trouble_of(operations, torch.device("cuda"))
    if trouble is None:
        return operations, None
    logger.warning("the CUDA kernels cannot be used, and updates take the slower reference: %s", trouble)
    return None, trouble


def trouble_of(kernels: ModuleType, device: torch.device) -> str | None:
    """Why an implementation that was compiled on this machine cannot be trusted; None if its results are correct.

    Compares a few operations on a few elements with the reference. Takes a few milliseconds on a CPU.
    """
    try:
        results = _sample(kernels, device)
    except Exception as error:  # a compiler may fail with any error
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    for result, wanted in zip(results, _sample(reference, device), strict=True):
        # fp32 arithmetic in another order differs by a few units in the last place, the bf16 output by one bf16 unit.
        if not torch.allclose(result, wanted, rtol=2.0**-7, atol=1e-6):
            return f"its results are off by up to {float((result - wanted).abs().max())}"
    return None


def _sample(kernels: ModuleType, device: torch.device) -> list[torch.Tensor]:
    """The results of operations of each kind on 1,337 elements, as fp32."""
    adamw, lamb = AdamW(1e-2, 0.9, 0.999, 1e-8, 0.01, step=1), Lamb(1e-2, 0.9, 0.999, 1e-6, 0.01, step=1)
    values, scale = torch.linspace(-2, 2, 1337, device=device), torch.tensor(0.5, device=device)
    numel, narrow = values.numel(), values.bfloat16()
    first, second, total, lamb_first, lamb_second = torch.zeros(5, numel, device=device).unbind()
    master, lamb_master, coded_master = values.repeat(3, 1).unbind()
    out = torch.empty_like(narrow)
    kernels.adamw_(master, narrow, first, second, scale, adamw.numbers, out)
    kernels.accumulate_(total, narrow, 0.5)
    kernels.lamb_moments_(values, lamb_first, lamb_second, scale, lamb.numbers)
    squares = kernels.lamb_squares(lamb_master, lamb_first, lamb_second, lamb.lamb_numbers)
    kernels.lamb_(lamb_master, lamb_first, lamb_second, scale, lamb.lamb_numbers)
    codes = torch.zeros(2, numel, dtype=torch.uint8, device=device).unbind()
    scales = torch.zeros(2, blocks_of(numel), device=device).unbind()
    states = (codes[0], scales[0], codes[1], scales[1])
    kernels.adamw8bit_(coded_master, values, *states, scale, adamw.numbers)
    several = values.repeat(reference.GROUP_NUMEL // numel + 1)  # more than one group, whose sums are folded
    sums = (kernels.sum_of_squares(several).float(), squares.float())
    tensors = [master, first, second, out.float(), total, lamb_first, lamb_second, lamb_master, coded_master]
    # Correct codes may differ by one; after adding 256 that is within the relative tolerance of the caller.
    return [*tensors, *sums, *scales, *(code.float() + 256 for code in codes)]
