"""Turns what nn.Module and autograd report into the schedule's events; the only file that registers hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial

import torch
from torch import nn

from zero_runtime.schedule import Schedule
from zero_runtime.unit import Unit


class ModuleHooks:
    """Hooks of all units; `remove` takes every one of them off again."""

    def __init__(self, units: list[Unit], schedule: Schedule) -> None:
        self._schedule = schedule
        self._handles = [handle for unit in units for handle in self._attach(unit)]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _attach(self, unit: Unit) -> Iterator[torch.utils.hooks.RemovableHandle]:
        yield unit.module.register_forward_pre_hook(partial(self._before_forward, unit))
        yield unit.module.register_forward_hook(partial(self._after_forward, unit))
        if unit.trainable:
            for index, param in enumerate(unit.params):
                yield param.register_post_accumulate_grad_hook(self._grad_hook(unit, index))

    def _before_forward(self, unit: Unit, _module: nn.Module, _args: object) -> None:
        self._schedule.before_forward(unit)

    def _after_forward(self, unit: Unit, _module: nn.Module, _args: object, output: object) -> None:
        self._schedule.after_forward(unit)
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._before_backward, unit))

    def _before_backward(self, unit: Unit, _grad: torch.Tensor) -> None:
        self._schedule.before_backward(unit)

    def _grad_hook(self, unit: Unit, index: int) -> Callable[[torch.Tensor], None]:
        def hook(_param: torch.Tensor) -> None:
            if unit.take_grad(index, sums_locally=self._schedule.sums_locally):
                self._schedule.after_backward(unit)

        return hook


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Every tensor inside what a module may return: a tensor, tuple, list, dict, dataclass or None, nested."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value):
        for item in fields(value):
            yield from tensors_in(getattr(value, item.name))
