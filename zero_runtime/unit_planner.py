"""Which parameters form a unit: those that are gathered, reduced and released together.

A unit is a repeated block (a member of an `nn.ModuleList` of one class), an embedding or output head that shares no
weight, or the rest of the model under its root. A parameter used by several modules belongs to the lowest common
ancestor of its users, once. Each unit has one `requires_grad`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from zero_runtime.errors import PlanError

ROOT = ""


@dataclass(frozen=True)
class UnitSpec:
    """A unit before it has any bytes: the module whose calls bound its life, and its parameters by name."""

    name: str
    module: nn.Module
    params: tuple[tuple[str, nn.Parameter], ...]
    trainable: bool


def plan_units(model: nn.Module) -> list[UnitSpec]:
    """Split the model's parameters into units, in the order in which the model registers them."""
    _refuse_unsupported(model)
    users = _users_by_parameter(model)
    boundaries = _unit_modules(model, users)
    members: dict[tuple[str, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, param in model.named_parameters():  # a tied parameter comes once, under its first name
        owner = _owner(users[id(param)], boundaries)
        members.setdefault((owner, param.requires_grad), []).append((name, param))
    return [
        UnitSpec(
            name=(owner or "root") + ("" if trainable else " (frozen)"),
            module=model.get_submodule(owner),
            params=tuple(params),
            trainable=trainable,
        )
        for (owner, trainable), params in members.items()
    ]


def _refuse_unsupported(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if type(param) not in (nn.Parameter, FakeTensor):  # fake parameters are how a step is run dry
            raise PlanError(
                f"parameter {name!r} is a {type(param).__name__}: expected a plain nn.Parameter; "
                "shard or quantise through the runtime, not before it"
            )
        if not param.is_floating_point():
            raise PlanError(f"parameter {name!r} has dtype {param.dtype}: expected a floating-point dtype")


def _users_by_parameter(model: nn.Module) -> dict[int, list[str]]:
    """Paths of the modules that register each parameter, by the parameter's identity."""
    users: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for param in module.parameters(recurse=False):
            users.setdefault(id(param), []).append(path)
    return users


def _unit_modules(model: nn.Module, users: dict[int, list[str]]) -> set[str]:
    blocks = set(_repeated_blocks(model))
    ends = {
        path
        for path, module in model.named_modules()
        # Subclasses may have their weights read without being called (as nn.MultiheadAttention does to its out_proj):
        # no hook of theirs would then gather them.
        if type(module) in (nn.Embedding, nn.Linear)
        and not any(_inside(path, block) for block in blocks)
        and all(len(users[id(param)]) == 1 for param in module.parameters())
    }
    return blocks | ends


def _repeated_blocks(model: nn.Module) -> Iterator[str]:
    """Members of outermost module lists in which every member has the same class."""
    outermost: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(_inside(path, seen) for seen in outermost):
            continue
        # A list is never called itself, so a list of lists has its blocks further down.
        if len(module) > 1 and len({type(block) for block in module}) == 1 and not _is_container(module[0]):
            outermost.append(path)
            yield from (f"{path}.{index}" for index in range(len(module)))


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _owner(users: list[str], boundaries: set[str]) -> str:
    """The innermost unit module that contains every user of a parameter; the root contains all."""
    path = users[0]
    while path != ROOT:
        if path in boundaries and all(_inside(user, path) for user in users):
            return path
        path = path.rpartition(".")[0]
    return ROOT


def _inside(path: str, ancestor: str) -> bool:
    return path == ancestor or path.startswith(ancestor + ".")


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Put the model's buffers on the device; they keep their dtypes (rotary frequencies need fp32)."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, buffer.to(device), persistent=name not in module._non_persistent_buffers_set)
