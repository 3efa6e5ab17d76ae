"""Units are reduced in the reverse of the order in which rank 0 first used them, whatever the order of registration."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness.oracle import ADAMW
from harness.plain_optimizers import plain_optimizer
from harness.ranks import run_ranks
from test_schedule import WIDTH, Branch, Rehearsal, inputs, small_runtime
from torch import nn

from zero_runtime.runtime import ZeroRuntime
from zero_runtime.unit import Unit


def test_units_are_reduced_in_the_reverse_of_their_first_uses_and_unused_ones_last() -> None:
    rehearsal = Rehearsal(2, 0)
    for unit in (rehearsal.units[2], rehearsal.units[0], rehearsal.units[2]):
        rehearsal.schedule.before_unit_forward(unit)  # type: ignore[arg-type]
    order = rehearsal.schedule.own_reduction_order
    assert order == [0, 2, 1]
    rehearsal.schedule.set_reduction_order(order)
    assert rehearsal.schedule.own_reduction_order is None
    rehearsal.backward()
    assert rehearsal.said("reduce") == ["reduce a", "reduce c", "reduce b"]


def test_frozen_units_have_no_place_in_the_order_of_reductions() -> None:
    rehearsal = Rehearsal(2, 0, frozen="b")
    rehearsal.forward()
    assert rehearsal.schedule.own_reduction_order == [2, 0]


# ---- a model that registers its embedding last -----------------------------------------------------------------------


class EmbeddingLast(nn.Module):
    """Units are registered in the order blocks, embed, and the embedding completes last."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            self.blocks = nn.ModuleList(Branch() for _ in range(4))
            self.embed = nn.Embedding(7, WIDTH)

    def forward(self, x: torch.Tensor, partial: tuple[int, ...] = ()) -> torch.Tensor:
        y = self.embed(x.abs().long() % 7)
        for index, block in enumerate(self.blocks):
            y = block(y, index not in partial)
        return y.square().sum() / 100


def _reduces_as_completed(partial_rank: int) -> tuple[list[list[str]], list[int], list[float]]:
    """By step: the units in the order of their reductions, and the largest number of full gradients at one time."""
    rank = dist.get_rank()
    runtime = small_runtime(EmbeddingLast(), 2)
    orders, most, losses = [], [], []
    for step in range(3):
        partial = (3,) if rank == partial_rank and step == 0 else ()
        counts = _full_gradients(runtime)
        runtime.backward(runtime(inputs(step, rank), partial))
        most.append(max(counts))
        ops = runtime.collectives.journal.read()[1]
        orders.append([op.unit for op in ops if op.kind == "reduce_scatter" and op.step == step + 1])
        losses.append(runtime.step(1e-2).loss)
    return orders, most, losses


def _full_gradients(runtime: ZeroRuntime) -> list[int]:
    """Counts the full gradients at each release of a unit in the next backward."""
    counts: list[int] = []
    after = runtime._schedule.after_unit_backward

    def counting(unit: Unit) -> None:
        counts.append(sum(one.gradients.unsharded_grad is not None for one in runtime.units))
        after(unit)

    runtime._schedule.after_unit_backward = counting  # type: ignore[method-assign]
    return counts


@pytest.mark.parametrize("partial_rank", [-1, 1, pytest.param(0, marks=pytest.mark.full)])
def test_an_embedding_that_is_registered_last_holds_back_no_reduction(partial_rank: int) -> None:
    found = run_ranks(_reduces_as_completed, 2, partial_rank)
    as_completed = ["blocks.3", "blocks.2", "blocks.1", "blocks.0", "embed"]
    for orders, most, losses in found:
        assert orders == [as_completed] * 3
        assert most == [2, 2, 2], "in the reverse of registration all five full gradients would exist"
        assert losses == found[0][2]
    model, wanted = EmbeddingLast(), []
    optimizer = plain_optimizer(ADAMW, dict(model.named_parameters()), 1e-2)
    for step in range(3):
        model.zero_grad()
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        per_rank = [model(inputs(step, rank), (3,) if (rank, step) == (partial_rank, 0) else ()) for rank in (0, 1)]
        for loss in per_rank:
            loss.backward()
        wanted.append(sum(float(loss.detach()) for loss in per_rank))
        optimizer.step()
    assert found[0][2] == wanted
