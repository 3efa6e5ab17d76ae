"""Selects the implementation of the operations: C++ for CPU tensors, Triton for CUDA tensors, otherwise the reference.

The variable `ZLAB_KERNELS` is read in each call: `auto` (the default), `reference`, or `cpp`. If the C++ kernels cannot
be used on a CPU, `cpp` raises an error, while `auto` warns once and uses the reference.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import Protocol

import torch

from zero_runtime.kernels import reference
from zero_runtime.kernels.block_formats import blocks_of
from zero_runtime.kernels.cpu.build import BuildError, load_library
from zero_runtime.kernels.cpu.operations import CpuKernels
from zero_runtime.kernels.settings import AdamW, Lamb, Lion, Sgd

logger = logging.getLogger(__name__)

VARIABLE = "ZLAB_KERNELS"
CHOICES = ("auto", "reference", "cpp")


class Backend(Protocol):
    """All operations, as reference.py specifies them."""

    def adamw(
        self,
        master: torch.Tensor,
        grad: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        grad_scale: torch.Tensor,
        settings: AdamW,
        param_out: torch.Tensor | None = None,
    ) -> None: ...

    def adamw8bit(
        self,
        master: torch.Tensor,
        grad: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_scale: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        exp_avg_sq_scale: torch.Tensor,
        grad_scale: torch.Tensor,
        settings: AdamW,
        param_out: torch.Tensor | None = None,
    ) -> None: ...

    def sgd(
        self,
        master: torch.Tensor,
        grad: torch.Tensor,
        momentum_buffer: torch.Tensor | None,
        grad_scale: torch.Tensor,
        settings: Sgd,
        param_out: torch.Tensor | None = None,
    ) -> None: ...

    def lion(
        self,
        master: torch.Tensor,
        grad: torch.Tensor,
        exp_avg: torch.Tensor,
        grad_scale: torch.Tensor,
        settings: Lion,
        param_out: torch.Tensor | None = None,
    ) -> None: ...

    def lamb_moments(
        self,
        grad: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        grad_scale: torch.Tensor,
        settings: Lamb,
    ) -> None: ...

    def lamb_squares(
        self, master: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, settings: Lamb
    ) -> torch.Tensor: ...

    def lamb(
        self,
        master: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        ratio: torch.Tensor,
        settings: Lamb,
        param_out: torch.Tensor | None = None,
    ) -> None: ...

    def accumulate(self, target: torch.Tensor, values: torch.Tensor, scale: float) -> None: ...

    def cast_copy(self, target: torch.Tensor, values: torch.Tensor) -> None: ...

    def sum_of_squares(self, values: torch.Tensor) -> torch.Tensor: ...

    def quantise(self, codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, bits: int) -> None: ...

    def dequantise(self, target: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bits: int) -> None: ...


def backend_for(device: torch.device) -> Backend:
    """The implementation for tensors on this device; the first call for a CPU may compile. See ZLAB_KERNELS above."""
    choice = os.environ.get(VARIABLE, "auto")
    if choice not in CHOICES:
        raise ValueError(f"{VARIABLE}: expected one of {', '.join(CHOICES)}, found {choice!r}")
    if choice == "reference":
        return reference
    if device.type == "cpu":
        return _on_cpu(strict=choice == "cpp")
    return _on_cuda() if device.type == "cuda" else reference


def _on_cpu(*, strict: bool) -> Backend:
    found = _compiled()
    if isinstance(found, BuildError):
        if strict:
            raise found
        _warn_once(f"the CPU kernels cannot be used, and updates take the several times slower reference: {found}")
        return reference
    return found


@cache
def _compiled() -> CpuKernels | BuildError:
    """The compiled kernels, or why they cannot be used; tried once per process."""
    try:
        kernels = CpuKernels(load_library())
    except BuildError as error:
        return error
    trouble = trouble_of(kernels, torch.device("cpu"))
    return kernels if trouble is None else BuildError(f"compiled here, {trouble}")


@cache
def _on_cuda() -> Backend:
    try:
        from zero_runtime.kernels.triton.operations import TritonKernels
    except ImportError as error:
        _warn_once(f"the CUDA kernels cannot be used, and updates take the slower reference: {error}; install triton")
        return reference
    kernels = TritonKernels()
    trouble = trouble_of(kernels, torch.device("cuda"))
    if trouble is not None:
        _warn_once(f"the CUDA kernels cannot be used, and updates take the slower reference: {trouble}")
        return reference
    return kernels


def trouble_of(kernels: Backend, device: torch.device) -> str | None:
    """Why an implementation that was compiled on this machine cannot be trusted; None if its results are correct.

    Compares a few operations on a few elements with the reference. It runs once per process and takes a few
    milliseconds on a CPU.
    """
    found: dict[str, list[torch.Tensor]] = {}
    for name, backend in (("found", kernels), ("wanted", reference)):
        values = torch.linspace(-2, 2, 1337, device=device)
        master, (first, second, total) = values.clone(), torch.zeros(3, 1337, device=device).unbind()
        out, scale = torch.empty_like(values, dtype=torch.bfloat16), torch.tensor(0.5, device=device)
        try:
            settings = AdamW(1e-2, 0.9, 0.999, 1e-8, 0.01, step=1)
            backend.adamw(master, values.bfloat16(), first, second, scale, settings, out)
            backend.accumulate(total, values.bfloat16(), 0.5)
            squares = backend.sum_of_squares(values)
            others = _others(backend, values, settings)
        except Exception as error:  # a compiler may fail with any error
            return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        found[name] = [master, first, second, out.float(), total, squares.float(), *others]
    for one, other in zip(found["found"], found["wanted"], strict=True):
        # fp32 arithmetic in another order differs by a few units in the last place, the bf16 output by one bf16 unit.
        if not torch.allclose(one, other, rtol=2.0**-7, atol=1e-6):
            return f"its results are off by up to {float((one - other).abs().max())}"
    return None


def _others(backend: Backend, values: torch.Tensor, adamw: AdamW) -> list[torch.Tensor]:
    """The results of LAMB and of AdamW with 8-bit moments, as fp32."""
    scale, lamb = torch.tensor(0.5, device=values.device), Lamb(1e-2, 0.9, 0.999, 1e-6, 0.01, step=1)
    first, second, master, other = torch.zeros(4, values.numel(), device=values.device).unbind()
    master.copy_(values)
    other.copy_(values)
    backend.lamb_moments(values, first, second, scale, lamb)
    squares = backend.lamb_squares(master, first, second, lamb)
    backend.lamb(master, first, second, scale, lamb)
    codes = [torch.zeros(values.numel(), dtype=torch.uint8, device=values.device) for _ in range(2)]
    scales = torch.zeros(2, blocks_of(values.numel()), device=values.device).unbind()
    backend.adamw8bit(other, values, codes[0], scales[0], codes[1], scales[1], scale, adamw)
    # Correct codes may differ by one; after adding 256 that is within the relative tolerance of the caller.
    return [first, second, master, squares.float(), other, *scales, *(code.float() + 256 for code in codes)]


@cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)
