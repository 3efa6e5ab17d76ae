"""A speculative step, made during backward before the norm is known, has the bits of a step made after backward.

This holds if the guess was right, and if it is undone because of clipping, an overflow, another learning rate or a
write in between.
"""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from harness.checkpoints import Setting, assert_states
from harness.copies import LateCopies
from harness.oracle import ADAMW, LR
from harness.ranks import run_ranks
from harness.trainee import backwards_of_step
from test_offload import BF16, FP32, SPEC, offload_to, runtime_of

from zero_runtime.checkpoint.load import CheckpointReader, load_checkpoint
from zero_runtime.checkpoint.save import save_checkpoint
from zero_runtime.errors import NonFiniteError
from zero_runtime.offload.plan import OffloadPlan, Tier
from zero_runtime.offload.speculation import SpeculativeTier
from zero_runtime.offload.tier import Update
from zero_runtime.optim.configs import OptimizerConfig, SgdConfig
from zero_runtime.optim.loss_scaler import LossScaleRule
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import ZeroRuntime
from zero_runtime.step_report import StepReport

FP16 = MixedPrecision(param="fp16", reduce="fp16", master="fp32")
OVERFLOWS = LossScaleRule(initial_power=20, hysteresis=1)
HOST = OffloadPlan(optimizer=Tier.HOST, speculative=True, copies=LateCopies)


def plans_of(stage: int, folder: Path) -> list[OffloadPlan]:
    """Speculative plans for both tiers; at stage 3, which shards parameters, also plans that offload those."""
    nvme = replace(offload_to(folder, params=False), speculative=True)
    plans = [
        HOST,
        replace(HOST, ratio=0.5),
        nvme,
        replace(offload_to(folder, params=False, ratio=0.5), speculative=True),
        replace(nvme, copies=LateCopies),
    ]
    if stage == 3:
        plans += [replace(plan, params=plan.optimizer) for plan in (HOST, nvme)]
        plans += [replace(nvme, params=tier, copies=LateCopies) for tier in (Tier.HOST, Tier.NVME)]
    return plans


@dataclass
class Outcomes:
    """Results of a runtime's guesses. right: steps in which no unit had to be updated again; wrong: all other steps."""

    right: int = 0
    wrong: int = 0
    reports: list[str] = field(default_factory=list)  # as text, so that nan equals nan
    norms: list[float] = field(default_factory=list)


def watch(runtime: ZeroRuntime) -> Outcomes:
    outcomes, tier = Outcomes(), runtime.tier
    if isinstance(tier, SpeculativeTier):
        confirm, reject = tier.confirm, tier.reject

        def counting_confirm(update: Update) -> bool:
            used = confirm(update)
            outcomes.right += used
            outcomes.wrong += not used
            return used

        def counting_reject() -> None:
            outcomes.wrong += 1
            reject()

        tier.confirm, tier.reject = counting_confirm, counting_reject  # type: ignore[method-assign]
    return outcomes


def states_of(runtime: ZeroRuntime) -> dict[str, torch.Tensor]:
    found = {}
    for unit in runtime.units:
        with runtime.resident(unit):
            shards = {"master": unit.weights_shard, **runtime.optimizer.states_of(unit)}
            for state, shard in shards.items():
                found |= {f"{state}/{name}": values.clone() for name, values in unit.full_of(shard).items()}
    return found


def train(runtime: ZeroRuntime, setting: Setting, steps: range, lr: float = LR) -> Outcomes:
    case, outcomes = setting.case(model=SPEC), watch(runtime)
    for step in steps:
        runtime.expect_rate(lr)
        backwards_of_step(runtime, case, step)
        report = runtime.step(lr)
        outcomes.reports.append(str(report))
        outcomes.norms.append(report.grad_norm)
    return outcomes


def _clipping(folder: Path, setting: Setting, optimizer: OptimizerConfig) -> None:
    plain = runtime_of(setting, None, optimizer)
    norms = sorted(train(plain, setting, range(4)).norms)
    plain.close()
    for clip_norm in ((norms[1] + norms[2]) / 2, None):  # clips some of the steps; clips none
        plain = runtime_of(setting, None, optimizer, clip_norm=clip_norm)
        without, states = train(plain, setting, range(4)), states_of(plain)
        plain.close()
        clipped = sum(clip_norm is not None and norm > clip_norm for norm in without.norms)
        assert (0 < clipped < 4) if clip_norm is not None else not clipped
        for plan in plans_of(setting.stage, folder):
            runtime = runtime_of(setting, plan, optimizer, clip_norm=clip_norm)
            found = train(runtime, setting, range(4))
            assert (found.reports, found.wrong, found.right) == (without.reports, clipped, 4 - clipped), plan
            assert_states(states_of(runtime), states)
            runtime.close()


@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        (1, FP32),
        *(pytest.param(*one, marks=pytest.mark.full) for one in ((0, FP32), (2, BF16), (3, BF16), (3, FP32))),
    ],
)
def test_speculative_steps_have_the_same_bits_with_and_without_clipping(
    stage: int, precision: MixedPrecision, tmp_path: Path
) -> None:
    run_ranks(_clipping, 2, tmp_path, Setting(stage, 2, precision), ADAMW)


def test_speculative_steps_have_the_same_bits_on_one_rank_with_sgd(tmp_path: Path) -> None:
    run_ranks(_clipping, 1, tmp_path, Setting(3, 1, FP32, micro_batches=1), SgdConfig(momentum=0.9))


