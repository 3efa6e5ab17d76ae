"""Runs with states in a scratch file have the bits of the same run without: losses, weights, moments, checkpoints."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness.checkpoints import SAVED_AFTER, Setting, assert_states, train, whole
from harness.models import TinySpec, TinyTransformer
from harness.oracle import ADAMW
from harness.ranks import run_ranks
from harness.trainee import backwards_of_step

from zero_runtime.accounting import state_tensors
from zero_runtime.checkpoint.background import BackgroundSaver
from zero_runtime.checkpoint.load import CheckpointReader, load_checkpoint
from zero_runtime.offload_plan import OffloadPlan, ScratchSettings, Tier
from zero_runtime.optim.configs import AdamW8bitConfig, LambConfig, LionConfig, OptimizerConfig, SgdConfig
from zero_runtime.optim.loss_scaler import UNSCALED, LossScaleRule
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime

FP32 = MixedPrecision()
BF16 = MixedPrecision(param="bf16", reduce="fp32", master="fp32", compute="fp32")
SPEC = TinySpec(frozen=True, tied=True)


def runtime_of(
    setting: Setting,
    offload: OffloadPlan | None,
    optimizer: OptimizerConfig = ADAMW,
    loss_scale: LossScaleRule = UNSCALED,
    clip_norm: float | None = None,
) -> ZeroRuntime:
    return ZeroRuntime(
        TinyTransformer(SPEC),
        ZeroPlan.from_stage(setting.stage, shard_ranks=setting.shard_ranks if setting.stage else None),
        setting.precision,
        optimizer,
        RuntimeSettings(
            micro_batches=setting.micro_batches,
            clip_norm=clip_norm,
            offload=offload or OffloadPlan(),
            loss_scale=loss_scale,
        ),
        torch.device("cpu"),
    )


def offload_to(folder: Path, *, params: bool, ratio: float = 1.0, ahead: int = 1) -> OffloadPlan:
    scratch = ScratchSettings(folder, block_bytes=8192, requests=2, ahead=ahead)
    return OffloadPlan(Tier.NVME if params else Tier.DEVICE, Tier.NVME, ratio, scratch)


def _rows(folder: Path, setting: Setting, optimizer: OptimizerConfig, plans: list[OffloadPlan]) -> None:
    case = setting.case(model=SPEC)
    plain = runtime_of(setting, None, optimizer)
    losses, states = train(plain, case, 0, 4), whole(plain)
    plain.close()
    for plan in plans:
        runtime = runtime_of(setting, plan, optimizer)
        assert train(runtime, case, 0, 4) == losses, plan
        assert_states(whole(runtime), states)
        with runtime.full_params(["blocks.0.mix.weight"], write=True) as values:
            values["blocks.0.mix.weight"].fill_(0.5)
        with runtime.full_params(["blocks.0.mix.weight", "norm.bias"]) as values:
            assert bool((values["blocks.0.mix.weight"] == 0.5).all())
            assert torch.equal(values["norm.bias"], states["master/norm.bias"].to(values["norm.bias"].dtype))
        runtime.close()
    assert list(folder.iterdir()) == [], "a scratch file is unlinked while it is open"


SHORT = [(1, 2, FP32), (3, 2, BF16)]
EVERY = [(stage, world, precision) for stage in (0, 1, 2, 3) for world in (1, 2) for precision in (FP32, BF16)]


@pytest.mark.parametrize(
    ("stage", "world", "precision"),
    [pytest.param(*one, marks=() if one in SHORT else pytest.mark.full) for one in EVERY],
    ids=lambda value: getattr(value, "param", str(value)),
)
def test_states_offloaded_to_a_file_give_the_same_bits(
    stage: int, world: int, precision: MixedPrecision, tmp_path: Path
) -> None:
    plans = [offload_to(tmp_path, params=False), offload_to(tmp_path, params=False, ratio=0.5, ahead=0)]
    if stage == 3:
        plans += [offload_to(tmp_path, params=True), offload_to(tmp_path, params=True, ratio=0.4, ahead=2)]
    run_ranks(_rows, world, tmp_path, Setting(stage, world, precision), ADAMW, plans)


@pytest.mark.parametrize(
    "optimizer",
    [
        LionConfig(),
        *(pytest.param(one, marks=pytest.mark.full) for one in (SgdConfig(momentum=0.9), AdamW8bitConfig())),
    ],
    ids=lambda config: config.name,
)
def test_states_of_other_optimizers_can_be_offloaded(optimizer: OptimizerConfig, tmp_path: Path) -> None:
    run_ranks(_rows, 2, tmp_path, Setting(3, 2, BF16), optimizer, [offload_to(tmp_path, params=True)])


def _saves(folder: Path, precision: MixedPrecision, optimizer: OptimizerConfig = ADAMW) -> None:
    """Save offloaded states, load them into memory and back into a file: all runs continue with the same losses."""
    resting, setting = offload_to(folder, params=True), Setting(3, 2, precision)
    case = setting.case(model=SPEC)
    runtime = runtime_of(setting, resting, optimizer)
    train(runtime, case, 0, SAVED_AFTER)
    saver = BackgroundSaver(folder / "saved")
    path = saver.save(runtime, step=SAVED_AFTER, trainer={})
    saver.wait(runtime)
    wanted = train(runtime, case, SAVED_AFTER, 3)
    runtime.close()
    for plan in (None, resting, offload_to(folder, params=False)):
        again = runtime_of(setting, plan, optimizer)
        load_checkpoint(again, CheckpointReader.open(path, verify=False))
        assert train(again, case, SAVED_AFTER, 3) == wanted
        again.close()


@pytest.mark.parametrize("precision", [pytest.param(FP32, marks=pytest.mark.full), BF16], ids=["fp32", "bf16"])
def test_offloaded_states_are_saved_and_loaded(precision: MixedPrecision, tmp_path: Path) -> None:
    run_ranks(_saves, 2, tmp_path, precision)


@pytest.mark.full
def test_offloaded_8_bit_codes_are_saved_and_loaded_as_numbers(tmp_path: Path) -> None:
    run_ranks(_saves, 2, tmp_path, BF16, AdamW8bitConfig())


def _memory(folder: Path) -> None:
    runtime = runtime_of(Setting(3, 2, BF16), offload_to(folder, params=True))
    train(runtime, Setting(3, 2, BF16).case(model=SPEC), 0, 2)
    for unit in runtime.units:
        assert unit.param_shard.numel() == 0
        assert not unit.wait_current(), "there is nothing to read"
        assert unit.master_shard is None or unit.master_shard.numel() == 0
        assert all(state.numel() == 0 for state in runtime.optimizer.states_of(unit).values())
    assert sum(tensor.numel() for tensors in state_tensors(runtime).values() for tensor in tensors) == 0 or all(
        tensor.untyped_storage().nbytes() == 0 for tensors in state_tensors(runtime).values() for tensor in tensors
    )
    runtime.close()
    gc.collect()


@pytest.mark.parametrize("world", [1, 2])
def test_between_steps_offloaded_states_take_no_memory(world: int, tmp_path: Path) -> None:
    run_ranks(_memory, world, tmp_path)


def _refusals(folder: Path) -> None:
    with pytest.raises(ValueError, match="expected a plan that shards parameters"):
        runtime_of(Setting(2, 1), offload_to(folder, params=True))
    with pytest.raises(ValueError, match=r"one unit after another .* found Lamb"):
        runtime_of(Setting(2, 1), offload_to(folder, params=False), LambConfig())
    resting = {tier: OffloadPlan(optimizer=tier, scratch=ScratchSettings(folder)) for tier in Tier}
    for tier in (Tier.HOST, Tier.NVME):
        with pytest.raises(ValueError, match="expected a CPU or a CUDA device, found mps"):
            resting[tier].check(ZeroPlan.from_stage(2), "mps")
    resting[Tier.NVME].check(ZeroPlan.from_stage(2), "cuda")
    resting[Tier.HOST].check(ZeroPlan.from_stage(2), "cuda")
    resting[Tier.DEVICE].check(ZeroPlan.from_stage(2), "cuda")
    with pytest.raises(ValueError, match="expected a folder for the scratch file"):
        OffloadPlan(optimizer=Tier.NVME)
    with pytest.raises(ValueError, match="several times as large"):
        replace(offload_to(folder, params=True), optimizer=Tier.DEVICE)
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        replace(offload_to(folder, params=True), ratio=0.0)


def test_unsupported_offload_plans_are_refused(tmp_path: Path) -> None:
    run_ranks(_refusals, 1, tmp_path)


def _skips(folder: Path) -> None:
    """The same steps overflow and are skipped; states that were read ahead for them are released."""
    fp16 = MixedPrecision(param="fp16", reduce="fp16", master="fp32")
    setting = Setting(3, 2, fp16)
    case = setting.case(model=SPEC)
    found = []
    for offload in (None, offload_to(folder, params=True)):
        runtime = runtime_of(setting, offload, loss_scale=LossScaleRule(initial_power=32, hysteresis=1))
        reports = []
        for step in range(24):
            backwards_of_step(runtime, case, step)
            reports.append(runtime.step(1e-2))
        with runtime.full_params() as values:
            found.append((reports, {name: value.clone() for name, value in values.items()}))
        runtime.close()
    (plain, wanted), (resting, weights) = found
    assert [(report.skipped, report.loss_scale) for report in plain] == [
        (report.skipped, report.loss_scale) for report in resting
    ]
    assert any(report.skipped for report in plain)
    assert not plain[-1].skipped
    for name, value in wanted.items():
        assert torch.equal(weights[name], value), name


@pytest.mark.full
def test_a_skipped_step_leaves_offloaded_states_unchanged(tmp_path: Path) -> None:
    run_ranks(_skips, 2, tmp_path)
