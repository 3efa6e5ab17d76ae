"""Every optimizer has, at every stage, the bits of plain PyTorch in one process; LAMB is within a derived bound."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from harness.oracle import LR, Case, oracle
from harness.plain_optimizers import plain_optimizer
from harness.ranks import run_ranks
from harness.trainee import backwards_of_step, build_runtime, full_tensors

from zero_runtime.accounting import predicted_state_bytes
from zero_runtime.census import take_census
from zero_runtime.errors import PlanError
from zero_runtime.optim.configs import (
    MOST_BETA_BF16,
    AdamConfig,
    AdamW8bitConfig,
    AdamWConfig,
    LambConfig,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    SgdConfig,
    TorchConfig,
)
from zero_runtime.optim.groups import ParamGroup
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.state_bytes import formula

STAGES = (0, 1, 2, 3)
WORLDS = [2, *(pytest.param(world, marks=pytest.mark.full) for world in (1, 3))]
STEPS = 3
CENSUS_STAGE = 3  # a census visits all of Python's objects; test_bytes.py takes one at every stage
GROUPS = (
    ParamGroup(("blocks.1.mix.weight", "blocks.1.up.bias", "embed.weight"), lr_scale=0.3, weight_decay=0.02),
    ParamGroup(()),
    ParamGroup(("head.weight", "blocks.0.down.weight"), lr_scale=2.0),
)


def torch_config(name: str, weight_decay: float = 0.1, **arguments: object) -> TorchConfig:
    return TorchConfig(name, arguments, weight_decay)


OPTIMIZERS: dict[str, OptimizerConfig] = {
    "adamw": AdamWConfig(0.9, 0.95, 1e-8, 0.1),
    "adamw_decaying_all": AdamWConfig(0.9, 0.95, 1e-8, 0.1, no_decay=False),
    "adamw_groups": AdamWConfig(0.9, 0.95, 1e-8, 0.1, groups=GROUPS),
    "adam": AdamConfig(0.9, 0.95, 1e-8, 0.1),
    "adamw8bit": AdamW8bitConfig(0.9, 0.95, 1e-8, 0.1),
    "adamw8bit_groups": AdamW8bitConfig(0.9, 0.95, 1e-8, 0.1, groups=GROUPS),
    "sgd": SgdConfig(weight_decay=0.1),
    "sgd_dampened": SgdConfig(momentum=0.9, dampening=0.5, weight_decay=0.1, groups=GROUPS),
    "sgd_nesterov": SgdConfig(momentum=0.9, nesterov=True),
    "lion": LionConfig(0.9, 0.98, 0.1),
    "lion_groups": LionConfig(0.9, 0.98, 0.1, groups=GROUPS),
    "lamb": LambConfig(weight_decay=0.1),
    "lamb_groups": LambConfig(weight_decay=0.1, groups=GROUPS),
    "adamw_bf16_states": AdamWConfig(0.9, 0.95, 1e-8, 0.1, groups=GROUPS, state_dtype="bf16"),
    "adam_bf16_states": AdamConfig(0.9, 0.95, 1e-8, 0.1, state_dtype="bf16"),
    "sgd_bf16_states": SgdConfig(momentum=0.9, nesterov=True, state_dtype="bf16"),
    "lion_bf16_states": LionConfig(0.9, 0.98, 0.1, state_dtype="bf16"),
    "muon": MuonConfig(),
    "muon_groups": MuonConfig(groups=GROUPS),
    "muon_original_fp32": MuonConfig(nesterov=False, ns_dtype="fp32", lr_scaling="original", adamw_lr_ratio=0.5),
    "torch_asgd": torch_config("ASGD", t0=1.0),
    "torch_adadelta": torch_config("Adadelta", rho=0.8),
    "torch_adagrad": torch_config("Adagrad"),
    "torch_adam_amsgrad": torch_config("Adam", amsgrad=True),
    "torch_adamax": torch_config("Adamax"),
    "torch_nadam": torch_config("NAdam"),
    "torch_radam": torch_config("RAdam", decoupled_weight_decay=True),
    "torch_rmsprop": replace(torch_config("RMSprop", momentum=0.5, centered=True), groups=GROUPS),
    "torch_rprop": torch_config("Rprop", weight_decay=0.0),
    "torch_sgd": torch_config("SGD", momentum=0.9),
}
IS_BOUNDED = {name for name, config in OPTIMIZERS.items() if isinstance(config, LambConfig)}
# The short form runs each rule once, with groups where the rule has them, and one of torch's classes: the others differ
# only in torch's code, and test_rows.py runs plain AdamW.
SHORT = {
    "adamw_groups",
    "adam",
    "adamw8bit_groups",
    "sgd_dampened",
    "sgd_nesterov",
    "lion_groups",
    "lamb_groups",
    "muon_groups",
}
SHORT |= {"torch_rmsprop", "adamw_bf16_states"}
NAMES = [pytest.param(name, marks=() if name in SHORT else pytest.mark.full) for name in OPTIMIZERS]
EXACT = [param for param in NAMES if param.values[0] not in IS_BOUNDED]
BOUNDED = [param for param in NAMES if param.values[0] in IS_BOUNDED]


@dataclass
class Steps:
    """Results of one stage, by name: the weights before the first step and after each step, and each step's
    gradients. Stages after the first record only the last weights."""

    weights: list[dict[str, torch.Tensor]]
    grads: list[dict[str, torch.Tensor]]
    counted: tuple[int, int]  # bytes of this rank's optimizer states after the second backward: counted, predicted
    control: int  # elements of control messages in a step


def _steps_of(case: Case, stage: int, config: OptimizerConfig) -> Steps:
    runtime = build_runtime(case, stage, optimizer=config)
    whole = stage == STAGES[0]
    found = Steps([full_tensors(runtime, "master_shard")] if whole else [], [], (0, 0), 0)
    for step in range(STEPS):
        backwards_of_step(runtime, case, step)
        if whole:
            found.grads.append(full_tensors(runtime, "grad_shard"))
        if step == 1 and stage == CENSUS_STAGE:
            found.counted = (take_census(runtime).optimizer, predicted_state_bytes(runtime).optimizer)
        runtime.reset_ledger()
        runtime.step(LR)
        found.control = runtime.reset_ledger().control.elements
        if whole or step == STEPS - 1:
            found.weights.append(full_tensors(runtime, "master_shard"))
    return found


def _steps_by_stage(case: Case, config: OptimizerConfig) -> dict[int, Steps] | None:
    """Run one optimizer at every stage. Results on rank 0 only."""
    found = {stage: _steps_of(case, stage, config) for stage in STAGES}
    return found if dist.get_rank() == 0 else None


@cache
def steps_at(world: int, name: str) -> dict[int, Steps]:
    return run_ranks(_steps_by_stage, world, Case(world), OPTIMIZERS[name])[0]


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), f"{name}: {(found[name] - value).abs().max()}"


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("world", WORLDS[:2])
def test_every_stage_has_the_bits_of_plain_torch(world: int, name: str) -> None:
    """Compares complete steps, gradients included: the plain process runs the model too."""
    wanted = oracle(Case(world, steps=STEPS), reduces_every_backward=False, optimizer=OPTIMIZERS[name])
    for stage in STAGES:
        assert_equal(steps_at(world, name)[stage].weights[-1], wanted.weights)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("world", WORLDS)
def test_given_the_same_gradients_each_step_has_the_bits_of_plain_torch(world: int, name: str) -> None:
    """Also at world 3, where the backend chooses the order of the gradients' sums. Stages 1 to 3 equal stage 0."""
    found = steps_at(world, name)[STAGES[0]]
    masters = {key: value.clone() for key, value in found.weights[0].items()}
    plain = plain_optimizer(OPTIMIZERS[name], masters, LR)
    for grads, after in zip(found.grads, found.weights[1:], strict=True):
        for key, master in masters.items():
            master.grad = grads[key]
        plain.step()
        assert_equal(after, masters)


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("world", WORLDS)
def test_given_the_same_gradients_each_lamb_step_is_within_the_bound(world: int, name: str) -> None:
    """Moments have the same bits, since they depend only on the gradients; each step starts from the runtime's weights.

    Only the trust ratio may differ. Its two norms are sums of fp64 squares in another order: with fewer than 2^13
    terms they agree to 2^13 * 2^-53, far below fp32's spacing, so the ratio rounded to fp32 differs by at most one
    spacing, 2^-23 of itself. The product of rate, ratio and update is rounded in two other orders, at most 3 roundings
    of 2^-24 on each side: together the update differs by at most 2^-23 + 6 * 2^-24 = 2^-21 of itself. The sum is
    rounded once on each side, at most 2^-24 of the larger weight.
    """
    found = steps_at(world, name)[STAGES[0]]
    masters = {key: value.clone() for key, value in found.weights[0].items()}
    plain = plain_optimizer(OPTIMIZERS[name], masters, LR)
    for before, grads, after in zip(found.weights, found.grads, found.weights[1:], strict=False):
        for key, master in masters.items():
            master.copy_(before[key])
            master.grad = grads[key]
        plain.step()
        for key, master in masters.items():
            # The update is computed as a difference of weights, so it is known up to a rounding of those.
            larger = torch.maximum(before[key].abs(), master.abs()).double()
            update = (master - before[key]).double().abs() + 2**-23 * larger
            excess = (after[key] - master).double().abs() - (2**-21 * update + 2**-23 * larger)
            assert excess.max() <= 0, f"{key}: {excess.max()} above the bound"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world", WORLDS)
