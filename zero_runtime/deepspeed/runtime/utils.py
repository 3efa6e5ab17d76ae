"""DeepSpeed's `runtime.utils`: memory in the log, and two helpers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch

from zero_runtime.deepspeed.accelerator import get_accelerator
from zero_runtime.deepspeed.utils.logging import log_dist

__all__ = ["move_to_device", "see_memory_usage"]
_GIB = 2**30


def see_memory_usage(message: str, force: bool = False) -> None:
    """With `force`, log the memory of rank 0's device (on a CPU: of its process), and begin a new peak."""
    if not force:
        return
    gc.collect()
    log_dist(f"{message}: {memory_text()}", ranks=[0])
    get_accelerator().reset_peak_memory_stats()


def memory_text() -> str:
    """What is allocated and reserved on this rank's device now, and the most of it since the last peak began; on a CPU
    the memory of the process."""
    device = get_accelerator()
    names = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    now, most, held, most_held = (getattr(device, name)() / _GIB for name in names)
    if device.device_name() == "cpu":
        return f"process {now:.2f} GiB, at most {most:.2f} GiB"
    return f"allocated {now:.2f} GiB, at most {most:.2f} GiB; reserved {held:.2f} GiB, at most {most_held:.2f} GiB"


def move_to_device(item: Any, device: torch.device | str) -> Any:
    """The same lists, tuples and dicts with their tensors on the device; other values as they are."""
    return with_tensors(item, lambda tensor: tensor.to(device))


def with_tensors(item: Any, of: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same lists, tuples and dicts with `of` of their tensors; other values as they are."""
    if isinstance(item, torch.Tensor):
        return of(item)
    if isinstance(item, Mapping):  # torch's tree_map takes a subclass of dict, as of a tokenizer, for a value
        return {key: with_tensors(value, of) for key, value in item.items()}
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(with_tensors(value, of) for value in item))
    if isinstance(item, list | tuple):
        return type(item)(with_tensors(value, of) for value in item)
    return item
