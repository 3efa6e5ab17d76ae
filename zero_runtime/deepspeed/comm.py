"""DeepSpeed's `comm`: the functions of torch.distributed under their own names, and init_distributed."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from zero_runtime.deepspeed.entry import get_local_rank, init_distributed

__all__ = ["get_all_ranks_from_group", "get_local_rank", "get_world_group", "init_distributed"]


def get_world_group() -> Any:
    """torch's group of all ranks."""
    return dist.group.WORLD


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """The ranks of a group, or all."""
    return dist.get_process_group_ranks(group)


def __getattr__(name: str) -> Any:
    try:
        return getattr(dist, name)
    except AttributeError:
        raise AttributeError(
            f"zero_runtime.comm.{name}: torch.distributed has no such function; use all_reduce, all_gather, "
            "broadcast, barrier or another of torch.distributed"
        ) from None
