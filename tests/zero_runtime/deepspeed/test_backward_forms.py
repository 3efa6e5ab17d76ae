"""Every form in which scripts write a step: one or several backwards, of the engine or of the loss, told or counted.

DeepSpeed 0.19.8 on two CPU ranks gives the same weights at stages 1 to 3, but: stage 0 refuses `loss.backward()`, of
several backwards in a micro-batch stages 1 and 2 keep the last unless the boundary is told, a second loss with
retain_graph is an error at stage 3, no_sync is refused at stages 2 and 3, and gradients written by hand count at stage
0 alone, where each rank keeps its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from harness.ranks import run_alone, run_ranks
from harness.seed_loop import initialize_quietly
from torch import nn
from torch.utils.checkpoint import checkpoint

from zero_runtime.errors import CallOrderError, PlanError

WORLD, STEPS, LR = 2, 2, 0.125
Losses = Callable[[int], torch.Tensor]


class Failing(torch.autograd.Function):
    """Raises in backward, as a lack of memory does."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *_grads: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("as if")


class Sum(nn.Module):
    """Three linear layers side by side, of small binary fractions: every sum of two steps is exact in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randint(-2, 3, param.shape, generator=generator) / 2)
        self.fails = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](x)
        if self.fails == "forward":
            raise torch.OutOfMemoryError("as if")
        return (Failing.apply(first) if self.fails else first) + self.layers[1](x) + self.layers[2](x)


def batch_of(step: int, index: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * index + rank)
    return torch.randint(-2, 3, (2, 4), generator=generator).float()


def of_engine(engine: Any, loss: Losses) -> None:
    for index in range(2):
        engine.backward(loss(index))
        engine.step()


def of_loss(engine: Any, loss: Losses) -> None:
    for index in range(2):
        loss(index).backward()
        engine.step()


def of_scaled_loss(engine: Any, loss: Losses) -> None:
    for index in range(2):
        engine.scale(loss(index)).backward()
        engine.step()


def of_output(engine: Any, loss: Losses) -> None:
    output: torch.Tensor = loss(0).output  # type: ignore[attr-defined]
    output.backward(2 * output.detach() / output.numel())
    engine.step()


def several(engine: Any, loss: Losses) -> None:
    for index in range(3):
        engine.backward(loss(index))
    engine.step()


def unmanaged(engine: Any, loss: Losses) -> None:
    for index in range(3):
        engine.backward(loss(index))
    with pytest.raises(CallOrderError, match="managed_gradient_accumulation true, found false"):
        engine.set_gradient_accumulation_boundary(True)
    engine.step()
    assert engine.global_samples == 3 * 2 * WORLD * engine.global_steps


def several_in_each_micro_batch(engine: Any, loss: Losses) -> None:
    for index in range(4):
        engine.backward(loss(index))
        if index % 2:
            engine.step()


def of_both_kinds(engine: Any, loss: Losses) -> None:
    loss(0).backward()
    engine.backward(loss(1))
    loss(2).backward()
    engine.step()


def two_of_one_graph(engine: Any, loss: Losses) -> None:
    one = loss(0)
    engine.backward(one, retain_graph=True)
    engine.backward(2 * one)
    engine.step()


def told(engine: Any, loss: Losses) -> None:
    for index in range(3):
        engine.set_gradient_accumulation_boundary(index == 2)
        engine.backward(loss(index))
    engine.step()


def told_with_steps(engine: Any, loss: Losses) -> None:
    for index in range(3):
        engine.set_gradient_accumulation_boundary(index == 2)
        engine.backward(loss(index))
        engine.step()


def told_afterwards(engine: Any, loss: Losses) -> None:
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(loss(0))
    engine.set_gradient_accumulation_boundary(True)
    engine.step()


def by_accelerate(engine: Any, loss: Losses) -> None:
    from accelerate.utils.deepspeed import DeepSpeedEngineWrapper

    for index in range(2):
        DeepSpeedEngineWrapper(engine).backward(loss(index), sync_gradients=index == 1)


def no_sync(engine: Any, loss: Losses) -> None:
    with engine.no_sync():
        for index in range(2):
            engine.backward(loss(index))
            with pytest.raises(CallOrderError, match=r"illegal to call Engine\.step"):
                engine.step()
    engine.backward(loss(2))
    engine.step()


def no_sync_alone(engine: Any, loss: Losses) -> None:
    with engine.no_sync():
        engine.backward(loss(0))
    engine.allreduce_gradients()
    engine.step()


def no_sync_around_all(engine: Any, loss: Losses) -> None:
    engine.runtime.reset_ledger()
    with engine.no_sync():
        for index in range(3):
            engine.backward(loss(index))
        with pytest.raises(CallOrderError, match="no_sync context"), engine.no_sync():
            pass
        assert {*engine.runtime.reset_ledger().data} <= {"all_gather"}
    engine.step()


def a_micro_batch_without_backward(engine: Any, loss: Losses) -> None:
    engine.backward(loss(0))
    engine.step()
    engine.step()


def begun_anew(engine: Any, loss: Losses) -> None:
    engine.backward(loss(0))
    engine.zero_grad()
    engine.backward(loss(1))
    engine.optimizer.zero_grad()
    engine.backward(loss(2))
    engine.step()


def failed(engine: Any, loss: Losses) -> None:
    """The second micro-batch fails, and the step is repeated with others; a forward that fails is repeated alone."""
    engine.backward(loss(0))
    engine.step()
    engine.module.fails = "forward"
    with pytest.raises(torch.OutOfMemoryError, match="as if"):
        loss(1)
    for backward in (engine.backward, torch.Tensor.backward):
        engine.module.fails = "backward"
        one = loss(1)
        with pytest.raises(torch.OutOfMemoryError, match="as if"):
            backward(one)
        engine.module.fails = ""
        for call in (lambda: engine.backward(loss(1)), lambda: loss(1).backward()):
            with pytest.raises(CallOrderError, match=r"the last backward ended with an error.*zero_grad"):
                call()
        engine.zero_grad()
    of_engine(engine, loss)


def by_hand(engine: Any, loss: Losses) -> None:
    grads = torch.autograd.grad(loss(0), list(engine.module.parameters()))
    for param, grad in zip(engine.module.parameters(), grads, strict=True):
        param.grad = grad
    engine.step()


def with_other_sizes(engine: Any, loss: Losses) -> None:
    engine.set_train_batch_size(8)
    of_engine(engine, loss)


class Form(NamedTuple):
    """A way to write a step. accumulation: of the configuration. terms: the plain loss is the sum of these losses, each
    times its factor."""

    write: Callable[[Any, Losses], None]
    accumulation: int
    terms: Sequence[tuple[int, float]]
    stages: Sequence[int] = (0, 1, 2, 3)
    managed: bool = True


HALVES = [(0, 0.5), (1, 0.5)]
THREE = [(0, 1.0), (1, 1.0), (2, 1.0)]
FORMS = [
    Form(of_engine, 2, HALVES),
    Form(of_loss, 2, HALVES),
    Form(of_scaled_loss, 2, HALVES),
    Form(of_output, 1, [(0, 1.0)]),
    Form(several, 1, THREE),
    Form(unmanaged, 2, [(index, 0.5) for index in range(3)], managed=False),
    Form(several_in_each_micro_batch, 2, [(index, 0.5) for index in range(4)]),
    Form(of_both_kinds, 1, THREE),
    Form(two_of_one_graph, 1, [(0, 3.0)]),
    Form(told, 1, THREE),
    Form(told_with_steps, 2, [(index, 0.5) for index in range(3)]),
    Form(told_afterwards, 4, [(0, 0.25)]),
    Form(by_accelerate, 2, HALVES),
    Form(no_sync, 1, THREE),
    Form(no_sync_alone, 1, [(0, 1.0)]),
    Form(no_sync_around_all, 1, THREE),
    Form(a_micro_batch_without_backward, 2, [(0, 0.5)]),
    Form(begun_anew, 1, [(2, 1.0)]),
    Form(failed, 2, HALVES),
    Form(by_hand, 1, [(0, 1.0)], (0, 1, 2)),
    Form(with_other_sizes, 1, HALVES),
]


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    output = model(x)
    loss = output.square().mean()
    loss.output = output  # type: ignore[attr-defined]  # for `of_output`
    return loss


def plain(form: Form) -> dict[str, torch.Tensor]:
    model = Sum()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(STEPS):
        for rank in range(WORLD):
            for index, factor in form.terms:
                (loss_of(model, batch_of(step, index, rank)) * factor / WORLD).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def trained(form: Form, stage: int) -> dict[str, torch.Tensor]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": form.accumulation,
        "managed_gradient_accumulation": form.managed,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = initialize_quietly(model=Sum(), config=config)
    for step in range(STEPS):
        form.write(engine, lambda index, step=step: loss_of(engine, batch_of(step, index, dist.get_rank())))
        assert engine.was_step_applied()
        assert engine.global_steps == step + 1
        whole = [unit.name for unit in engine.runtime.units if unit.parameters.unsharded_param.untyped_storage().size()]
        assert stage < 3 or whole == [], "all parameters are released between steps"
    with engine.runtime.full_params() as values:
        found = {name: value.clone() for name, value in values.items()}
    engine.destroy()
    return found


def all_forms() -> None:
    for form in FORMS:
        expected = plain(form)
        for stage in form.stages:
            found = trained(form, stage)
            for name, value in expected.items():
                assert torch.equal(found[name], value), (form.write.__name__, stage, name)


def test_every_form_of_a_step_trains_as_plain_torch_does() -> None:
    run_ranks(all_forms, WORLD)


class Blocks(nn.Module):
    """Blocks whose forward is run again in backward; the second is frozen."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.blocks[1].requires_grad_(False)
        self.last = nn.Linear(6, 2)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.last(x)


