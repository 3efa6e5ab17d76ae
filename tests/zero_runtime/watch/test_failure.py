"""A rank reports its own error with the place where it happened and, if out of memory, the requested amount."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from zero_runtime.errors import RankError
from zero_runtime.watch.failure import is_out_of_memory, memory_error, told
from zero_runtime.watch.journal import RankPosition

AT = RankPosition(ticks=1, issued=1, waiting=0, step=3, phase="backward", unit="blocks.1")
NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, unhandled cuda error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\n"
    "Last error:\n"
)
CUDA = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.00 GiB"


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (torch.OutOfMemoryError(CUDA), "wanted 2.50 GiB"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."), "4096 bytes"),
        (MemoryError(), "not told how much"),
    ],
)
def test_an_out_of_memory_error_is_reported_with_its_place_and_amount(error: BaseException, wanted: str) -> None:
    text = told(error, AT)
    assert text.startswith("out of memory in backward of step 3, unit blocks.1: ")
    assert wanted in text


def test_any_other_error_is_reported_unchanged_with_its_place() -> None:
    assert told(KeyError("x"), AT) == "KeyError: 'x' (in backward of step 3, unit blocks.1)"


def test_an_error_that_quotes_another_rank_is_not_this_ranks_out_of_memory_error() -> None:
    assert not is_out_of_memory(RankError("rank 1 failed: can't allocate memory", (1,)))


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (dist.DistBackendError(f"{NCCL}Failed to CUDA calloc async 4194304 bytes"), "4194304 bytes"),
        (dist.DistBackendError(f"{NCCL}Failed to CUDA calloc 608 bytes"), "608 bytes"),
        (dist.DistBackendError(f"{NCCL}Cuda failure 2 'out of memory'"), None),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), None),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), None),
        (RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in ..."), None),
    ],
)
def test_a_library_that_finds_no_device_memory_is_out_of_memory_on_the_device(
    error: RuntimeError, wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL and cuBLAS take memory beside torch's allocator, NCCL at the first collective of a group."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert is_out_of_memory(error)
    found = memory_error(1, error, AT)
    assert not found.on_host
    assert found.facts["wanted"] == wanted


@pytest.mark.parametrize(
    "error",
    [
        dist.DistBackendError(f"{NCCL}Cuda failure 700 'an illegal memory access was encountered'"),
        dist.DistBackendError("NCCL error: remote process exited or there was a network error"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasGemmEx(...)`"),
    ],
)
def test_other_errors_of_nccl_and_cublas_are_not_out_of_memory(error: RuntimeError) -> None:
    assert not is_out_of_memory(error)
