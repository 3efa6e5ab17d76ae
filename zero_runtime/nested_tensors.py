"""Finds the tensors in the arguments and results of modules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass

import torch


def tensors_in(value: object) -> list[torch.Tensor]:
    """Every tensor in a module's arguments or result: a nesting of tensors, tuples, lists, dicts and dataclasses."""
    found: list[torch.Tensor] = []
    _collect((value,), found)
    return found


def _collect(values: Iterable[object], found: list[torch.Tensor]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, dict):
            _collect(value.values(), found)
        elif isinstance(value, (tuple, list)):
            _collect(value, found)
        elif is_dataclass(value) and not isinstance(value, type):
            _collect([getattr(value, item.name) for item in fields(value)], found)
