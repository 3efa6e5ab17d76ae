"""Predicted activations include the sources of copies to the host that the device still holds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zero_runtime.activations.rule import RecomputeRule
from zero_runtime.offload import copy_streams
from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.memory.activation_trace import trace_step
from zero_runtime.unit_planner import UnitRules

WIDTH, ROWS, BLOCKS = 16, 32, 5
INPUT_BYTES = ROWS * WIDTH * 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).tanh()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def kept(held: int | None, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes on the device after the forward, with `held` sources; None: without offload."""
    if held is not None:
        monkeypatch.setattr(copy_streams, "HELD_SOURCES", held)
    with torch.device("meta"):
        model = Stack()
    rule = RecomputeRule("full", offload="none" if held is None else "cpu")
    x = torch.zeros(ROWS, WIDTH)
    rules = UnitRules(MixedPrecision())
    return trace_step(model, rules, rule, [x], lambda model, x: model(x).sum(), on_cuda=True).total().kept


def test_after_a_forward_the_last_sources_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every block keeps its input; that of the first one is the model's input, which is not counted.
    assert kept(None, monkeypatch) == (BLOCKS - 1) * INPUT_BYTES
    assert [kept(held, monkeypatch) for held in (1, 2, 3)] == [INPUT_BYTES, 2 * INPUT_BYTES, 3 * INPUT_BYTES]
