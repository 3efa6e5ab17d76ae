"""Finds the operations that would make a host wait for its GPU, by running the code on the CPU.

Reading a value, or making a tensor whose size depends on values, is synchronous on CUDA: the host waits for all work
that it has issued. Fake tensors do not show this, because libraries test for them and take another way.
"""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Each reads values on the host, or makes a tensor whose size it must know there. lift_fresh is torch.tensor(...), which
# on CUDA copies from memory that is not pinned.
READS = {"_local_scalar_dense", "equal", "is_nonzero", "lift_fresh", "masked_select", "nonzero", "unique", "_unique2"}
INDEXING = {"index", "index_put", "index_put_"}  # with a mask of bool they count its elements first


class HostReads(TorchDispatchMode):
    """Within it, each operation of this thread that reads on the host is kept in `found`, with the line that called it.

    Backward on the CPU runs in the calling thread, so it is included.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = function.overloadpacket.__name__, kwargs or {}
        if name in READS or (name in INDEXING and any(_is_mask(one) for one in args[1])) or _leaves(name, args, kwargs):
            self.found.append(f"{name} {_caller()}")
        return function(*args, **kwargs)


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype is torch.bool


def _leaves(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a tensor is copied to a named device that is not its own."""
    return name == "_to_copy" and kwargs.get("device") not in (None, args[0].device)


def _caller() -> str:
    frames = [one for one in traceback.extract_stack() if "/torch/" not in one.filename and __file__ != one.filename]
    return f"{frames[-1].filename}:{frames[-1].lineno} {frames[-1].line}"
