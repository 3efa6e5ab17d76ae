"""Optimizers and schedules in the forms that scripts have them, at stages 0 to 3, against plain numbers."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness.plain_optimizers import Muon as PlainMuon
from harness.ranks import run_alone, run_ranks
from harness.seed_loop import initialize_quietly
from torch import nn
from zero_runtime.ops.adam import FusedAdam

import zero_runtime
from zero_runtime.deepspeed.groups import groups_of_optimizer, groups_of_parameters
from zero_runtime.deepspeed.optimizer_section import ChosenOptimizer
from zero_runtime.errors import PlanError
from zero_runtime.optim.configs import MuonConfig

STAGES = (0, 1, 2, 3)
UNIT = 2.0**-24
LR = 0.5
Weights = dict[str, torch.Tensor]


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def loss_of(model: Any, step: int) -> torch.Tensor:
    rows = torch.randn(2, 4, generator=torch.Generator().manual_seed(step * 2 + dist.get_rank()))
    loss: torch.Tensor = model(rows).square().mean()
    return loss


def trained(model: nn.Module, steps: int, **given: Any) -> tuple[Any, Weights]:
    """The engine, destroyed, and the weights that it trained."""
    engine, *_ = initialize_quietly(model=model, **given)
    engine.norms = []
    for step in range(steps):
        engine.backward(loss_of(engine, step))
        engine.step()
        engine.norms.append(engine.get_global_grad_norm())
    with engine.runtime.full_params() as full:
        weights = {name: value.clone() for name, value in full.items()}
    engine.destroy()
    return engine, weights


def averaged(model: nn.Module, step: int) -> Weights:
    """The gradients of plain data parallelism."""
    (loss_of(model, step) / dist.get_world_size()).backward()
    found = {}
    for name, param in model.named_parameters():
        assert param.grad is not None
        dist.all_reduce(param.grad)
        found[name], param.grad = param.grad, None
    return found


def some_of_the_parameters() -> list[list[float]]:
    """Trains the first and the last layer of three, clipped at 0.05; the norms by stage."""
    norms = []
    for stage in STAGES:
        model = small()
        middle = {name: param.detach().clone() for name, param in model.named_parameters() if name.startswith("2.")}
        some = [*model[0].parameters(), *model[4].parameters()]
        if stage % 2:
            given: dict[str, Any] = {"optimizer": torch.optim.SGD(some, lr=LR)}
        else:
            given = {"model_parameters": some}
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.05,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "SGD", "params": {"lr": LR}},
        }
        engine, weights = trained(model, 3, config=config, **given)
        assert all(torch.equal(weights[name], value) for name, value in middle.items())
        assert not torch.equal(weights["0.weight"], small()[0].weight)
        assert all(param.requires_grad for param in model.parameters())  # again, after destroy
        norms.append([float(norm) for norm in engine.norms])
    return norms


def test_an_optimizer_over_some_of_the_parameters_trains_those() -> None:
    """The norms are those that DeepSpeed 0.19.8 printed at stages 1 to 3, to 4 digits: of the trained ones alone."""
    for ranks in run_ranks(some_of_the_parameters, 2):
        for norms in ranks:
            assert norms == pytest.approx([0.5797, 0.5298, 0.5482], abs=5e-5)


def clipped_by_default() -> list[tuple[float, float]]:
    """The norm of one update by SGD with a rate of 1, of long gradients, and the default that the engine tells."""
    found = []
    for stage in STAGES:
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
        model = small()
        with torch.no_grad():
            model[4].weight.mul_(100)
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        engine, weights = trained(model, 1, config=config, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
        moved = math.sqrt(sum(float((weights[name] - value).double().square().sum()) for name, value in before.items()))
        assert engine.norms[0] > 10
        found.append((moved, engine.config.clip_norm))
    return found


def test_gradients_are_clipped_at_1_without_the_key() -> None:
    """As in DeepSpeed since 0.19.3. Weights up to 100 are rounded once: each of the 83 elements moves by 2^-18 more."""
    for ranks in run_ranks(clipped_by_default, 2):
        assert [default for _, default in ranks] == [1.0] * 4
        assert [moved for moved, _ in ranks] == pytest.approx([1.0] * 4, abs=math.sqrt(83) * 2.0**-18 + 1e-6)


def adam_without_correction(weight: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    first, second = 0.1 * grad, 0.001 * grad.square()
    return weight - LR * first / (second.sqrt() + 1e-8)


def lamb(weight: torch.Tensor, grad: torch.Tensor, *, corrects: bool, high: float) -> torch.Tensor:
    """One step of FusedLamb from its CUDA source: the corrections are in the rate, and the ratio has limits."""
    update = 0.1 * grad / ((0.001 * grad.square()).sqrt() + 1e-8)
    ratio = min(max(float(weight.norm() / update.norm()), 0.01), high)
    rate = LR * math.sqrt(0.001) / 0.1 if corrects else LR
    return weight - rate * ratio * update


FORMS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "adam": ("AdamW", {"bias_correction": False}, adam_without_correction),
    "lamb": ("Lamb", {}, lambda weight, grad: lamb(weight, grad, corrects=True, high=10.0)),
    "limited": (
        "Lamb",
        {"bias_correction": False, "max_coeff": 0.05},
        lambda weight, grad: lamb(weight, grad, corrects=False, high=0.05),
    ),
}


def other_updates() -> list[str]:
    wrong = []
    for name, (kind, params, plain) in FORMS.items():
        for stage in STAGES:
            config = {
                **{"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0},
                **{"zero_optimization": {"stage": stage}},
                "optimizer": {"type": kind, "params": {"lr": LR, **params}},
            }
            model = small()
            gradients = averaged(model, 0)
            before = {key: param.detach().double().clone() for key, param in model.named_parameters()}
            # At odd stages, Adam's constants come from an optimizer of the call.
            mine = (
                {"optimizer": FusedAdam(model.parameters(), LR, **params)} if (name, stage % 2) == ("adam", 1) else {}
            )
            _, weights = trained(model, 1, config=config, **mine)
            for key, value in before.items():
                expected = plain(value, gradients[key].double())
                # Up to 30 roundings of the update (a norm of 30 squares is 15 of them), and one of the weight.
                bound = 2 * UNIT * value.abs() + 32 * UNIT * (expected - value).abs()
                if not bool(((weights[key].double() - expected).abs() <= bound).all()):
                    wrong.append(f"{name} at stage {stage}: {key}")
    return wrong


def test_adam_without_bias_correction_and_lamb_with_limits_make_deepspeeds_updates() -> None:
    assert run_ranks(other_updates, 2) == [[], []]


class Square(nn.Module):
    """Two square matrices, so that Muon's factor of the rate is 1, and an embedding, which DeepSpeed leaves to Adam."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.first, self.second = nn.Embedding(8, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.embed((rows * 9).long() % 8)).tanh())


