"""Exact arithmetic has the same bits in every row and world; and the arithmetic of the harness is exact in fp32."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from harness.exact import LION, SGD, Row, inputs, loss_of, plain, rows_of, wrong_rows
from harness.exact import ExactModel as Model
from harness.ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

BITS = 24  # of fp32's significand
WORLDS = [pytest.param(world, marks=() if world == 8 else pytest.mark.full) for world in (1, 2, 3, 4, 8)]
MOVES = {"empty", "rand", "randint", "uniform_", "random_", "zero_", "fill_"}  # no arithmetic, or of no result


def test_every_row_has_the_bits_of_plain_torch_in_fp64() -> None:
    assert run_ranks(wrong_rows, 2, rows_of(2), torch.device("cpu")) == [[], []]


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 3, 4])
def test_the_rows_of_other_worlds_and_of_hybrid_sharding(world: int) -> None:
    assert run_ranks(wrong_rows, world, rows_of(world), torch.device("cpu")) == [[]] * world


def halvings(tensor: torch.Tensor) -> int:
    """The smallest k such that all elements are multiples of 2^-k."""
    count = 0
    while not torch.equal(tensor, tensor.round()):
        tensor, count = tensor * 2, count + 1
    return count


class SumBits(TorchDispatchMode):
    """Finds the bits that the largest sum of absolute values needs, over all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self.operations = 0.0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = function(*args, **(kwargs or {})), function.overloadpacket.__name__
        if name in ("mm", "addmm"):
            left, right = args[-2:]
            bias = args[0] if name == "addmm" else torch.zeros(())
            sums = left.abs() @ right.abs() + bias.abs()
            self._need(sums, max(halvings(left) + halvings(right), halvings(bias)))
        elif name == "sum":
            self._need(args[0].abs().sum(*args[1:]), halvings(args[0]))
        elif isinstance(result, torch.Tensor) and result.is_floating_point() and name not in MOVES:
            self._need(result, halvings(result))
        return result

    def _need(self, sums: torch.Tensor, below: int) -> None:
        self.operations += 1
        self.most = max(self.most, math.log2(max(float(sums.abs().max()), 1e-9)) + below)


@pytest.mark.parametrize(
    "row", [Row(0, SGD), Row(0, LION), Row(0, LION, micro_batches=3)], ids=["sgd", "lion", "micro"]
)
@pytest.mark.parametrize("world", WORLDS)
def test_no_sum_of_absolute_values_needs_more_bits_than_fp32_has(row: Row, world: int) -> None:
    with SumBits() as bits:
        plain(row, world)
    assert bits.operations > 100
    assert bits.most <= BITS


@pytest.mark.parametrize("world", WORLDS)
def test_gradients_may_be_summed_over_ranks_in_any_order(world: int) -> None:
    totals, below = [], 0
    for rank in range(world):
        model = Model().double()
        loss_of(model, *(one.double() for one in inputs(0, rank, 0))).backward()
        grads = torch.cat([param.grad.flatten() for param in model.parameters() if param.grad is not None])
        totals.append(grads.abs())
        below = max(below, halvings(grads))
    assert math.log2(float(torch.stack(totals).sum(0).max())) + below <= BITS
