"""The memory of this machine's GPUs now, by NVML, for who watches a sweep.

NVML counts what all processes of a GPU hold, and needs no CUDA context, which torch.cuda would make in the watcher: it
takes memory of each GPU. Without the package pynvml, or without a driver, nothing is known.
"""

from __future__ import annotations

import importlib
from typing import Any

from orchestrator.text.units import size


def nvml() -> Any | None:
    """The module pynvml, ready to be asked; None without it or without NVML."""
    try:
        found: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        found.nvmlInit()
    except found.NVMLError:
        return None
    return found


def memory_text() -> str:
    """Such as "   GPUs: 12.3 GiB, 11.9 GiB of 79.1 GiB", for the end of a line; empty where nothing is known."""
    known = nvml()
    if known is None:
        return ""
    try:
        handles = map(known.nvmlDeviceGetHandleByIndex, range(known.nvmlDeviceGetCount()))
        found = [known.nvmlDeviceGetMemoryInfo(handle) for handle in handles]
    except known.NVMLError:  # of a GPU that was lost, or that tells nothing, such as one with unified memory
        return ""
    totals = sorted({one.total for one in found})
    return f"   GPUs: {', '.join(size(one.used) for one in found)} of {'/'.join(map(size, totals))}" if found else ""