def muon_runs() -> list[str]:
    """The forms and stages whose weights are not those of plain Muon on whole matrices."""
    wrong = []
    for form in ("section", "torch"):
        for stage in (0, 3):
            model, plain = Square(), Square()
            matrices = {"first.weight", "second.weight"}
            named = dict(plain.named_parameters())
            rates = {name: 0.125 if name in matrices else 0.25 for name in named}
            if form == "torch":
                update: Any = torch.optim.Muon([named[name] for name in sorted(matrices)], lr=0.125, weight_decay=0.5)
                kept = [model.first.weight, model.second.weight]
                given: dict[str, Any] = {"optimizer": torch.optim.Muon(kept, lr=0.125, weight_decay=0.5)}
            else:
                params = {"lr": 0.25, "muon_lr": 0.125, "weight_decay": 0.5, "betas": [0.5, 0.75]}
                given = {"config": {"optimizer": {"type": "Muon", "params": params}}}
                groups = [
                    {"params": [param], "lr": rates[name], "weight_decay": 0.5, "matrix": name in matrices}
                    for name, param in named.items()
                ]
                constants: dict[str, Any] = {"beta1": 0.5, "beta2": 0.75, "eps": 1e-10, "ns_dtype": "fp32"}
                update = PlainMuon(groups, MuonConfig(lr_scaling="original", **constants))
            for step in range(3):
                for name, grad in averaged(plain, step).items():
                    named[name].grad = grad
                update.step()
                plain.zero_grad()
            given["config"] = {
                **given.get("config", {}),
                **{"train_batch_size": 4, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}},
            }
            engine, weights = trained(model, 3, **given)
            assert engine.optimizer.param_groups[0]["lr"] == 0.125
            wrong += [
                f"{form} at stage {stage}: {name}" for name in named if not torch.equal(named[name], weights[name])
            ]
    return wrong


