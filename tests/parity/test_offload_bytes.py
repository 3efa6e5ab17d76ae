"""Counted bytes of offload on the device, in host memory and in the scratch file equal the formulas."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest
from harness.checkpoints import Setting
from harness.oracle import LR
from harness.ranks import run_ranks
from harness.trainee import backwards_of_step
from test_bytes import SCALARS_BYTES
from test_offload import FP32, SPEC, offload_to, runtime_of

from zero_runtime.accounting import host_tensors, predicted_offload_bytes, predicted_state_bytes, scratch_bytes
from zero_runtime.census import take_census
from zero_runtime.offload.copy_streams import Copies
from zero_runtime.offload.memory import Moves, host_bytes
from zero_runtime.offload_plan import OffloadPlan, Tier
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.state_bytes import UnitSize, model_state_bytes

PAPER = MixedPrecision("bf16", reduce="bf16", accumulate="bf16", master="fp32")
HOST = OffloadPlan(optimizer=Tier.HOST, copies=Copies)


def plans_of(stage: int, folder: Path) -> list[OffloadPlan]:
    nvme = offload_to(folder, params=False)
    plans = [
        replace(HOST, ratio=0.5),
        HOST,
        nvme,
        replace(nvme, ratio=0.5),
        replace(nvme, copies=Copies),
        replace(nvme, ratio=0.5, copies=Copies),
    ]
    if stage == 3:
        plans += [replace(plan, params=Tier.HOST) for plan in plans[-2:]]
        plans = [plan if plan.params is Tier.HOST else replace(plan, params=plan.optimizer) for plan in plans]
        plans += [replace(HOST, optimizer=Tier.DEVICE, params=Tier.HOST), offload_to(folder, params=True, ahead=0)]
    return plans


def _counts(folder: Path, setting: Setting) -> None:
    """Count between the fourth step's last backward and its update, when every slot has been used."""
    case = setting.case(model=SPEC)
    for plan in plans_of(setting.stage, folder):
        runtime = runtime_of(setting, plan, clip_norm=1.0)
        for step in range(3):
            backwards_of_step(runtime, case, step)
            runtime.step(LR)
        backwards_of_step(runtime, case, 3)
        census, predicted = take_census(runtime), predicted_state_bytes(runtime)
        counted = (census.params, census.grads, census.optimizer)
        assert counted == (predicted.params, predicted.grads, predicted.optimizer), plan
        away, tensors = predicted_offload_bytes(runtime), host_tensors(runtime)
        by_component = {
            name: sum(one.untyped_storage().nbytes() for one in found) for name, found in tensors.items() if found
        }
        assert by_component == {name: size for name, size in vars(away).items() if name != "scratch" and size}
        assert census.host == away.host > 0
        assert scratch_bytes(runtime) == away.scratch
        assert census.other <= SCALARS_BYTES, f"{plan}: something is kept that is nobody's"
        runtime.close()
        del runtime, tensors
        gc.collect()


@pytest.mark.parametrize(
    ("stage", "precision"),
    [(3, PAPER), *(pytest.param(*one, marks=pytest.mark.full) for one in ((1, PAPER), (3, FP32)))],
)
def test_counted_bytes_of_offload_equal_the_memory_model(stage: int, precision: MixedPrecision, tmp_path: Path) -> None:
    run_ranks(_counts, 2, tmp_path, Setting(stage, 2, precision))


def test_bytes_left_on_the_device_match_the_claims_of_the_offload_papers() -> None:
    """ZeRO-Offload's claim (arXiv 2101.06840): of the paper's 16 bytes per element, 2 are on the device and the rest
    on the host; and ZeRO-Infinity's claim that these 2 can be on the host as well."""
    numel, kind = 1 << 20, PAPER
    for stage, params_offloaded, device, host in ((2, False, 2 * numel, 14 + 2), (3, True, 0, 16)):
        size = UnitSize(
            numel, numel, True, params_offloaded=params_offloaded, optimizer_offloaded=True, separate_memory=True
        )
        states = model_state_bytes(ZeroPlan.from_stage(stage), [(size, kind)], world=1)
        found = host_bytes([(size, kind)], Moves(shard_count=1, prefetch=0))
        assert states.total == device
        assert 0 <= found.host - host * numel < 6 * 2 * 4096, "pages at the ends of at most six tensors"
