"""On a GPU, all rows that offload states to host memory or to a file have one result.

It is the result of rows without offload, as far as the arithmetic of the two devices agrees.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness.models import TinyTransformer, batch, token_loss_sum
from harness.oracle import ADAMW, LR, Case, step_tokens

from zero_runtime.accounting import host_tensors, predicted_offload_bytes, predicted_state_bytes
from zero_runtime.census import take_census
from zero_runtime.offload_plan import OffloadPlan, ScratchSettings, Tier
from zero_runtime.optim.loss_scaler import UNSCALED, LossScaleRule
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime
from zero_runtime.step_report import StepReport

pytestmark = pytest.mark.gpu
STEPS = 6
NONE = OffloadPlan()
OPTIMIZER = OffloadPlan(optimizer=Tier.HOST)
BOTH = OffloadPlan(Tier.HOST, Tier.HOST)
PARAMS = OffloadPlan(params=Tier.HOST)
FP32 = Case(world=1)
BF16 = replace(FP32, precision=MixedPrecision("bf16"))
FP16 = replace(FP32, precision=MixedPrecision(param="fp16", reduce="fp16", master="fp32"))
OVERFLOWS = LossScaleRule(initial_power=32, hysteresis=1)
OPTIMIZER_NVME = OffloadPlan(
    optimizer=Tier.NVME, scratch=ScratchSettings(Path(tempfile.gettempdir()), block_bytes=8192)
)
BOTH_NVME = replace(OPTIMIZER_NVME, params=Tier.NVME)
Row = tuple[int, OffloadPlan]  # the row of the plan, and where its states are stored
HOST_ROWS: list[Row] = [
    *((stage, OPTIMIZER) for stage in (0, 1, 2, 3)),
    (3, BOTH),
    *((stage, OPTIMIZER_NVME) for stage in (0, 1, 2, 3)),
    (3, BOTH_NVME),
    (3, replace(OPTIMIZER_NVME, params=Tier.HOST)),
]


def runtime_of(
    case: Case, stage: int, offload: OffloadPlan, device: torch.device, clip_norm: float | None = None
) -> ZeroRuntime:
    rule = OVERFLOWS if case.precision.param == "fp16" else UNSCALED
    return ZeroRuntime(
        TinyTransformer(case.model),
        ZeroPlan.from_stage(stage),
        case.precision,
        ADAMW,
        RuntimeSettings(clip_norm=clip_norm, offload=offload, loss_scale=rule),
        device,
    )


def backward(runtime: ZeroRuntime, case: Case, step: int) -> None:
    ids, labels = (part.to(runtime.device) for part in batch(case.model, step, 0, 0))
    runtime.backward(token_loss_sum(runtime.model, ids, labels) / runtime.sum_over_ranks(step_tokens(case, step)))


def train(runtime: ZeroRuntime, case: Case, steps: int = STEPS) -> list[StepReport]:
    reports = []
    for step in range(steps):
        backward(runtime, case, step)
        reports.append(runtime.step(LR))
    return reports


def masters(runtime: ZeroRuntime) -> dict[str, torch.Tensor]:
    with runtime.full_params() as values:
        return {name: value.cpu() for name, value in values.items()}


def assert_one_result(
    case: Case, rows: list[tuple[int, OffloadPlan]], device: torch.device, clip: float | None
) -> None:
    found = []
    for stage, offload in rows:
        runtime = runtime_of(case, stage, offload, device, clip)
        found.append(([str(report) for report in train(runtime, case, 24)], masters(runtime)))
        runtime.close()
    (wanted, weights), *others = found
    for row, (reports, other) in zip(rows[1:], others, strict=True):
        assert reports == wanted, row
        assert all(torch.equal(other[name], value) for name, value in weights.items()), row


@pytest.mark.parametrize("case", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("clip_norm", [None, 5.0])
def test_states_on_the_host_give_one_result_in_every_row(
    case: Case, clip_norm: float | None, device: torch.device
) -> None:
    """Gradients are clipped in some steps."""
    assert_one_result(case, HOST_ROWS, device, clip_norm)


def test_steps_that_overflow_are_skipped_in_every_row(device: torch.device) -> None:
    assert_one_result(FP16, HOST_ROWS, device, None)


@pytest.mark.parametrize("case", [FP32, BF16], ids=["fp32", "bf16"])
def test_parameters_that_are_stored_on_the_host_change_no_bits(case: Case, device: torch.device) -> None:
    assert_one_result(case, [(3, NONE), (3, PARAMS), (3, replace(PARAMS, ratio=0.5))], device, None)


def test_the_first_update_on_the_host_equals_the_devices_within_rounding(device: torch.device) -> None:
    """An update is at most lr (|m / sqrt(v)| <= 1 in the first step) plus the decay.

    The update is computed by a chain of at most sixteen operations, the weight by one of four. On either device, each
    operation rounds by at most 2^-24 of its result.
    """
    found = []
    for offload in (NONE, OPTIMIZER):
        runtime = runtime_of(FP32, 2, offload, device)
        train(runtime, FP32, 1)
        found.append(masters(runtime))
        runtime.close()
    plain, resting = found
    for name, wanted in plain.items():
        bound = 2 * 2.0**-24 * (4 * wanted.abs() + 16 * LR)
        assert bool(((resting[name] - wanted).abs() <= bound).all()), name


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a tensor in host memory is page-locked. torch asks for the first byte of its storage, which lies before
    the first complete page; the array's own tensor begins where the tensor does."""
    return torch.from_numpy(tensor.view(torch.uint8).numpy()).is_pinned()


@pytest.mark.parametrize(("stage", "offload"), [*HOST_ROWS, (3, PARAMS)])
def test_counted_bytes_equal_the_prediction_and_tensors_that_are_copied_are_pinned(
    stage: int, offload: OffloadPlan, device: torch.device
) -> None:
    runtime = runtime_of(BF16, stage, offload, device)
    train(runtime, BF16, 2)
    backward(runtime, BF16, 2)
    census, away = take_census(runtime), predicted_offload_bytes(runtime)
    assert census.states == predicted_state_bytes(runtime).total
    assert census.host == away.host
    by_component = host_tensors(runtime)
    if offload.uses_nvme:  # its slots are read, updated and written, not copied to the GPU
        by_component.pop("staging")
    tensors = [tensor for found in by_component.values() for tensor in found]
    assert tensors
    assert all(tensor.device.type == "cpu" and is_pinned(tensor) for tensor in tensors)
    runtime.close()


def test_masters_stay_on_the_host_and_updated_parameters_return_to_the_device(device: torch.device) -> None:
    runtime = runtime_of(BF16, 2, OPTIMIZER, device)
    train(runtime, BF16, 2)
    for unit in runtime.units:
        assert unit.weights_shard.device.type == "cpu"
        assert unit.param_shard.device == device
        assert torch.equal(unit.param_shard.cpu(), unit.weights_shard.to(torch.bfloat16))
    runtime.close()
