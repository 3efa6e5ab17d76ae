"""The sharded optimizer matches plain torch with groups and schedules, and a run resumes from its named states."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness.plain_optimizers import AdamW, Sgd
from harness.ranks import run_ranks
from torch import nn

from zero_runtime.errors import PlanError
from zero_runtime.optim.configs import (
    TORCH_NAMES,
    AdamWConfig,
    LambConfig,
    LionConfig,
    OptimizerConfig,
    SgdConfig,
    TorchConfig,
)
from zero_runtime.optim.groups import ParamGroup
from zero_runtime.optim.lr_schedule import OneCycle, Rates
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime

STAGES = (0, 1, 2, 3)
FROZEN = ("0.weight", "0.bias")


def model(*, frozen: bool = True) -> nn.Sequential:
    """Three layers, the first frozen; sizes are odd, so that parameters are cut by the shards."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 11), nn.Linear(11, 5))
    layers[0].requires_grad_(not frozen)
    return layers


def batch(step: int) -> torch.Tensor:
    """The same batch on every rank."""
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(step))


def build(stage: int, config: OptimizerConfig, precision: MixedPrecision | None = None) -> ZeroRuntime:
    plan = ZeroPlan.from_stage(stage)
    return ZeroRuntime(model(), plan, precision or MixedPrecision(), config, RuntimeSettings(), torch.device("cpu"))


def train(runtime: ZeroRuntime, rates: list[float | Rates], first: int = 0) -> None:
    for step, one in enumerate(rates, start=first):
        runtime.backward(runtime(batch(step)).square().mean() / dist.get_world_size())
        runtime.step(one)


def weights(runtime: ZeroRuntime) -> dict[str, torch.Tensor]:
    """Full fp32 weights of every parameter."""
    found = {}
    for unit in runtime.units:
        unit.wait_unshard()
        found |= {
            segment.name: param.detach().clone()
            for segment, param in zip(unit.layout.segments, unit.params, strict=True)
        }
    return found


def plain(groups: list[dict], rates: list[tuple[float, ...]], kind: type, **arguments: object) -> dict:
    """Weights after plain torch has trained `groups` ({"params": names, ...}) with one rate per group."""
    layers = model()
    by_name = dict(layers.named_parameters())
    optimizer = kind([{**one, "params": [by_name[name] for name in one["params"]]} for one in groups], **arguments)
    for step, lrs in enumerate(rates):
        layers(batch(step)).square().mean().backward()
        for group, lr in zip(optimizer.param_groups, lrs, strict=True):
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in by_name.items()}


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


# ---- groups ----------------------------------------------------------------------------------------------------------

GROUPS = (
    ParamGroup(("1.weight",), lr_scale=0.5, weight_decay=0.2),
    ParamGroup(()),  # empty: kept, but without effect
    ParamGroup(FROZEN, lr_scale=100.0, weight_decay=0.9),  # all frozen: also without effect
)


def _groups() -> None:
    plain_groups = [
        {"params": ["1.weight"], "weight_decay": 0.2},
        {"params": ["2.weight"], "weight_decay": 0.1},
        {"params": ["1.bias", "2.bias"], "weight_decay": 0.0},
    ]
    by_factor = plain(plain_groups, [(0.05, 0.1, 0.1)] * 4, AdamW)
    by_rates = plain(plain_groups, [(0.3, 0.7, 0.7)] * 4, AdamW)
    for stage in STAGES:
        runtime = build(stage, AdamWConfig(weight_decay=0.1, groups=GROUPS))
        train(runtime, [0.1] * 4)
        assert_equal(weights(runtime), by_factor)
        runtime = build(stage, AdamWConfig(weight_decay=0.1, groups=GROUPS))
        train(runtime, [Rates((0.3, 55.0, 66.0, 0.7))] * 4)
        assert_equal(weights(runtime), by_rates)


def test_groups_including_empty_and_frozen_ones_match_plain_torch_at_every_stage() -> None:
    run_ranks(_groups, 2)


def _all_groups_without_effect() -> None:
    for stage in STAGES:
        runtime = build(stage, AdamWConfig(groups=(ParamGroup(FROZEN, lr_scale=9.0), ParamGroup(()))))
        bare = build(stage, AdamWConfig())
        train(runtime, [0.1] * 2)
        train(bare, [0.1] * 2)
        assert_equal(weights(runtime), weights(bare))
        assert torch.equal(weights(runtime)["0.weight"], model()[0].weight)


def test_empty_groups_and_groups_of_frozen_parameters_change_no_bits() -> None:
    run_ranks(_all_groups_without_effect, 2)


# ---- schedules -------------------------------------------------------------------------------------------------------


