"""Describes a rank's own error: the error, its position in the step, and, if out of memory, the requested size."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from zero_runtime.errors import PeerError, RankError, RankMemoryError
from zero_runtime.watch.journal import RankPosition

# The wording of torch's two allocators, and of NCCL.
_WANTED = re.compile(r"(?:[Tt]ried to allocate|Failed to CUDA (?:calloc|malloc)(?: async)?) ([\d.]+ ?\w*)")
# What CUDA, NCCL and cuBLAS say when the device has no memory for them, which they take outside torch's allocator. NCCL
# allocates in the first collective of a group, cuBLAS in the first multiplication of a stream.
_DEVICE_IS_FULL = re.compile(
    r"CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUBLAS_STATUS_NOT_INITIALIZED when calling .?cublasCreate"
    r"|ncclUnhandledCudaError.*(?:out of memory|Failed to CUDA (?:calloc|malloc))",
    re.DOTALL,
)


def told(error: BaseException, place: RankPosition) -> str:
    """The error and its position; for an out-of-memory error, the requested size and the first line of the error."""
    at = f"in {place.phase} of step {place.step}" + (f", unit {place.unit}" if place.unit else "")
    text = f"{type(error).__name__}: {error}"
    if not is_out_of_memory(error):
        return f"{text} ({at})"
    size = wanted_size(error)
    wanted = f"wanted {size}" if size else "it is not told how much was wanted"
    return f"out of memory {at}: {wanted} ({text.splitlines()[0]})"


def wanted_size(error: BaseException) -> str | None:
    """The size requested from the allocator, as it prints it ("2.00 GiB"); None if the error does not state it."""
    found = _WANTED.search(str(error))
    return found[1].strip() if found else None


def memory_error(
    rank: int, error: BaseException, place: RankPosition, held: Mapping[str, int] | None = None
) -> RankMemoryError:
    """The error that the rank raises instead of its allocator's. `held`: bytes by component at that moment."""
    facts: dict[str, object] = {
        "held": dict(held or {}),
        "phase": place.phase,
        "step": place.step,
        "unit": place.unit,
        "wanted": wanted_size(error),
    }
    on_host = torch.cuda.is_initialized() and not _is_out_of_device_memory(error)
    return RankMemoryError(f"rank {rank}: {told(error, place)}", rank, facts, on_host=on_host)


def is_broken_connection(error: BaseException) -> bool:
    """Whether a collective failed that nothing of ours issued: another rank may be the cause."""
    # gloo raises a plain RuntimeError with the place in its code, NCCL and the store their own kinds.
    if type(error) is RuntimeError:
        return "gloo/" in str(error)
    return isinstance(error, PeerError) or (
        any(kind.__name__ == "DistError" for kind in type(error).__mro__) and not is_out_of_memory(error)
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this rank is out of memory; False for a RankError, which may quote another rank's error."""
    if isinstance(error, RankError):
        return False
    # The CPU allocator raises a plain RuntimeError.
    is_plain = isinstance(error, RuntimeError) and "allocate memory" in str(error)
    return is_plain or isinstance(error, MemoryError) or _is_out_of_device_memory(error)


def _is_out_of_device_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _DEVICE_IS_FULL.search(str(error)) is not None
