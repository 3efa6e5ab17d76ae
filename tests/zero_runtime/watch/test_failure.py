"""A rank reports its own error with the place where it happened and, if out of memory, the requested amount."""

from __future__ import annotations

import pytest
import torch

from zero_runtime.errors import RankError
from zero_runtime.watch.failure import is_out_of_memory, told
from zero_runtime.watch.journal import RankPosition

AT = RankPosition(ticks=1, issued=1, waiting=0, step=3, phase="backward", unit="blocks.1")
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