def _cycled_momentum() -> None:
    schedule = OneCycle(0.01, 0.1, cycle_first_step_size=2, cycle_min_mom=0.5)
    kinds: list[tuple[OptimizerConfig, type, str]] = [
        (AdamWConfig(), AdamW, "betas"),
        (SgdConfig(momentum=0.9), Sgd, "momentum"),
        (TorchConfig("NAdam"), torch.optim.NAdam, "betas"),
        (TorchConfig("RMSprop", {"momentum": 0.1}), torch.optim.RMSprop, "momentum"),
    ]
    for config, kind, key in kinds:
        layers = model()
        extra = {"momentum": 0.1} if key == "momentum" else {}
        decays = [{"params": [p], "weight_decay": config.decay if p.dim() > 1 else 0.0} for p in layers.parameters()]
        optimizer = kind(decays, lr=1.0, **extra)
        runtime = build(2, config)
        for step in range(5):
            rates = schedule.rates(step)
            layers(batch(step)).square().mean().backward()
            for group in optimizer.param_groups:
                group["lr"] = rates.lr
                group[key] = (rates.momentum, 0.999) if key == "betas" else rates.momentum
            optimizer.step()
            optimizer.zero_grad()
            train(runtime, [rates], first=step)
        assert_equal(weights(runtime), {name: p.detach() for name, p in layers.named_parameters()})


def test_a_cycled_momentum_sets_beta1_or_momentum_as_in_plain_torch() -> None:
    run_ranks(_cycled_momentum, 1)


def _momentum_refused() -> str:
    runtime = build(1, SgdConfig())
    before = weights(runtime)
    with pytest.raises(PlanError) as caught:
        train(runtime, [Rates(0.1, momentum=0.8)])
    assert_equal(weights(runtime), before)
    assert runtime.optimizer.updates == 0
    return str(caught.value)


def test_a_cycled_momentum_is_refused_for_an_optimizer_without_momentum() -> None:
    assert "cycles the momentum (now 0.8) and Sgd has none" in run_ranks(_momentum_refused, 1)[0]


# ---- states ----------------------------------------------------------------------------------------------------------

CONFIGS = [
    AdamWConfig(groups=GROUPS),
    SgdConfig(momentum=0.9, dampening=0.1),
    LionConfig(weight_decay=0.1),
    LambConfig(),
    *(TorchConfig(name) for name in TORCH_NAMES),
    TorchConfig("RMSprop", {"momentum": 0.5, "centered": True}, groups=GROUPS[:2]),
    TorchConfig("Adam", {"amsgrad": True}),
]


def _resumed() -> None:
    """Copy states and counters by name into a new runtime, which then must train exactly like the old one."""
    for config in CONFIGS:
        old, new = build(3, config), build(3, config)
        train(old, [0.1, 0.2])
        for ours, theirs in zip(new.units, old.units, strict=True):
            if not ours.trainable:
                continue
            ours.master_shard.copy_(theirs.master_shard)
            for name in new.optimizer.state_names:
                new.optimizer.states_of(ours)[name].copy_(old.optimizer.states_of(theirs)[name])
        union = [None] * dist.get_world_size()
        dist.all_gather_object(union, old.optimizer.counters())
        new.optimizer.load_counters({name: value for one in union for name, value in one.items()})
        new._schedule.after_step()
        train(old, [0.3, 0.1], first=2)
        train(new, [0.3, 0.1], first=2)
        assert_equal(weights(new), weights(old))
        assert new.optimizer.counters() == old.optimizer.counters()


@pytest.mark.full
def test_a_run_resumes_from_weights_named_states_and_counters_alone() -> None:
    run_ranks(_resumed, 2)


def _torch_states_are_ours() -> None:
    runtime = build(0, TorchConfig("Adagrad"))
    twin = build(0, TorchConfig("Adagrad"))
    train(runtime, [0.1] * 2)
    train(twin, [0.1])
    for unit, other in zip(runtime.units[1:], twin.units[1:], strict=True):
        more, less = runtime.optimizer.states_of(unit)["sum"], twin.optimizer.states_of(other)["sum"]
        assert (more[: unit.layout.numel] >= less[: unit.layout.numel]).all()
        assert (more > less).any(), "the second step must have been written to the flat state"


def test_torch_optimizers_write_their_states_to_our_flat_tensors_after_the_first_step() -> None:
    run_ranks(_torch_states_are_ours, 1)


# ---- refused -------------------------------------------------------------------------------------------------------


def _unfit() -> list[str]:
    told = []
    bf16 = MixedPrecision("bf16", master="bf16")
    for config, precision in ((TorchConfig("Adagrad"), bf16), (TorchConfig("Adagrad", {"rho": 1}), None)):
        with pytest.raises(PlanError) as caught:
            build(2, config, precision)
        told.append(str(caught.value))
    return told


def test_torch_optimizers_refuse_masters_that_are_not_fp32_and_unknown_arguments() -> None:
    masters, arguments = run_ranks(_unfit, 1)[0]
    assert "torch.optim.Adagrad: expected precision.master=fp32, found torch.bfloat16" in masters
    assert "torch.optim.Adagrad refuses {'rho': 1}" in arguments
