"""Ranks that skip a module: if it is declared, they train as plain torch does; else all end and name both units."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.hidden_outputs import Carrier, PlainCarryingLayer
from harness.outcomes import rank_outcomes
from harness.plain_optimizers import AdamW
from harness.ranks import run_ranks
from harness.shapes import WIDTH, Base, Layer, ids_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from zero_runtime import optional_modules
from zero_runtime.errors import PlanError, RankError
from zero_runtime.optim.configs import AdamWConfig
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime
from zero_runtime.watch.watch import RankWatch

STAGES, STEPS, WORLD = (0, 1, 2, 3), 4, 2
LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.95), 1e-8, 0.1


class Tower(nn.Module):
    """Blocks of the size of the model's, and a projection; returns a tensor."""

    layer: type[nn.Module] = Layer

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.layer() for _ in range(2))
        self.project = nn.Linear(WIDTH, WIDTH)

    def run_block(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            image = self.run_block(block, image)
        return self.project(image).mean(1, keepdim=True)


class CarryingTower(Tower):
    layer = PlainCarryingLayer

    def run_block(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(Carrier(x)).x


class CheckpointedTower(Tower):
    def run_block(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=False)


class ReentrantTower(Tower):
    def run_block(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x.requires_grad_() if x.is_leaf else x, use_reentrant=True)


class FrozenTower(Tower):
    """Gradients pass through its second block to an adapter before it."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.blocks[1], self.project):
            part.requires_grad_(False)


class Seeing(Base):
    """Reads images with a tower, first or last; a batch may have none."""

    def __init__(self, tower: type[Tower] = Tower, *, last: bool = False) -> None:
        super().__init__()
        self.tower, self.last = tower(), last

    def forward(self, ids: torch.Tensor, image: torch.Tensor | None = None) -> Any:
        x = self.embed(ids)
        if image is not None and not self.last:
            x = x + self.tower(image)
        x = self.run_blocks(x)
        if image is not None and self.last:
            x = x + self.tower(x.detach() + image[:, :1])
        return self.head(self.norm(x))


CASES: dict[str, tuple[type[Tower], bool]] = {
    "first": (Tower, False),
    "last": (Tower, True),
    "hidden": (CarryingTower, False),
    "checkpointed": (CheckpointedTower, False),
    "reentrant": (ReentrantTower, False),
    "frozen": (FrozenTower, True),
}
ALSO = [name for name in CASES if name != "hidden"]
# By step and rank, whether the batch has an image.
IMAGES = ((True, False), (False, True), (False, False), (True, True))


def build(name: str) -> Seeing:
    torch.manual_seed(0)
    tower, last = CASES[name]
    return Seeing(tower, last=last)


def batch_of(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    noise = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(100 + 10 * step + rank))
    return ids_of(step, rank), noise if IMAGES[step][rank] else None


@cache
def plain(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights; gradients are summed in rank order, and one that is missing is zero."""
    torch.set_num_threads(1)
    model, losses = build(name), []
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = AdamW(trained, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    for step in range(STEPS):
        grads, total = [], 0.0
        for rank in range(WORLD):
            loss = model.loss_of(model(*batch_of(step, rank))) / WORLD
            loss.backward()
            total += float(loss.detach())
            grads.append([torch.zeros_like(p) if p.grad is None else p.grad for p in trained])
            model.zero_grad()
        losses.append(total)
        for index, param in enumerate(trained):
            param.grad = grads[0][index] + grads[1][index]
        optimizer.step()
        model.zero_grad()
    return losses, {key: param.detach() for key, param in model.named_parameters()}


def make(stage: int, model: nn.Module, watch: RankWatch | None = None) -> ZeroRuntime:
    config = AdamWConfig(BETAS[0], BETAS[1], EPS, DECAY, no_decay=False)
    settings = RuntimeSettings(watch=watch)
    return ZeroRuntime(model, ZeroPlan.from_stage(stage), MixedPrecision(), config, settings, torch.device("cpu"))


def train_stages(name: str) -> dict[int, tuple[list[float], dict[str, torch.Tensor]]]:
    """Losses and weights by stage. Each step follows an evaluation."""
    found, rank = {}, dist.get_rank()
    for stage in STAGES:
        model, losses = build(name), []
        optional_modules(model, [model.tower])
        runtime = make(stage, model)
        for step in range(STEPS):
            with torch.no_grad():
                runtime(*batch_of((step + 1) % STEPS, rank))
            runtime.backward(model.loss_of(runtime(*batch_of(step, rank))) / WORLD)
            losses.append(runtime.step(LR).loss)
        with runtime.full_params() as weights:
            found[stage] = losses, {key: value.clone() for key, value in weights.items()}
        runtime.close()
    return found


@pytest.mark.parametrize("name", ["hidden", *(pytest.param(name, marks=pytest.mark.full) for name in ALSO)])
def test_declared_modules_that_some_ranks_skip_train_as_in_plain_torch_at_every_stage(name: str) -> None:
    for by_rank in run_ranks(train_stages, WORLD, name):
        for stage, (losses, weights) in by_rank.items():
            assert losses == plain(name)[0], stage
            for key, value in plain(name)[1].items():
                assert torch.equal(weights[key], value), (stage, key)


def refuse_late_and_strange() -> None:
    model = build("first")
    with pytest.raises(PlanError, match="expected modules of the Seeing, found a Linear"):
        optional_modules(model, [nn.Linear(2, 2)])
    runtime = make(3, model)
    with pytest.raises(PlanError, match="one that is in use"):
        optional_modules(model, [model.tower])
    runtime.close()


def test_a_module_of_another_model_and_a_late_declaration_are_refused() -> None:
    run_ranks(refuse_late_and_strange, 1)


# ---- modules that were not declared ----------------------------------------------------------------------------------


def skips_in_training(watch: RankWatch) -> None:
    model = build("first")
    runtime = make(3, model, watch)
    for step in range(STEPS):
        runtime.backward(model.loss_of(runtime(*batch_of(step, dist.get_rank()))))
        runtime.step(LR)


def skips_in_evaluation(watch: RankWatch) -> None:
    """After a step in which all ranks had images; the units that meet are of one size."""
    model = build("first")
    runtime = make(3, model, watch)
    runtime.backward(model.loss_of(runtime(*batch_of(3, dist.get_rank()))))
    runtime.step(LR)
    with torch.no_grad():
        runtime(*batch_of(0, dist.get_rank()))
    raise AssertionError("the evaluation had a result")


@pytest.mark.parametrize("function", [skips_in_training, skips_in_evaluation])
def test_ranks_that_call_different_modules_all_end_with_both_units_named(function: Any) -> None:
    for outcome in rank_outcomes(function, WORLD):
        assert outcome.how in ("raised", "ended"), outcome
        assert "the ranks differ in collective gather" in outcome.text, outcome
        assert "all_gather of unit tower." in outcome.text
        assert "all_gather of unit blocks.0" in outcome.text
        assert "zero_runtime.optional_modules(model, [module])" in outcome.text


def compared_at_the_end(watch: RankWatch) -> None:
    """As over NCCL, which does not separate units of one size: the ranks compare what they issued."""
    model = build("first")
    runtime = make(3, model, watch)
    runtime.collectives.places.clear()
    runtime.collectives.mixes_units = True
    with torch.no_grad():
        runtime(*batch_of(3, dist.get_rank()))
        with runtime.uneven_forwards():
            runtime(*batch_of(0, dist.get_rank()))
        blocks = [*model.blocks] if dist.get_rank() else [model.blocks[1], model.blocks[0], model.blocks[2]]
        model.blocks = nn.ModuleList(blocks)
        with pytest.raises(RankError, match=r"(?s)all_gather of unit blocks\.1.*all_gather of unit blocks\.0"):
            runtime(*batch_of(3, dist.get_rank()))
    raise RuntimeError("compared")


def test_where_units_of_one_size_may_mix_an_evaluation_ends_before_its_output_is_seen() -> None:
    for outcome in rank_outcomes(compared_at_the_end, WORLD):
        assert "compared" in outcome.text or "blocks.1" in outcome.text, outcome