def test_muon_of_the_section_and_of_torch_have_the_bits_of_whole_matrices() -> None:
    assert run_ranks(muon_runs, 2) == [[], []]


def test_muon_with_other_constants_and_deep_parameters_is_refused() -> None:
    model = nn.Sequential(nn.Conv1d(2, 2, 3), nn.Linear(4, 4))
    with pytest.raises(PlanError, match=r"adjust_lr_fn of match_rms_adamw or original, found \['eps'\]"):
        groups_of_optimizer(model, torch.optim.Muon([model[1].weight], eps=1e-3))
    with pytest.raises(PlanError, match=r"at most two dimensions .*, found 0\.weight; use AdamW"):
        groups_of_parameters(model, None, ChosenOptimizer(MuonConfig(), 0.1, 0.0))


class Signs(torch.optim.Optimizer):
    """Signed momentum in the style of old scripts: new tensors in each step, and Python's numbers as counters."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "beta": 0.9})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["count"] = state.get("count", 0) + 1
                grad = param.grad.data + group["weight_decay"] * param.data
                state["mean"] = group["beta"] * state.get("mean", 0 * grad) + grad
                param.data = param.data - group["lr"] / state["count"] * state["mean"].sign() * grad.abs().sqrt()


class Bounded(torch.optim.SGD):
    """A subclass with a step of its own around that of its class."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.clamp_(-0.4, 0.4)


def own_classes(folder: str) -> list[str]:
    """The classes and stages that differ from plain PyTorch's bits, in a run that a checkpoint interrupts."""
    wrong = []
    for kind, stages in ((Signs, STAGES), (Bounded, (2,)), (torch.optim.Adagrad, (3,))):

        def make(model: nn.Module, kind: Any = kind) -> Any:
            decayed = {"params": [*model[2].parameters()], "weight_decay": 0.25}
            return kind([{"params": [*model[0].parameters(), *model[4].parameters()]}, decayed], lr=0.125)

        plain = small()
        optimizer = make(plain)
        for step in range(4):
            for name, grad in averaged(plain, step).items():
                plain.get_parameter(name).grad = grad
            optimizer.step()
            optimizer.zero_grad()
        for stage in stages:
            config = {"train_batch_size": 4, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}
            for steps in (range(2), range(2, 4)):
                model = small()
                engine, *_ = initialize_quietly(model=model, optimizer=make(model), config=config)
                if steps.start:
                    engine.load_checkpoint(folder, f"{kind.__name__}{stage}")
                for step in steps:
                    engine.backward(loss_of(engine, step))
                    engine.step()
                engine.save_checkpoint(folder, f"{kind.__name__}{stage}")
                weights = {name: value.clone() for name, value in engine.module_state_dict().items()}
                engine.destroy()
            if not all(torch.equal(weights[name], value) for name, value in plain.state_dict().items()):
                wrong.append(f"{kind.__name__} at stage {stage}")
    return wrong


def test_elementwise_classes_with_their_own_step_have_plain_torchs_bits(tmp_path: Path) -> None:
    assert run_ranks(own_classes, 2, str(tmp_path)) == [[], []]


