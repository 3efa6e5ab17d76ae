"""The ranges of a profiled step are nvtx ranges too where the process uses CUDA, by a stand-in for torch.cuda."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

from zero_runtime.phase_clock import PhaseClock
from zero_runtime.profile.ranges import StepRanges


class FakeNvtx:
    """torch.cuda.nvtx: what was begun, in order, and what is still open."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.open: set[int] = set()

    def range_start(self, name: str) -> int:
        self.begun.append(name)
        self.open.add(len(self.begun))
        return len(self.begun)

    def range_end(self, number: int) -> None:
        self.open.remove(number)


@pytest.mark.parametrize("uses_cuda", [True, False])
def test_each_range_of_the_profile_is_begun_and_ended_in_nvtx(uses_cuda: bool) -> None:
    nvtx, model, clock = FakeNvtx(), nn.Sequential(nn.Linear(2, 2)), PhaseClock(torch.device("cpu"))
    with mock.patch.multiple(torch.cuda, is_initialized=lambda: uses_cuda, nvtx=nvtx), StepRanges(model, clock):
        clock.start()
        with clock.phase("forward"):
            loss = model(torch.ones(1, 2)).sum()
        with clock.phase("backward"):
            loss.backward()
            with clock.phase("communication_exposed"):
                pass
        with clock.phase("optimizer"):
            pass
        clock.end()
    names = [name.removeprefix("zlab ") for name in nvtx.begun]
    phases = ("forward", "backward", "communication_exposed", "optimizer")
    forward = ["phase: forward", "module: (root)", "module: 0"]
    expected = [*forward, *(f"phase: {phase}" for phase in phases[1:])]
    assert [name for name in names if name in expected] == (expected if uses_cuda else [])
    assert bool(names) is uses_cuda
    assert nvtx.open == set()