def _overflowing(folder: Path, nth: int) -> None:
    setting = Setting(3, 2, FP16)
    plain = runtime_of(setting, None, loss_scale=OVERFLOWS)
    wanted, states = train(plain, setting, range(16)).reports, states_of(plain)
    plain.close()
    skipped = sum("skipped=True" in report for report in wanted)
    assert 0 < skipped < 16
    for plan in plans_of(3, folder)[1::nth]:
        runtime = runtime_of(setting, plan, loss_scale=OVERFLOWS)
        found = train(runtime, setting, range(16))
        assert (found.reports, found.wrong, found.right) == (wanted, skipped, 16 - skipped), plan
        assert_states(states_of(runtime), states)
        runtime.close()


@pytest.mark.full
@pytest.mark.parametrize("nth", [4, pytest.param(2, marks=pytest.mark.full)])
def test_a_speculative_step_that_overflows_is_undone_and_skipped(nth: int, tmp_path: Path) -> None:
    run_ranks(_overflowing, 2, tmp_path, nth)


def _other_ways(folder: Path, nth: int) -> None:
    """A rate other than the expected one, a weight written between backward and step, and no expected rate at all."""
    setting, name = Setting(3, 2, BF16), "blocks.0.mix.weight"
    case = setting.case(model=SPEC)

    def run(plan: OffloadPlan | None) -> tuple[list[StepReport], dict[str, torch.Tensor]]:
        runtime, reports = runtime_of(setting, plan), []
        for step in range(4):
            if step:
                runtime.expect_rate(2 * LR if step == 1 else LR)
            backwards_of_step(runtime, case, step)
            if step == 2:
                with runtime.full_params([name], write=True) as values:
                    values[name].mul_(0.5)
            reports.append(runtime.step(LR))
        states = states_of(runtime)
        runtime.close()
        return reports, states

    wanted, states = run(None)
    for plan in plans_of(3, folder)[::nth]:
        with pytest.warns(UserWarning, match=r"call runtime\.expect_rate\(lr\) first"):
            reports, found = run(plan)
        assert reports == wanted
        assert_states(found, states)


@pytest.mark.full
@pytest.mark.parametrize("nth", [2, pytest.param(1, marks=pytest.mark.full)])
def test_another_rate_a_write_or_a_missing_rate_gives_the_same_bits(nth: int, tmp_path: Path) -> None:
    run_ranks(_other_ways, 2, tmp_path, nth)


def _saved(folder: Path, nth: int) -> None:
    """Save between two steps, each of which makes the second copies current; then resume without and with the plan."""
    setting = Setting(3, 2, BF16)
    for number, plan in enumerate(plans_of(3, folder)[::nth]):
        runtime = runtime_of(setting, plan)
        train(runtime, setting, range(3))
        path = save_checkpoint(runtime, folder / str(number), step=3, trainer={})
        wanted = train(runtime, setting, range(3, 6)).reports
        runtime.close()
        for other in (None, plan):
            again = runtime_of(setting, other)
            load_checkpoint(again, CheckpointReader.open(path, verify=False))
            assert train(again, setting, range(3, 6)).reports == wanted
            again.close()


@pytest.mark.full
@pytest.mark.parametrize("nth", [4, 2])
def test_a_checkpoint_of_a_speculative_run_resumes_with_the_same_reports(nth: int, tmp_path: Path) -> None:
    run_ranks(_saved, 2, tmp_path, nth)


def _not_finite(folder: Path) -> None:
    setting = Setting(2, 2, FP32, micro_batches=1)
    case = setting.case(model=SPEC)
    for plan in plans_of(2, folder):
        runtime = runtime_of(setting, plan)
        train(runtime, setting, range(2))
        before = states_of(runtime)
        runtime.expect_rate(LR)
        hooked = runtime.model.blocks[0].register_forward_hook(lambda _m, _i, out: out * torch.inf)
        backwards_of_step(runtime, case, 2)
        hooked.remove()
        with pytest.raises(NonFiniteError, match="nothing was updated"):
            runtime.step(LR)
        assert_states(states_of(runtime), before)
        train(runtime, setting, range(2, 3))
        runtime.close()


def test_a_non_finite_step_raises_and_leaves_all_states_unchanged(tmp_path: Path) -> None:
    run_ranks(_not_finite, 2, tmp_path)


def _forgotten(folder: Path) -> None:
    """Closing in the middle of a step does not wait for gradients that will never arrive."""
    setting = Setting(3, 1, BF16, micro_batches=1)
    for plan in plans_of(3, folder):
        runtime = runtime_of(setting, plan)
        runtime.expect_rate(LR)
        runtime._guess()
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "speculation"]
        assert thread.daemon, "the process of a rank that fails in backward must end without the missing gradients"
        runtime.close()


def test_closing_during_a_guess_does_not_wait_for_missing_gradients(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_ranks(_forgotten, 1, tmp_path)


def test_a_speculative_plan_without_offloaded_states_is_refused() -> None:
    row = ZeroPlan.from_stage(3)
    for plan in (OffloadPlan(speculative=True), OffloadPlan(optimizer=Tier.HOST, speculative=True)):
        with pytest.raises(
            ValueError, match="expected masters and states that are offloaded from cpu, found that they stay on it"
        ):
            plan.check(row, "cpu")
    OffloadPlan(optimizer=Tier.HOST, speculative=True).check(row, "cuda")
    with pytest.raises(ValueError, match="are offloaded from cuda, found that they stay on it"):
        OffloadPlan(params=Tier.HOST, speculative=True).check(row, "cuda")
