"""DeepSpeed's `get_accelerator()`: questions about this rank's device, answered by torch."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

_PAGE_BYTES = resource.getpagesize()


def _nothing(*_: Any, **__: Any) -> None:
    """What a CPU does where a GPU has a queue, a cache or counters."""


def _used_bytes(*_: Any, **__: Any) -> int:
    """Bytes of this process, which stand for the memory that is allocated on a CPU."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES


def _peak_bytes(*_: Any, **__: Any) -> int:
    """The most bytes that this process had; the peak cannot be reset."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


# What functions of torch.cuda do on a CPU. The number of a device that they are given has no effect.
_ON_CPU: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"), _nothing),
    **dict.fromkeys(("memory_allocated", "memory_reserved"), _used_bytes),
    **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), _peak_bytes),
    "current_device": lambda: 0,
    "device": lambda *_: nullcontext(),
    "get_rng_state": lambda *_: torch.get_rng_state(),
    "set_rng_state": lambda state, *_: torch.set_rng_state(state),
    "is_bf16_supported": lambda: True,  # slowly, where the CPU has no instructions for it
}


class CurrentAccelerator:
    """The GPU of this rank, or the CPU. Names that are not here are those of torch.cuda; a CPU has those of _ON_CPU."""

    def __init__(self) -> None:
        self._on_cuda = torch.cuda.is_available()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy and pickle ask before `__init__` has set anything
            raise AttributeError(name)
        if not self._on_cuda and name in _ON_CPU:
            return _ON_CPU[name]
        if torch.cuda.is_available() and hasattr(torch.cuda, name):
            return getattr(torch.cuda, name)
        raise AttributeError(
            f"get_accelerator().{name} is not here; use torch.cuda, or torch.device('cpu')'s functions"
        )

    def device_name(self, device_index: int | None = None) -> str:
        """ "cuda", "cuda:1" or "cpu"."""
        kind = "cuda" if self._on_cuda else "cpu"
        return kind if device_index is None or not self._on_cuda else f"{kind}:{device_index}"

    def current_device_name(self) -> str:
        """ "cuda:0" or "cpu"."""
        return self.device_name(self.current_device())

    def device_count(self) -> int:
        """Number of visible GPUs; on a CPU, of the ranks of this machine, which a launcher tells them (else 1)."""
        if self._on_cuda:
            return torch.cuda.device_count()
        return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)

    def is_available(self) -> bool:
        """Always True: there is a GPU, or the CPU."""
        return True

    def communication_backend_name(self) -> str:
        """ "nccl" or "gloo"."""
        return "nccl" if self._on_cuda else "gloo"

    def is_fp16_supported(self) -> bool:
        """Whether the device computes in fp16; a CPU does, slowly."""
        return True

    def manual_seed(self, seed: int) -> None:
        """Seed torch's generators, those of all devices."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the GPU's memory, or of this machine's."""
        if self._on_cuda:
            return torch.cuda.get_device_properties(device_index or 0).total_memory
        return os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """The tensor in page-locked memory; on a CPU, itself."""
        return tensor.pin_memory() if self._on_cuda else tensor

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is on this kind of device."""
        return tensor.device.type == self.device_name()


def get_accelerator() -> CurrentAccelerator:
    """The device of this rank, with DeepSpeed's name."""
    return CurrentAccelerator()