def test_every_optimizer_has_the_same_result_at_every_stage(world: int, name: str) -> None:
    for stage in STAGES[1:]:
        assert_equal(steps_at(world, name)[stage].weights[-1], steps_at(world, name)[0].weights[-1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world", WORLDS)
def test_counted_optimizer_bytes_equal_the_memory_model(world: int, name: str) -> None:
    counted, predicted = steps_at(world, name)[CENSUS_STAGE].counted
    assert counted == predicted


def test_the_closed_forms_follow_the_number_of_states() -> None:
    by_states = {
        states: formula(ZeroPlan.from_stage(1), Case(1).precision, state_bytes=4 * states) for states in (0, 1, 2)
    }
    assert by_states == {0: "8Ψ", 1: "8Ψ + 4Ψ/N", 2: "8Ψ + 8Ψ/N"}
    of_codes = formula(ZeroPlan.from_stage(1), Case(1).precision, state_bytes=AdamW8bitConfig().state_bytes)
    assert of_codes == "8Ψ + 2.03125Ψ/N"


def test_bf16_states_and_masters_take_18_to_8_bytes_an_element() -> None:
    """With replicated states and bf16 parameters. The second number is with fp32 gradients."""
    wide, narrow = AdamWConfig(), AdamWConfig(beta2=0.95, state_dtype="bf16")
    found = {}
    for master in ("fp32", "bf16"):
        for config in (wide, narrow):
            precisions = (MixedPrecision("bf16", reduce, reduce, master) for reduce in ("bf16", "fp32"))
            found[master, config is narrow] = [
                formula(ZeroPlan.from_stage(0), precision, state_bytes=config.state_bytes) for precision in precisions
            ]
    assert found == {
        ("fp32", False): ["16Ψ", "18Ψ"],
        ("fp32", True): ["12Ψ", "14Ψ"],
        ("bf16", False): ["12Ψ", "14Ψ"],
        ("bf16", True): ["8Ψ", "10Ψ"],
    }


@pytest.mark.parametrize(("config", "key"), [(AdamWConfig, "beta2"), (SgdConfig, "momentum")])
def test_a_state_that_bf16_cannot_let_fall_is_refused(config: type[AdamWConfig] | type[SgdConfig], key: str) -> None:
    """At the limit a state of 1 + 2^-7, which is the hardest to lower, falls; just above it does not."""
    hardest = torch.tensor(1 + 2**-7, dtype=torch.bfloat16)
    assert (hardest.float() * MOST_BETA_BF16).bfloat16() < hardest
    assert (hardest.float() * 0.9965).bfloat16() == hardest
    rule = rf"optimizer\.{key} must be at most 0\.99609375 with optimizer\.state_dtype=bf16"
    with pytest.raises(PlanError, match=rule):
        config(**{key: 0.999}, state_dtype="bf16")


@pytest.mark.parametrize("name", NAMES)
def test_only_lamb_sends_an_additional_control_message(name: str) -> None:
    found = steps_at(2, name)
    agreed = 4  # a loss, a squared norm and two fingerprints of the collectives
    wanted = agreed + (2 * len(found[0].weights[0]) if name in IS_BOUNDED else 0)
    assert {steps.control for steps in found.values()} == {wanted}
