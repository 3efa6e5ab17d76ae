"""What a rank tells of its own error."""

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
def test_a_lack_of_memory_is_told_with_place_and_amount(error: BaseException, wanted: str) -> None:
    text = told(error, AT)
    assert text.startswith("out of memory in backward of step 3, unit blocks.1: ")
    assert wanted in text


def test_another_error_is_told_as_it_is_with_its_place() -> None:
    assert told(KeyError("x"), AT) == "KeyError: 'x' (in backward of step 3, unit blocks.1)"


def test_an_error_that_quotes_another_rank_is_no_lack_of_memory_of_this_one() -> None:
    assert not is_out_of_memory(RankError("rank 1 failed: can't allocate memory", (1,)))
