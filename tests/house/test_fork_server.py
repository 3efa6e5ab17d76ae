"""A rank starts from what the fork server has prepared, and its network threads leave the processor to senders."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness.ranks import GLOO_LOOP, PRELOAD, _let_senders_first, run_alone, run_ranks

from zero_runtime.kernels.registration import chosen, prepare


def missing_modules() -> list[str]:
    return [name for name in PRELOAD if name not in sys.modules]


def kernels_before_and_after() -> list[str | None]:
    before = chosen(torch.device("cpu"))
    prepare(torch.device("cpu"))
    after = chosen(torch.device("cpu"))
    return [one.name if one else None for one in (before, after)]


def lower_priorities() -> dict[str, int]:
    """By how much each thread's nice value is above the main thread's."""
    dist.new_group(backend="gloo")  # the ranks may have no gloo yet
    _let_senders_first()
    own, found = os.getpriority(os.PRIO_PROCESS, 0), {}
    for task in Path("/proc/self/task").iterdir():
        found[(task / "comm").read_text().strip()] = os.getpriority(os.PRIO_PROCESS, int(task.name)) - own
    return found


def test_what_ranks_need_is_imported_before_they_are_forked() -> None:
    assert run_alone(missing_modules) == []


def test_the_kernels_are_chosen_before_ranks_are_forked() -> None:
    before, after = run_alone(kernels_before_and_after)
    assert before == after is not None


def test_the_threads_of_gloo_alone_have_a_lower_priority() -> None:
    if os.getpriority(os.PRIO_PROCESS, 0) >= 19:
        pytest.skip("the tests have the lowest priority already")
    for found in run_ranks(lower_priorities, 2):
        assert found.pop(GLOO_LOOP) > 0
        assert set(found.values()) == {0}
