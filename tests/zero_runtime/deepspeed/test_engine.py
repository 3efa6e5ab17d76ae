"""The engine finds step boundaries and handles skipped steps, and initialize refuses invalid arguments."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.ranks import run_alone, run_ranks
from harness.seed_loop import initialize_quietly
from torch import nn

import zero_runtime
from zero_runtime.errors import CallOrderError, NonFiniteError, PlanError


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def boundaries() -> None:
    model = nn.Linear(4, 4)
    config = {"train_batch_size": 6, "gradient_accumulation_steps": 3, "gradient_clipping": 1e-3}
    engine, view, loader, _ = initialize_quietly(model=model, config=config, training_data=torch.randn(7, 4))
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (6, 2)
    assert [len(rows) for rows in loader] == [2, 2, 2, 1]
    assert engine.get_global_grad_norm() is None
    assert engine.train() is engine
    assert model.training
    engine.eval()
    assert not model.training
    before = model.weight.detach().clone()
    for call in range(1, 7):
        assert engine.is_gradient_accumulation_boundary() is (call % 3 == 0)
        engine.backward(engine(torch.randn(2, 4)).square().mean())
        if call % 3 != 1:
            with pytest.raises(CallOrderError, match="leave it out"):
                engine.zero_grad()
        with pytest.raises(CallOrderError, match="knows the boundary"):
            view.step()
        engine.step()
        assert (engine.micro_steps, engine.global_steps) == (call, call // 3)
        assert engine.was_step_applied() is (call % 3 == 0), "DeepSpeed 0.19.8: F F T F F T"
        assert torch.equal(model.weight, before) is (call < 3)
    engine.zero_grad()
    assert engine.get_global_grad_norm() > 1e-3  # before clipping
    assert engine.global_samples == 12
    assert [tuple(param.shape) for param in engine.parameters()] == [(4, 4), (4,)]
    with pytest.raises(AttributeError, match="states move by the configuration"):
        _ = engine.offload_states
    view.param_groups[0]["weight_decay"] = 0.5
    for _ in range(2):
        engine.backward(engine(torch.randn(2, 4)).square().mean())
        engine.step()
    engine.backward(engine(torch.randn(2, 4)).square().mean())
    with pytest.raises(PlanError, match="lr and momentum alone may change"):
        engine.step()
    engine.destroy()
    engine.destroy()


def skipped_steps() -> None:
    """A scale of 2^30 overflows fp16 in the first steps: they are counted, and do not advance the schedule."""
    config = {
        "train_batch_size": 2,
        "fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 30, "hysteresis": 1},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_type": "linear"}},
    }
    engine, view, _, scheduler = initialize_quietly(model=nn.Linear(4, 4), config=config)
    assert engine.module.weight.dtype == torch.float16
    for step in range(1, 30):
        scale, updates = view.cur_scale, engine.runtime.updates
        engine.backward(engine(torch.ones(2, 4)).float().square().mean())
        engine.step()
        assert engine.global_steps == step
        if engine.was_step_applied():
            assert (scheduler.updates, engine.runtime.updates) == (updates + 1, updates + 1)
        else:
            assert (scheduler.updates, view.cur_scale) == (updates, scale / 2)
    assert 0 < engine.skipped_steps < 20
    assert engine.get_lr() == scheduler.get_last_lr() == [0.1 * (engine.runtime.updates - 1) / 1000]
    assert engine.loss_scale() == view.loss_scale == 2.0 ** (30 - engine.skipped_steps)
    engine.destroy()


def scales_of_a_stage(stage: int) -> tuple[list[float], str]:
    """The scale after each good step, with a window of 2, and the error of a loss that is nan."""
    fp16 = {"enabled": True, "auto_cast": True, "initial_scale_power": 4, "loss_scale_window": 2}
    config = {"train_micro_batch_size_per_gpu": 2, "fp16": fp16, "zero_optimization": {"stage": stage}}
    engine, *_ = initialize_quietly(model=nn.Linear(4, 4), config=config)
    scales = []
    for _ in range(5):
        engine.backward(engine(torch.ones(2, 4)).float().square().mean())
        engine.step()
        scales.append(engine.loss_scale())
    engine.backward(engine(torch.ones(2, 4)).float().square().mean() * torch.nan)
    with pytest.raises(NonFiniteError) as caught:
        engine.step()
    engine.destroy()
    return scales, str(caught.value)


def scales_of_stages() -> list[tuple[list[float], str]]:
    return [scales_of_a_stage(stage) for stage in range(4)]


def test_the_loss_scale_doubles_when_deepspeed_doubles_it_and_a_loss_of_nan_is_not_blamed_on_it() -> None:
    for found in run_ranks(scales_of_stages, 2):
        for scales, message in found:
            assert scales == [16, 16, 32, 32, 64], "DeepSpeed 0.19.8"
            assert "loss nan" in message
            assert message.endswith("the loss scale, 64: no other scale helps; nothing was updated")
            assert "minimum" not in message


def half_precision_loss() -> None:
    """30 * 4096 exceeds fp16, so the loss must be scaled in fp32; otherwise a static scale stops the run."""
    config = {"train_batch_size": 2, "fp16": {"enabled": True, "loss_scale": 4096}}
    engine, *_ = initialize_quietly(model=nn.Linear(4, 4), config=config)
    loss = engine(torch.ones(2, 4, dtype=torch.float16)).mean() + 30
    assert loss.dtype == torch.float16
    assert engine.backward(loss).dtype == torch.float32
    engine.step()
    assert engine.was_step_applied()
    engine.destroy()


class Adafactor(torch.optim.Optimizer):
    """As that of transformers: an optimizer of its own, with a name that is known."""

    def __init__(self, other: torch.optim.Optimizer) -> None:
        super().__init__(other.param_groups, {})


def misfits() -> None:
    """Arguments that initialize refuses leave the model unchanged."""
    model, config = nn.Linear(4, 4), {"train_batch_size": 2}
    copy = nn.Linear(4, 4)
    stepped = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    stepped.step()
    adam = torch.optim.Adam(model.parameters())

    class Mine(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise AssertionError

    factored = torch.optim.Adafactor(model.parameters())
    betas = [{"params": [model.weight]}, {"params": [model.bias], "betas": (0.1, 0.2)}]
    cases: list[tuple[str, dict[str, Any]]] = [
        ("Mine cannot run on shards: its step() on other tensors raised", {"optimizer": Mine(model.parameters())}),
        ("Adafactor cannot run on shards of parameters: its second moment is kept by rows", {"optimizer": factored}),
        (
            "test_engine.Adafactor cannot run on shards: its step() on other tensors raised",
            {"optimizer": Adafactor(factored)},
        ),
        ("LBFGS cannot run on shards", {"optimizer": torch.optim.LBFGS(model.parameters())}),
        ("found one with states, which would be lost", {"optimizer": stepped}),
        ("group 1 has a betas of its own", {"optimizer": torch.optim.AdamW(betas)}),
        ("expected parameters of the model", {"optimizer": torch.optim.AdamW(copy.parameters())}),
        ("expected parameters of the model", {"model_parameters": copy.parameters()}),
        ("group 0: expected params, lr", {"model_parameters": [{"params": [model.weight], "eps": 1.0}]}),
        ("drives another optimizer", {"lr_scheduler": halving(adam)}),
        ("knows updates alone", {"lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(adam), "optimizer": adam}),
        ("found a builtins.int", {"lr_scheduler": 3}),
        ("found a int", {"optimizer": 3}),
        ("tensor_parallel.autotp_size makes groups", {"mpu": object()}),
        ("found 0 of them", {"config": None}),
        ("found 2 of them", {"config_params": config}),
        ("lr: expected a finite number", {"config": {**config, "optimizer": {"type": "SGD", "params": {"lr": -0.1}}}}),
        ("expected model to be a torch.nn.Module", {"model": None}),
    ]
    for told, given in cases:
        with pytest.raises(PlanError, match=re.escape(told)):
            initialize_quietly(**{"model": model, "config": config, **given})
    model(torch.ones(1, 4)).sum().backward()
    os.environ["WORLD_SIZE"] = "2"
    dist.destroy_process_group()
    with pytest.raises(PlanError, match="start the ranks with torchrun"):
        zero_runtime.init_distributed()


class Failing(nn.Linear):
    @property
    def broken(self) -> int:
        return self.weight.no_such_thing  # type: ignore[return-value]


def attributes() -> None:
    engine, *_ = initialize_quietly(model=Failing(4, 4), config={"train_batch_size": 2})
    assert engine.in_features == 4
    with pytest.raises(AttributeError, match=r"^engine\.micro_step: neither the engine nor its module \(Failing\)"):
        _ = engine.micro_step
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = engine.broken
    assert re.fullmatch(r"\d+\.\d+.*|0\+checkout", zero_runtime.__version__)
    engine.destroy()
    del engine.runtime
    with pytest.raises(AttributeError, match="runtime"):
        _ = engine.dp_world_size


def inference() -> None:
    """No optimizer is given, so there are no optimizer states until the first training step."""
    engine, *_ = initialize_quietly(model=nn.Linear(4, 4), config={"train_batch_size": 2})
    with torch.no_grad():
        engine(torch.ones(2, 4))
    assert engine.runtime.optimizer.state_tensors() == []
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()
    assert [state.numel() >= 20 for state in engine.runtime.optimizer.state_tensors()] == [True, True]
    engine.destroy()


def two_engines() -> None:
    """Gradients of the other engine's backward are kept until this engine's next step or zero_grad."""

    def engine_of(**more: Any) -> Any:
        return initialize_quietly(model=nn.Linear(4, 4), config={"train_batch_size": 2, **more})[0]

    def loss_of(*engines: Any) -> torch.Tensor:
        x = torch.ones(2, 4)
        for engine in engines:
            x = engine(x.to(engine.module.weight.dtype)).float()
        return x.square().mean()

    first, second = engine_of(), engine_of()
    for drop in (second.zero_grad, second.optimizer.zero_grad):
        first.backward(loss_of(first, second))
        first.step()
        assert second.runtime.backwards.has_gradients
        drop()
        with pytest.raises(CallOrderError, match="since the last step, found none"):
            second.step()
    second.backward(loss_of(second))
    with pytest.raises(CallOrderError, match=r"for parameter 'bias' of this one, .* reduced already.* requires_grad_"):
        first.backward(loss_of(first, second))
    assert first.module.weight.grad is second.module.weight.grad is second.module.bias.grad is None
    second.step()
    half = engine_of(fp16={"enabled": True, "loss_scale": 4096})
    with pytest.raises(PlanError, match=r"scaled by 1\.0 where this one's are by 4096"):
        second.backward(loss_of(half))


def loops_in_one_process() -> None:
    two_engines()
    attributes()
    inference()
    boundaries()
    skipped_steps()
    half_precision_loss()
    misfits()


def test_the_engine_handles_boundaries_skipped_steps_and_invalid_arguments() -> None:
    run_alone(loops_in_one_process)


def _set(owner: dict[str, Any], key: str, value: Any) -> Callable[[], None]:
    before = owner[key]
    owner[key] = value
    return lambda: owner.update({key: before})


def _freeze(layer: nn.Module, *, frozen: bool) -> Callable[[], None]:
    layer.requires_grad_(not frozen)

    def undo() -> None:
        layer.requires_grad_(frozen)

    return undo


def _attach(engine: Any) -> Callable[[], None]:
    engine.module[2].adapter = nn.Linear(4, 4)
    return lambda: delattr(engine.module[2], "adapter")


def _replace(engine: Any) -> Callable[[], None]:
    kept, engine.module[0].weight = engine.module[0].weight, nn.Parameter(torch.zeros(4, 4))
    return lambda: setattr(engine.module[0], "weight", kept)


def _append(engine: Any) -> Callable[[], None]:
    added = nn.Parameter(torch.zeros(4))
    engine.optimizer.param_groups[0]["params"].append(added)
    return lambda: engine.optimizer.param_groups[0]["params"].pop()


# A change after initialize, which returns its undoing, and what the next step says about it.
CHANGES: list[tuple[Callable[[Any], Callable[[], None]], str]] = [
    *(
        (lambda engine, lr=lr: _set(engine.optimizer.param_groups[0], "lr", lr), rf"\[0\], lr: .*found {lr!r}; nothing")
        for lr in (math.nan, math.inf, -0.1, "0.01", None)
    ),
    (lambda engine: _set(engine.optimizer.param_groups[0], "betas", (math.nan, 0.999)), "momentum: .* found nan"),
    (lambda engine: _set(engine.optimizer.param_groups[0], "betas", (0.9, 0.9)), r"betas\[1\]: expected 0.999"),
    (lambda engine: _freeze(engine.module[0], frozen=True), r"'0\.weight': expected requires_grad=True"),
    (lambda engine: _freeze(engine.module[1], frozen=False), r"'1\.weight': expected requires_grad=False"),
    (_attach, r"'2\.adapter\.weight': expected none as at initialize"),
    (_replace, r"'0\.weight': expected the same one as at initialize"),
    (_append, "expected the groups and parameters of initialize"),
]


def late_changes() -> None:
    """Every change is refused before anything is updated; without it, the same step ends like one without a change."""
    for stage in (0, 1, 2, 3):
        found = {}
        for changes in ([], CHANGES):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
            model[1].requires_grad_(False)
            config = {"train_batch_size": 4, "zero_optimization": {"stage": stage}}
            engine, *_ = initialize_quietly(model=model, config=config)
            for _ in range(2):
                engine.backward(engine(torch.ones(2, 4)).square().mean())
                for change, told in changes:
                    undo = change(engine)
                    with pytest.raises(PlanError, match=told):
                        engine.step()
                    undo()
                engine.step()
            assert (engine.global_steps, engine.micro_steps) == (2, 2)
            with engine.runtime.full_params() as values:
                found[bool(changes)] = {name: value.clone() for name, value in values.items()}
            engine.destroy()
        assert all(torch.equal(value, found[True][name]) for name, value in found[False].items()), stage


def test_what_changes_after_initialize_is_refused_by_name_before_anything_is_updated() -> None:
    run_ranks(late_changes, 2)


# ---- two engines -----------------------------------------------------------------------------------------------------


def one_loss_for_two_engines() -> list[str]:
    """Plain torch gives each model the gradient of one backward; two would give twice that."""
    told = []
    for stage in range(4):
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": stage},
        }
        first, second = (initialize_quietly(model=nn.Linear(4, 4), config=config)[0] for _ in range(2))
        for _ in range(2):  # a loss of each engine's own: nothing is refused
            first.backward(first(torch.ones(2, 4)).mean())
            second.backward(second(torch.ones(2, 4)).mean())
            first.step()
            second.step()
        loss = second(first(torch.ones(2, 4))).mean()
        first.backward(loss, retain_graph=True)
        with pytest.raises(CallOrderError) as caught:
            second.backward(loss)
        told.append(str(caught.value))
        first.destroy()
        second.destroy()
    return told


def test_a_backward_of_two_engines_for_one_loss_is_refused_at_every_stage() -> None:
    for told in run_ranks(one_loss_for_two_engines, 2):
        assert len(told) == 4
        assert all("engine.backward: expected a loss that no other engine had the backward of" in one for one in told)


def initialized_again() -> None:
    """A second engine trains on from the first one's weights as after destroy(); sharded weights are refused by name.

    DeepSpeed 0.19.8 takes the model too.
    """
    for stage in (0, 1, 2, 3) if dist.get_world_size() == 2 else (3,):
        config = {"train_batch_size": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
        again = {**config, "zero_optimization": {"stage": 2}}
        found = []
        for is_destroyed in (True, False):
            torch.manual_seed(0)
            model = nn.Linear(4, 4)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            first = initialize_quietly(model=model, config=config, optimizer=optimizer)[0]
            first.backward(first(torch.ones(2, 4).bfloat16()).float().mean())
            first.step()
            if stage == 3 and dist.get_world_size() == 2:
                with pytest.raises(
                    PlanError, match=r"found one that is in use, .* save them \(engine\.save_checkpoint"
                ):
                    initialize_quietly(model=model, config=again)
                first.destroy()
                continue
            with pytest.raises(PlanError, match="unknown key"):  # which leaves the first engine in use
                zero_runtime.initialize(model=model, config={**again, "nothing": 1})
            first.backward(first(torch.ones(2, 4).bfloat16()).float().mean())
            if is_destroyed:
                first.destroy()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                second = zero_runtime.initialize(model=model, config=again, optimizer=optimizer)[0]
            said = any("the engine that had the model is destroyed" in str(one.message) for one in told)
            assert said is (not is_destroyed and dist.get_rank() == 0)
            with pytest.raises(CallOrderError, match="found one that was destroyed"):
                first.step()
            second.backward(second(torch.ones(2, 4).bfloat16()).float().mean())
            second.step()
            found.append(second.module_state_dict())
            second.destroy()
        assert all(torch.equal(value, found[1][name]) for name, value in (found[0].items() if found else ()))


@pytest.mark.parametrize("world", [1, 2])
def test_a_second_engine_takes_the_model_from_the_first_where_its_weights_are_whole(world: int) -> None:
    run_ranks(initialized_again, world)
