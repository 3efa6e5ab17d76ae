"""Compiles Triton launches for GPUs that are not there, with Triton's own assembler, and disassembles the result.

A launch inside `compiled_for` goes through Triton up to the cubin, so its variant (dtypes, constants, alignment of
addresses, divisibility of integers, options) is the one that the same launch has on a GPU. Nothing is executed.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest


@dataclass(frozen=True, eq=False)
class Binary:
    """A compiled launch: the kernel's name, the launch's arguments by name, and Triton's compiled kernel."""

    name: str
    arguments: dict[str, Any]
    kernel: Any

    @property
    def ptx(self) -> str:
        return self.kernel.asm["ptx"]

    @property
    def threads(self) -> int:
        """Threads of a program."""
        return 32 * self.kernel.metadata.num_warps

    @property
    def is_fused(self) -> bool:
        """Whether the compiler and the assembler may fuse a multiplication with an addition."""
        return self.kernel.metadata.enable_fp_fusion

    @cached_property
    def sass(self) -> str:
        """The machine code, disassembled by the nvdisasm that Triton brings."""
        import triton

        tool = Path(triton.__file__).with_name("backends") / "nvidia" / "bin" / "nvdisasm"
        with TemporaryDirectory() as folder:
            file = Path(folder, "kernel.cubin")
            file.write_bytes(self.kernel.asm["cubin"])
            return subprocess.run([tool, "-c", file], check=True, capture_output=True, text=True).stdout

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={_brief(value)}' for name, value in self.arguments.items())})"


def _brief(value: Any) -> str:
    if not hasattr(value, "data_ptr"):
        return str(value)
    return f"{str(value.dtype).removeprefix('torch.')}[{value.numel()}]@{value.data_ptr() % 16}"


class NoDevice:
    """A stand-in for Triton's driver that knows the GPU to compile for and nothing else.

    number: of the device, under which Triton keeps what it has compiled in this process.
    """

    def __init__(self, capability: int, number: int) -> None:
        self._capability = capability
        self._number = number

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._number

    def get_current_stream(self, _device: int) -> int:
        return 0


@contextmanager
def without_device(capability: int, number: int) -> Iterator[pytest.MonkeyPatch]:
    """Let Triton believe that the current device is a GPU of this capability (90 for 9.0); undone at the end."""
    from triton.runtime.driver import driver

    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        patch.setenv("TRITON_CACHE_DIR", folder)  # nothing that was compiled before, and nothing in the user's cache
        patch.setattr(driver, "_active", NoDevice(capability, number))
        yield patch


@contextmanager
def compiled_for(capability: int) -> Iterator[list[Binary]]:
    """Every launch inside the context is compiled and not started; the list receives the binaries."""
    from triton.runtime.jit import JITFunction

    binaries: list[Binary] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        arguments = dict(zip(self.arg_names, args, strict=False)) | kwargs
        binaries.append(Binary(self.fn.__name__, arguments, kernel))
        return kernel

    with without_device(capability, number=capability) as patch:
        patch.setattr(JITFunction, "run", compile_only)
        yield binaries
