"""Predicted activations of normalizations are those of CUDA's kernels on a GPU, and those of a CPU on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from zero_runtime.activations.rule import RecomputeKind, RecomputeRule
from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.memory.activation_count import ActivationBytes
from zero_runtime.predict.memory.activation_trace import trace_step
from zero_runtime.unit_planner import UnitRules

WIDTH, ROWS, BLOCKS = 16, 32, 5
NORMS = BLOCKS + 1  # the last one is outside of the blocks
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
Make = Callable[[], nn.Module]
KINDS: dict[str, tuple[Make, int, int]] = {  # a norm, its statistics of each row, and its parameters
    "layer": (lambda: nn.LayerNorm(WIDTH), 2, 2),
    "rms": (lambda: nn.RMSNorm(WIDTH), 1, 1),
}


class Block(nn.Module):
    def __init__(self, make: Make) -> None:
        super().__init__()
        self.norm = make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


class Norms(nn.Module):
    """An embedding, so that the first norm has an input that is counted, and norms alone."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, WIDTH)
        self.blocks = nn.ModuleList(Block(make) for _ in range(BLOCKS))
        self.last = make()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def counted(make: Make, dtype: str, kind: RecomputeKind = "none", *, on_cuda: bool = True) -> ActivationBytes:
    with torch.device("meta"):
        model = Norms(make)
    ids = torch.zeros(ROWS, dtype=torch.int64)
    rules = UnitRules(MixedPrecision(dtype))
    rule = RecomputeRule(kind)
    return trace_step(model, rules, rule, [ids], lambda model, ids: model(ids).sum(), on_cuda=on_cuda).total()


@pytest.mark.parametrize("norm", KINDS)
@pytest.mark.parametrize("dtype", BYTES)
def test_a_norm_keeps_its_input_and_statistics_in_fp32(norm: str, dtype: str) -> None:
    """The worst moment is in the backward of the last norm: it creates the gradients of its input and parameters."""
    make, statistics, parameters = KINDS[norm]
    found, item = counted(make, dtype), BYTES[dtype]
    values, numbers = ROWS * WIDTH * item, ROWS * statistics * 4
    assert found.kept == NORMS * (values + numbers)
    assert found.peak == found.kept + values + parameters * WIDTH * item


@pytest.mark.parametrize("norm", KINDS)
def test_norms_that_are_recomputed_keep_their_input(norm: str) -> None:
    make, statistics, _ = KINDS[norm]
    assert counted(make, "bf16", "full").kept == NORMS * ROWS * WIDTH * 2 + ROWS * statistics * 4


def test_the_cpus_layer_norm_keeps_statistics_in_the_inputs_dtype() -> None:
    make, statistics, _ = KINDS["layer"]
    assert counted(make, "bf16", on_cuda=False).kept == NORMS * (ROWS * WIDTH * 2 + ROWS * statistics * 2)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_a_norm_in_another_dtype_than_its_weight_is_composed_on_cuda_too() -> None:
    class Mixed(nn.RMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.rms_norm(x.double(), self.normalized_shape, self.weight).to(x.dtype)

    def make() -> nn.Module:
        return Mixed(WIDTH)

    assert counted(make, "bf16") == counted(make, "bf16", on_cuda=False)


def test_channels_in_another_order_are_composed_on_cuda_too() -> None:
    class Channels(nn.RMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            image = x.view(2, 2, -1, WIDTH).to(memory_format=torch.channels_last)
            return F.rms_norm(image, self.normalized_shape, self.weight).reshape(x.shape)

    def make() -> nn.Module:
        return Channels(WIDTH)

    assert counted(make, "bf16") == counted(make, "bf16", on_cuda=False)
