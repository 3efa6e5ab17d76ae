"""The device of a runtime is the current one: CUDA would otherwise launch kernels and take memory on GPU 0."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from zero_runtime import runtime, world
from zero_runtime.deepspeed import entry
from zero_runtime.own_device import make_current

CPU, THIRD = torch.device("cpu"), torch.device("cuda", 3)


@pytest.fixture
def made_current(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    found: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    return found


def test_a_gpu_becomes_current_and_a_cpu_changes_nothing(made_current: list[torch.device]) -> None:
    assert make_current(CPU) == CPU
    assert made_current == []
    assert make_current(THIRD) == THIRD
    assert made_current == [THIRD]
    assert make_current(torch.device("cuda")) == torch.device("cuda", 5)


def test_the_drop_in_makes_its_gpu_current(made_current: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert entry.own_device() == THIRD
    assert made_current == [THIRD]


class Stopped(Exception):
    """Raised by the first step after the device has been made current."""


def stop(*_: object, **__: object) -> None:
    raise Stopped


def test_a_runtime_makes_its_gpu_current_before_anything_else(
    made_current: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "PhaseClock", stop)
    monkeypatch.setattr(runtime, "checked_plan", lambda model, plan, *others: plan)  # settings need no GPU
    nothing = SimpleNamespace()
    with pytest.raises(Stopped):
        runtime.ZeroRuntime(nothing, nothing, nothing, nothing, nothing, THIRD)  # type: ignore[arg-type]
    assert made_current == [THIRD]


def test_a_rank_makes_its_gpu_current_before_it_joins(
    made_current: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world.dist, "init_process_group", stop)
    with pytest.raises(Stopped):
        world.join_alone(THIRD)
    monkeypatch.setattr(world.dist, "rendezvous", stop)
    with pytest.raises(Stopped):
        world.join_world("env://", 0, 1, THIRD)
    assert made_current == [THIRD, THIRD]