class Given(torch.optim.Optimizer):
    """A class whose update of one parameter is a function."""

    def __init__(self, params: Any, update: Any) -> None:
        self.update, self.told = update, 0
        super().__init__(params, {"lr": 0.1, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.update(self, group, param)


def by_norm_beside_decay(_: Any, group: Any, param: torch.Tensor) -> None:
    param.sub_(param.grad / (1 + group["weight_decay"] * param.grad.norm()))


def by_chance(_: Any, group: Any, param: torch.Tensor) -> None:
    param.sub_(param.grad * torch.rand_like(param))


def by_place(_: Any, group: Any, param: torch.Tensor) -> None:
    param.view(-1)[::2].sub_(param.grad.view(-1)[::2])


def by_rows(own: Any, group: Any, param: torch.Tensor) -> None:
    own.state[param]["row"] = param.grad.square().mean(-1, keepdim=True)
    param.sub_(param.grad / (1 + own.state[param]["row"]))


def by_attribute(own: Any, group: Any, param: torch.Tensor) -> None:
    own.told += 1
    param.sub_(param.grad / own.told)


def by_shape(_: Any, group: Any, param: torch.Tensor) -> None:
    param.sub_(param.grad @ param.grad.mT @ param.grad)


OTHERS = "its update of an element depends on other elements (a norm, a factor)"
NOT_ELEMENTWISE = {
    by_norm_beside_decay: OTHERS,
    by_chance: OTHERS,
    by_place: OTHERS,
    by_rows: "its state row is ([8, 1], torch.float32): expected an fp32 number for each element",
    by_attribute: "its step() changes attributes or groups",
    by_shape: "its step() on other tensors raised",
    lambda *_: None: "its step() changes none of its parameters",
}


def test_other_classes_are_refused_with_the_property_that_fails() -> None:
    for update, reason in NOT_ELEMENTWISE.items():
        model = small()
        groups = [{"params": [*model[0].parameters()], "weight_decay": 1.0}, {"params": [*model[2].parameters()]}]
        with pytest.raises(PlanError) as caught:
            groups_of_optimizer(model, Given(groups, update))
        assert f"Given cannot run on shards: {reason}" in str(caught.value)


class Renamed(torch.optim.AdamW):
    """A subclass that adds nothing to the update."""


def call_wins() -> list[str]:
    """What the call gives is used, and the sections of the file are named; the rates by step."""
    told = []
    for stage in STAGES:
        config = {
            **{"train_batch_size": 2, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": 1},
            **{"zero_optimization": {"stage": stage}, "scheduler": {"type": "OneCycle"}},
            "optimizer": {"type": "Muon", "params": {"lr": 7.0}},
        }
        model = small()
        optimizer = Renamed([{"params": [model[0].weight], "lr": np.float64(0.25)}, {"params": [model[4].weight]}])
        optimizer.param_groups[1]["lr"] = torch.tensor(0.5)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine, view, _, scheduler = zero_runtime.initialize(
                model=model, optimizer=optimizer, lr_scheduler=schedule, config=config
            )
        told.append("\n".join(str(one.message) for one in caught))
        assert scheduler is schedule
        assert view.param_groups is optimizer.param_groups
        assert engine.get_lr() == [0.25, 0.5]
        engine.backward(loss_of(engine, 0))
        engine.step()
        assert engine.get_lr() == [0.125, 0.25]
        engine.destroy()
    return told


def test_an_optimizer_and_a_schedule_of_the_call_replace_those_of_the_file() -> None:
    for told in run_alone(call_wins):
        assert "optimizer: optimizer of the call is used, the section of the configuration is not" in told
        assert "scheduler: lr_scheduler of the call is used, the section of the configuration is not" in told
        assert "0.bias, 2.weight, 2.bias and 1 more: in no group of the optimizer" in told


def own_rates() -> list[list[list[float]]]:
    """The rates of two groups over three steps of WarmupLR without warmup_max_lr, by stage."""
    found = []
    for stage in STAGES:
        model = small()
        groups = [{"params": model[0].parameters(), "lr": 2e-5}, {"params": model[4].parameters(), "lr": 3e-4}]
        config = {
            **{"train_batch_size": 2, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}},
            "optimizer": {"type": "AdamW", "params": {"lr": 1.0}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear", "warmup_num_steps": 2}},
        }
        engine, *_ = initialize_quietly(model=model, model_parameters=groups, config=config)
        rates = [engine.get_lr()]
        for step in range(4):
            engine.backward(loss_of(engine, step))
            engine.step()
            rates.append(engine.get_lr())
        engine.destroy()
        found.append(rates)
    return found


def test_warmuplr_rises_to_each_groups_own_rate() -> None:
    """DeepSpeed 0.19.8's rates; up to 0.17.1 it rose to 0.001 in all groups."""
    for rates in run_alone(own_rates):
        assert rates == [[0.0, 0.0], [0.0, 0.0], [1e-5, 1.5e-4], [2e-5, 3e-4], [2e-5, 3e-4]]


def buffer_dtypes() -> list[torch.dtype]:
    """Of the floating buffer of a bf16 model, with data_types.buffer_dtype and without."""
    found = []
    for dtypes in ({"buffer_dtype": "fp32"}, {}):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).bfloat16()
        config = {"train_batch_size": 2, "gradient_clipping": 0.0, "bf16": {"enabled": True}, "data_types": dtypes}
        engine, *_ = initialize_quietly(model=model, config=config)
        assert model[1].num_batches_tracked.dtype == torch.int64
        found.append(model[1].running_mean.dtype)
        engine.destroy()
    return found


def test_buffers_are_cast_where_the_configuration_says_so() -> None:
    assert run_alone(buffer_dtypes) == [torch.float32, torch.bfloat16]
