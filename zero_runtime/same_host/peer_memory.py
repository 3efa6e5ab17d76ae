"""Copies from the memory of another process of the same user, by the kernel: process_vm_readv(2), Linux only."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a command asks for `trouble` without torch
    import torch

NEEDS = "a container needs the capability SYS_PTRACE, and a host kernel.yama.ptrace_scope of at most 1"
_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)  # of prctl(2); the first is "Yama" in ASCII


class _Region(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def allow_reads() -> None:
    """Let processes of this user read this process, also where Yama restricts it to parents. Never raises.

    Ranks are children of one launcher, or of several, so no single process could be named instead.
    """
    if (prctl := _function("prctl")) is not None:
        prctl(_SET_PTRACER, _ANY, 0, 0, 0)  # fails where there is no Yama, and then needs no permission


def trouble() -> str:
    """Why this system cannot copy from other processes; empty if it may."""
    return "" if _function("process_vm_readv") is not None else "this system has no process_vm_readv (Linux has)"


def read_into(tensor: torch.Tensor, pid: int, address: int) -> None:
    """Fill the contiguous CPU tensor from the memory of a process. Raises OSError, with the kernel's reason."""
    read(tensor.data_ptr(), tensor.nbytes, pid, address)


def read(start: int, total: int, pid: int, address: int) -> None:
    """Fill `total` bytes of this process from the memory of another. Raises OSError, with the kernel's reason."""
    copy, done = _function("process_vm_readv"), 0
    assert copy is not None, "see `trouble`"
    while done < total:  # one call copies at most 2 GiB, and may stop at a page
        own, theirs = _Region(start + done, total - done), _Region(address + done, total - done)
        copied = copy(pid, ctypes.byref(own), 1, ctypes.byref(theirs), 1, 0)
        if copied <= 0:
            number = ctypes.get_errno() if copied < 0 else errno.EIO
            raise OSError(number, os.strerror(number))
        done += copied


def _load() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.process_vm_readv.restype = ctypes.c_ssize_t
        libc.process_vm_readv.argtypes = (
            *(ctypes.c_int, ctypes.POINTER(_Region), ctypes.c_ulong),
            *(ctypes.POINTER(_Region), ctypes.c_ulong, ctypes.c_ulong),
        )
    except (OSError, TypeError, AttributeError):  # TypeError: Windows has no library of the process itself
        return None
    return libc


_LIBC = _load()


def _function(name: str) -> Any:
    """A function of the C library; None where it has none of this name."""
    return None if _LIBC is None else getattr(_LIBC, name, None)
