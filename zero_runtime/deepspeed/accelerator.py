"""DeepSpeed's `get_accelerator()`: questions about this rank's device, answered by torch."""

from __future__ import annotations

import os
import resource
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

_PAGE_BYTES = resource.getpagesize()


class CurrentAccelerator:
    """The GPU of this rank, or the CPU. Other names are those of torch.cuda; on a CPU they raise AttributeError.

    On a CPU, the memory that is allocated is that of this process, in bytes; its peak cannot be reset.
    """

    def __init__(self) -> None:
        self._on_cuda = torch.cuda.is_available()

    def device_name(self, device_index: int | None = None) -> str:
        """ "cuda", "cuda:1" or "cpu"."""
        kind = "cuda" if self._on_cuda else "cpu"
        return kind if device_index is None or not self._on_cuda else f"{kind}:{device_index}"

    def current_device(self) -> int:
        """The number of the current GPU; 0 on a CPU."""
        return torch.cuda.current_device() if self._on_cuda else 0

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

    def set_device(self, device_index: int) -> None:
        """Make a GPU current; does nothing on a CPU."""
        if self._on_cuda:
            torch.cuda.set_device(device_index)

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for the GPU; does nothing on a CPU."""
        if self._on_cuda:
            torch.cuda.synchronize(device_index)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """The state of torch's generator for the device."""
        return (
            torch.cuda.get_rng_state("cuda" if device_index is None else device_index)
            if self._on_cuda
            else torch.get_rng_state()
        )

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Set what get_rng_state returned."""
        if self._on_cuda:
            torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)
        else:
            torch.set_rng_state(new_state)

    def empty_cache(self) -> None:
        """Return cached memory of the GPU; does nothing on a CPU."""
        if self._on_cuda:
            torch.cuda.empty_cache()

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Start a new peak on a GPU; does nothing on a CPU."""
        if self._on_cuda:
            torch.cuda.reset_peak_memory_stats(device_index)

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes of live tensors on the GPU, or of this process."""
        if self._on_cuda:
            return torch.cuda.memory_allocated(device_index)
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The peak of memory_allocated."""
        if self._on_cuda:
            return torch.cuda.max_memory_allocated(device_index)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB

    def communication_backend_name(self) -> str:
        """ "nccl" or "gloo"."""
        return "nccl" if self._on_cuda else "gloo"

    def is_bf16_supported(self) -> bool:
        """Whether the device computes in bf16; a CPU does, slowly where it has no instructions for it."""
        return torch.cuda.is_bf16_supported() if self._on_cuda else True

    def is_fp16_supported(self) -> bool:
        """Whether the device computes in fp16; a CPU does, slowly."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """The dtypes in which parameters may be: fp32, bf16 and fp16."""
        return [torch.float32, torch.bfloat16, torch.float16]

    def manual_seed(self, seed: int) -> None:
        """Seed torch's generators, those of all devices."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        """The seed of torch's generator."""
        return torch.initial_seed()

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the GPU's memory, or of this machine's."""
        if self._on_cuda:
            return torch.cuda.get_device_properties(device_index or 0).total_memory
        return os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes of it that are free."""
        return (
            torch.cuda.mem_get_info(device_index)[0] if self._on_cuda else os.sysconf("SC_AVPHYS_PAGES") * _PAGE_BYTES
        )

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Bytes that torch's allocator holds on the GPU; on a CPU, memory_allocated."""
        return torch.cuda.memory_reserved(device_index) if self._on_cuda else self.memory_allocated()

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """The peak of memory_reserved."""
        return torch.cuda.max_memory_reserved(device_index) if self._on_cuda else self.max_memory_allocated()

    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved  # older names

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        """A context in which the GPU is current; on a CPU it does nothing."""
        return torch.cuda.device(device_index) if self._on_cuda else nullcontext()

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """The tensor in page-locked memory; on a CPU, itself."""
        return tensor.pin_memory() if self._on_cuda else tensor

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is on this kind of device."""
        return tensor.device.type == self.device_name()

    def range_push(self, msg: str) -> None:
        """Begin a range of NVTX; does nothing on a CPU."""
        if self._on_cuda:
            torch.cuda.nvtx.range_push(msg)

    def range_pop(self) -> None:
        """End the range; does nothing on a CPU."""
        if self._on_cuda:
            torch.cuda.nvtx.range_pop()

    def __getattr__(self, name: str) -> Any:
        if torch.cuda.is_available() and hasattr(torch.cuda, name):
            return getattr(torch.cuda, name)
        raise AttributeError(
            f"get_accelerator().{name} is not here; use torch.cuda, or torch.device('cpu')'s functions"
        )


def get_accelerator() -> CurrentAccelerator:
    """The device of this rank, with DeepSpeed's name."""
    return CurrentAccelerator()