def through_blocks(stage: int, *, use_reentrant: bool, of_loss: bool) -> tuple[dict[str, torch.Tensor], Any]:
    """The weights after two steps of two micro-batches, and what was sent."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = initialize_quietly(model=Blocks(use_reentrant=use_reentrant), config=config)
    engine.runtime.reset_ledger()
    for step in range(2):
        for index in range(2):
            loss = engine(batch_of(step, index, dist.get_rank())).square().mean()
            loss.backward() if of_loss else engine.backward(loss)
            engine.step()
    sent = engine.runtime.reset_ledger()
    with engine.runtime.full_params() as values:
        found = {name: value.clone() for name, value in values.items()}
    engine.destroy()
    return found, sent


def both_ways_through_blocks() -> None:
    for stage in range(4):
        for use_reentrant in (False, True):
            (weights, sent), (others, others_sent) = (
                through_blocks(stage, use_reentrant=use_reentrant, of_loss=of_loss) for of_loss in (False, True)
            )
            assert sent == others_sent, (stage, use_reentrant)
            for name, value in weights.items():
                assert torch.equal(value, others[name]), (stage, use_reentrant, name)


def test_a_backward_of_the_loss_has_the_bits_and_the_messages_of_the_engines_with_checkpointing_too() -> None:
    run_ranks(both_ways_through_blocks, WORLD)


def one_loss_of_two_engines(*, of_loss: bool) -> None:
    """A sum of losses trains both engines, whichever backward is called."""
    for stage in range(4):
        engines = [engine_of(zero_optimization={"stage": stage}) for _ in range(2)]
        models = [Sum() for _ in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=LR) for model in models]
        for step in range(STEPS):
            x = batch_of(step, 0, 0)
            plain_loss, loss = (loss_of(a, x) + loss_of(b, 2 * x) for a, b in (models, engines))
            plain_loss.backward()
            loss.backward() if of_loss else engines[0].backward(loss)
            for one in (*optimizers, *engines):
                one.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        for engine, model in zip(engines, models, strict=True):
            with engine.runtime.full_params() as values:
                assert all(torch.equal(values[name], param) for name, param in model.named_parameters()), stage
            engine.destroy()


# ---- what is refused -------------------------------------------------------------------------------------------------


def engine_of(**more: Any) -> Any:
    sgd = {"type": "SGD", "params": {"lr": LR}}
    config = {"train_batch_size": 2, "gradient_clipping": 0.0, "optimizer": sgd, **more}
    return initialize_quietly(model=Sum(), config=config)[0]


def refused_forms() -> None:
    engine, x = engine_of(), torch.ones(2, 4)
    before = engine.module.layers[0].weight.clone()
    with pytest.raises(CallOrderError, match="since the last step, found none"):
        engine.step()
    with pytest.raises(PlanError, match="scalar tensor"):
        engine.scale(engine(x))
    torch.autograd.grad(engine(x).sum(), engine.module.layers[0].weight)  # leaves no gradients, so it is no backward
    assert not engine.runtime.backwards.has_gradients
    engine.backward(engine(x).mean())
    engine.module.layers[0].weight.grad = torch.ones(2, 4)
    with pytest.raises(CallOrderError, match=r"'layers\.0\.weight'.*written by hand"):
        engine.step()
    with engine.no_sync(), pytest.raises(CallOrderError, match="reentry"), engine.no_sync():
        pass
    assert torch.equal(engine.module.layers[0].weight, before)


def half_precision() -> None:
    """As DeepSpeed 0.19.8: a loss that is not scaled is refused."""
    for scale in (0, 4096):
        found = []
        for form in ("engine", "scale"):
            engine = engine_of(fp16={"enabled": True, "auto_cast": True, "loss_scale": scale, "initial_scale_power": 4})
            loss = engine(torch.ones(2, 4)).mean()
            with pytest.raises(CallOrderError, match="Loss scaling is required"):
                loss.backward(retain_graph=True)
            engine.backward(loss) if form == "engine" else engine.scale(loss).backward()
            engine.step()
            assert engine.was_step_applied()
            found.append(engine.module.layers[0].weight.clone())
        assert torch.equal(*found)


def in_one_process() -> None:
    one_loss_of_two_engines(of_loss=True)
    one_loss_of_two_engines(of_loss=False)
    refused_forms()
    half_precision()


def test_one_loss_may_train_two_engines_and_forms_that_would_lose_gradients_are_refused() -> None:
    run_alone(in_one_process)
