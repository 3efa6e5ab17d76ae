"""The memory that a process uses now, for the events of its run: what it holds when the model is loaded, and the most
so far after each step."""

from __future__ import annotations

from typing import Any

import psutil
import torch

MIB = 2**20


def memory_now(device: torch.device, *, peak: bool = True) -> dict[str, Any]:
    """The keys of an event, in MiB of this process: on CUDA what is allocated, the most so far with `peak`, and what
    torch's allocator has reserved now; on a CPU the resident set now."""
    if device.type == "cuda":
        allocated = torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
        reserved = torch.cuda.memory_reserved() / MIB
        return {"memory_kind": "allocated", "memory_mib": allocated / MIB, "reserved_mib": reserved}
    return {"memory_kind": "rss", "memory_mib": psutil.Process().memory_info().rss / MIB}
