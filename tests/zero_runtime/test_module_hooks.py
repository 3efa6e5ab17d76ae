"""Module and autograd hooks call the schedule's methods in the right order, and all of them can be removed."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from harness.ranks import run_ranks
from torch import nn

from zero_runtime.guarded_parameter import ParameterGuard
from zero_runtime.module_hooks import ModuleHooks
from zero_runtime.nested_tensors import tensors_in
from zero_runtime.optim.configs import SgdConfig
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime

A, B, C = torch.zeros(1), torch.zeros(2), torch.zeros(3)


@dataclass
class Output:
    first: Any
    rest: Any = None


class Point(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass(init=False)
class ModelOutput(OrderedDict):
    """Like Hugging Face's ModelOutput: a dict and a dataclass, whose keys are the fields that are not None."""

    logits: Any
    hidden: Any


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (A, [A]),
        (None, []),
        ("text", []),
        (3, []),
        ((), []),
        ((A, B), [A, B]),
        ([A, None, B], [A, B]),
        (Point(A, B), [A, B]),
        ({"a": A, "n": 1, "b": [B]}, [A, B]),
        (Output(A), [A]),
        (Output(first=(A, {"b": B}), rest=Output([C])), [A, B, C]),
        (ModelOutput({"logits": A, "hidden": (B, C)}), [A, B, C]),
        (object(), []),
    ],
    ids=[
        "tensor",
        "none",
        "string",
        "number",
        "empty",
        "tuple",
        "list_with_none",
        "named_tuple",
        "dict",
        "dataclass",
        "nested",
        "model_output",
        "another_object",
    ],
)
def test_tensors_in_finds_every_tensor_of_an_output_in_order(value: object, found: list[torch.Tensor]) -> None:
    assert [id(tensor) for tensor in tensors_in(value)] == [id(tensor) for tensor in found]


@dataclass(eq=False)
class FakeUnit:
    """The part of a unit's interface that the hooks use."""

    name: str
    modules: tuple[nn.Module, ...]
    trainable: bool
    params: list[nn.Parameter] = field(default_factory=list)
    taken: set[int] = field(default_factory=set)
    shared: bool = False
    uses: int = 0

    def guard_with(self, guard: ParameterGuard | None) -> None:
        if guard is not None:
            guard.open()

    def begin_use(self) -> None:
        self.uses += 1

    def end_use(self) -> None:
        self.uses -= 1

    def take_grad(self, index: int, *, sums_locally: bool) -> None:
        assert not sums_locally
        assert self.params[index].grad is not None
        self.taken.add(index)


class FakeSchedule:
    """Records the events in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.sums_locally = self.releases_in_forward = False
        self.in_backward = False
        self.backwards = 1

    def end_forward(self) -> None:
        """Not an event of a unit."""

    def __getattr__(self, event: str) -> Any:
        return lambda unit: self.events.append((event, unit.name))


def hooked() -> tuple[nn.Sequential, list[FakeUnit], FakeSchedule, ModuleHooks]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].requires_grad_(False)
    units = [FakeUnit(f"u{i}", (part,), i != 1, list(part.parameters())) for i, part in enumerate(model)]
    schedule = FakeSchedule()
    return model, units, schedule, ModuleHooks(model, units, schedule)  # type: ignore[arg-type]


def test_hooks_report_the_start_and_end_of_each_units_forward_and_backward() -> None:
    model, _, schedule, _ = hooked()
    loss = model(torch.ones(1, 2)).sum()
    forward = [(event, f"u{i}") for i in range(3) for event in ("before_unit_forward", "after_unit_forward")]
    forward += [("after_unit_forward", f"u{i}") for i in range(3)]  # end of the root: for units gathered but not used
    assert schedule.events == forward
    schedule.events.clear()
    schedule.in_backward = True
    loss.backward()
    assert schedule.events == [
        ("before_unit_backward", "u2"),
        ("after_unit_backward", "u2"),
        ("before_unit_backward", "u1"),
        ("after_unit_backward", "u1"),  # frozen: ends when the gradient of its input arrives
        ("before_unit_backward", "u0"),
        ("after_unit_backward", "u0"),
    ]


def test_only_trainable_units_receive_gradients() -> None:
    model, units, schedule, _ = hooked()
    loss = model(torch.ones(1, 2)).sum()
    schedule.in_backward = True
    loss.backward()
    assert [unit.taken for unit in units] == [{0, 1}, set(), {0, 1}]


def test_a_forward_under_no_grad_registers_no_backward_hooks() -> None:
    model, _, schedule, _ = hooked()
    with torch.no_grad():
        output = model(torch.ones(1, 2))
    assert len(schedule.events) == 6 + 3
    assert output._backward_hooks is None


def test_remove_removes_every_hook() -> None:
    model, units, schedule, hooks = hooked()
    hooks.remove()
    model(torch.ones(1, 2)).sum().backward()
    assert schedule.events == []
    assert [unit.taken for unit in units] == [set()] * 3
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
        assert type(module._parameters) is dict
    assert all(not param._post_accumulate_grad_hooks for param in model.parameters())


def test_remove_may_be_called_again() -> None:
    _, _, _, hooks = hooked()
    hooks.remove()
    hooks.remove()


def compiled_runs() -> dict[str, tuple[list[float], list[str]]]:
    """The losses of three steps at stage 3, and the warnings, by what is compiled before the runtime is made."""
    told: list[str] = []
    found = {}
    logging.getLogger("zero_runtime.compiled_models").addFilter(lambda one: not told.append(one.getMessage()))
    for compiled in ("", "the model", "a wrapper", "a block"):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        if compiled == "a wrapper":
            model = torch.compile(model, backend="eager")
        elif compiled:
            (model if compiled == "the model" else model[0]).compile(backend="eager")
        told.clear()
        settings, device = RuntimeSettings(), torch.device("cpu")
        runtime = ZeroRuntime(model, ZeroPlan.from_stage(3), MixedPrecision(), SgdConfig(), settings, device)
        losses = []
        for step in range(3):
            runtime.backward(runtime(torch.ones(4, 6) + step + dist.get_rank()).square().mean() / dist.get_world_size())
            losses.append(runtime.step(0.1).loss)
        runtime.close()
        found[compiled] = losses, told.copy()
    return found


def test_a_compiled_model_trains_as_the_eager_one_with_a_warning_that_it_gains_nothing() -> None:
    ranks = run_ranks(compiled_runs, 2)
    for rank, found in enumerate(ranks):
        assert found[""][1] == []
        names = {"the model": "Sequential", "a wrapper": "OptimizedModule", "a block": "0"}
        for compiled, name in names.items():
            losses, told = found[compiled]
            assert losses == found[""][0], compiled
            assert [one.startswith(f"compiled: {name}: the runtime's hooks") for one in told] == [True] * (rank == 0)
