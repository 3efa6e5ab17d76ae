"""Runs with states offloaded to host memory, or through it to a file, have the bits of the same run without offload.

A CPU's memory is the host's memory, so the plans give `copies` explicitly: the tier then moves shards between two
places in that memory as it does between a GPU and the host. `LateCopies` fill their targets only when they are waited
for.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.checkpoints import SAVED_AFTER, Setting, assert_states, train, whole
from harness.copies import LateCopies
from harness.oracle import ADAMW
from harness.ranks import run_ranks
from harness.trainee import backwards_of_step
from test_offload import BF16, FP32, SPEC, offload_to, runtime_of

from zero_runtime.accounting import host_tensors
from zero_runtime.checkpoint.background import BackgroundSaver
from zero_runtime.checkpoint.load import CheckpointReader, load_checkpoint
from zero_runtime.offload.copy_streams import Copies
from zero_runtime.offload.host import HostTier
from zero_runtime.offload_plan import OffloadPlan, Tier
from zero_runtime.optim.configs import AdamW8bitConfig, LambConfig, LionConfig, OptimizerConfig, SgdConfig
from zero_runtime.optim.loss_scaler import LossScaleRule
from zero_runtime.precision import MixedPrecision

FP16 = MixedPrecision(param="fp16", reduce="fp16", master="fp32")
PAPER = MixedPrecision("bf16", reduce="bf16", accumulate="bf16", master="fp32")
OPTIMIZER = OffloadPlan(optimizer=Tier.HOST, copies=LateCopies)
PARAMS = OffloadPlan(params=Tier.HOST, copies=LateCopies)
BOTH = OffloadPlan(Tier.HOST, Tier.HOST, copies=LateCopies)
CLIP = 0.3  # below the gradient norm of every step in these tests


def plans_of(stage: int) -> list[OffloadPlan]:
    plans = [OPTIMIZER, replace(OPTIMIZER, ratio=0.5)]
    return plans + ([PARAMS, replace(BOTH, copies=Copies), replace(BOTH, ratio=0.5)] if stage == 3 else [])


def behind_it(stage: int, folder: Path) -> list[OffloadPlan]:
    """Plans with the states in a file and the parameters on the device, in host memory, or in the file as well."""
    optimizer = replace(offload_to(folder, params=False), copies=LateCopies)
    plans = [optimizer, replace(offload_to(folder, params=False, ratio=0.5, ahead=0), copies=LateCopies)]
    if stage == 3:
        plans += [replace(optimizer, params=Tier.HOST, ratio=ratio) for ratio in (1.0, 0.5)]
        plans += [
            replace(offload_to(folder, params=True, ahead=ahead), copies=copies)
            for ahead, copies in ((1, LateCopies), (2, Copies))
        ]
    return plans


def _rows(setting: Setting, optimizer: OptimizerConfig, plans: list[OffloadPlan], clip_norm: float | None) -> None:
    case = setting.case(model=SPEC)
    plain = runtime_of(setting, None, optimizer, clip_norm=clip_norm)
    losses, states = train(plain, case, 0, 3), whole(plain)
    plain.close()
    for plan in plans:
        runtime = runtime_of(setting, plan, optimizer, clip_norm=clip_norm)
        assert train(runtime, case, 0, 3) == losses, plan
        assert_states(whole(runtime), states)
        with runtime.full_params(["blocks.0.mix.weight"], write=True) as values:
            values["blocks.0.mix.weight"].fill_(0.5)
        with runtime.full_params(["blocks.0.mix.weight", "norm.bias"]) as values:
            assert bool((values["blocks.0.mix.weight"] == 0.5).all())
            assert torch.equal(values["norm.bias"], states["master/norm.bias"].to(values["norm.bias"].dtype))
        train(runtime, case, 3, 1)
        runtime.close()


PRECISIONS = {"fp32": FP32, "bf16": BF16, "paper": PAPER}
EVERY = list(product((0, 1, 2, 3), (1, 2), PRECISIONS))


def cells_of(*short: tuple[int, int, str]) -> list[Any]:
    """Every cell; those not in `short` run only in the long form."""
    return [pytest.param(*one, marks=() if one in short else pytest.mark.full) for one in EVERY]


@pytest.mark.parametrize(
    ("stage", "world", "precision"),
    cells_of((0, 2, "paper"), (3, 2, "paper")),
)
def test_states_offloaded_to_the_host_give_the_same_bits(stage: int, world: int, precision: str) -> None:
    run_ranks(_rows, world, Setting(stage, world, PRECISIONS[precision]), ADAMW, plans_of(stage), CLIP)


@pytest.mark.parametrize(("stage", "world", "precision"), cells_of((3, 2, "paper")))
def test_states_offloaded_through_the_host_to_a_file_give_the_same_bits(
    stage: int, world: int, precision: str, tmp_path: Path
) -> None:
    run_ranks(_rows, world, Setting(stage, world, PRECISIONS[precision]), ADAMW, behind_it(stage, tmp_path), CLIP)


@pytest.mark.parametrize(
    "optimizer",
    [
        *(pytest.param(one, marks=pytest.mark.full) for one in (SgdConfig(momentum=0.9), LionConfig())),
        AdamW8bitConfig(),
    ],
    ids=lambda config: config.name,
)
def test_states_of_other_optimizers_can_be_offloaded_to_the_host(optimizer: OptimizerConfig, tmp_path: Path) -> None:
    plans = [BOTH, behind_it(3, tmp_path)[-1]]
    run_ranks(_rows, 2, Setting(3, 2, BF16, micro_batches=1), optimizer, plans, None)


@pytest.mark.full
def test_replicated_shards_can_be_offloaded_to_the_host(tmp_path: Path) -> None:
    run_ranks(_rows, 2, Setting(3, 2, BF16, shard_ranks=1), ADAMW, [BOTH, *behind_it(3, tmp_path)[1::3]], CLIP)


def _saves(folder: Path, precision: MixedPrecision, plan: OffloadPlan) -> None:
    setting = Setting(3, 2, precision)
    case = setting.case(model=SPEC)
    runtime = runtime_of(setting, plan)
    train(runtime, case, 0, SAVED_AFTER)
    saver = BackgroundSaver(folder / "saved")
    path = saver.save(runtime, step=SAVED_AFTER, trainer={})  # in the background: the update of its step may still run
    wanted = train(runtime, case, SAVED_AFTER, 3)
    saver.wait(runtime)
    runtime.close()
    for other in (None, OPTIMIZER, plan):
        again = runtime_of(setting, other)
        load_checkpoint(again, CheckpointReader.open(path, verify=False))
        assert train(again, case, SAVED_AFTER, 3) == wanted
        again.close()


@pytest.mark.parametrize("precision", [pytest.param(FP32, marks=pytest.mark.full), BF16], ids=["fp32", "bf16"])
def test_states_offloaded_to_the_host_are_saved_and_loaded(precision: MixedPrecision, tmp_path: Path) -> None:
    run_ranks(_saves, 2, tmp_path, precision, BOTH)


@pytest.mark.parametrize(
    "kept", [*(pytest.param(kept, marks=pytest.mark.full) for kept in (0, 2)), 4], ids=["device", "host", "file"]
)
def test_states_offloaded_through_the_host_to_a_file_are_saved_and_loaded(kept: int, tmp_path: Path) -> None:
    run_ranks(_saves, 2, tmp_path, BF16 if kept else FP32, behind_it(3, tmp_path)[kept])


def _skips(folder: Path, nth: int) -> None:
    """The loss scale starts so high that the first steps overflow."""
    case = Setting(3, 2, FP16).case(model=SPEC)
    found = []
    for offload in (None, replace(BOTH, ratio=0.5), *behind_it(3, folder)[1::nth]):
        scale = LossScaleRule(initial_power=20, hysteresis=1)
        runtime = runtime_of(Setting(3, 2, FP16), offload, loss_scale=scale)
        reports = []
        for step in range(16):
            backwards_of_step(runtime, case, step)
            reports.append(runtime.step(1e-2))
        found.append(([(report.skipped, report.loss_scale) for report in reports], reports[-1].loss, whole(runtime)))
        runtime.close()
    plain, *others = found
    assert plain[0][0][0]
    assert not plain[0][-1][0]
    for other in others:
        assert other[:2] == plain[:2]
        assert_states(other[2], plain[2])


@pytest.mark.full
@pytest.mark.parametrize("nth", [4, pytest.param(2, marks=pytest.mark.full)])
def test_a_skipped_step_leaves_states_on_the_host_unchanged(nth: int, tmp_path: Path) -> None:
    run_ranks(_skips, 2, tmp_path, nth)


def _gradients(folder: Path) -> None:
    """full_grad returns a gradient that was moved to the host, and a direct read returns the updated weight."""
    setting = Setting(1, 1, FP32, micro_batches=1)
    case, found = setting.case(model=SPEC), []
    for offload in (None, OPTIMIZER, behind_it(1, folder)[0]):
        runtime = runtime_of(setting, offload)
        backwards_of_step(runtime, case, 0)
        gradient = runtime.full_grad("blocks.0.mix.weight")
        runtime.step(1e-2)
        found.append((gradient, runtime.model.blocks[0].mix.weight.clone()))
        runtime.close()
    (gradient, weight), *others = found
    for sent, returned in others:
        assert torch.equal(gradient, sent)
        assert torch.equal(weight, returned)


def test_full_gradients_and_updated_weights_can_be_read_with_offload(tmp_path: Path) -> None:
    run_ranks(_gradients, 1, tmp_path)


class BrokenCopies(LateCopies):
    """The third copy to the device fails."""

    count = 0

    def to_device(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        self.count += 1
        if self.count == 3:
            raise RuntimeError("the bus is gone")
        return super().to_device(*args, **kwargs)


def _fails(folder: Path) -> None:
    setting = Setting(2, 1, BF16)
    for plan in (OPTIMIZER, behind_it(2, folder)[0]):
        runtime = runtime_of(setting, replace(plan, copies=BrokenCopies))
        with pytest.raises(RuntimeError, match="the bus is gone"):
            train(runtime, setting.case(model=SPEC), 0, 2)
        runtime.close()


def test_an_error_in_the_host_thread_ends_the_run(tmp_path: Path) -> None:
    run_ranks(_fails, 1, tmp_path)


def _closes_during_an_update() -> None:
    setting = Setting(2, 1, BF16)
    case, go_on = setting.case(model=SPEC), threading.Event()
    runtime = runtime_of(setting, OPTIMIZER)
    tier = runtime.tier
    assert isinstance(tier, HostTier)
    tier._worker.submit(go_on.wait)  # the update is behind it, and runs when `close` waits for the thread
    tier.forget = go_on.set  # type: ignore[method-assign]  # called by `close` before it waits
    backwards_of_step(runtime, case, 0)
    runtime.step(1e-2)
    jobs = [location.job for location in tier._locations.values()]
    runtime.close()
    assert [job.exception() for job in jobs if job is not None] == [None] * len(jobs)


def test_an_update_under_way_ends_before_its_units_are_freed() -> None:
    run_ranks(_closes_during_an_update, 1)


def _refusals() -> None:
    with pytest.raises(ValueError, match=r"one unit after another .* found Lamb"):
        runtime_of(Setting(2, 1), OPTIMIZER, LambConfig())
    with pytest.raises(ValueError, match="expected a plan that shards parameters"):
        runtime_of(Setting(2, 1), BOTH)
    plain = OffloadPlan(optimizer=Tier.HOST)  # on a CPU without `copies` the host is the device
    runtime = runtime_of(Setting(2, 1), plain, LambConfig())
    assert host_tensors(runtime) == {}
    runtime.close()


def test_lamb_and_unsharded_parameters_are_refused_with_separate_host_memory() -> None:
    run_ranks(_refusals, 1)
