"""On one GPU every row has the bits of exact arithmetic, one result in bf16, and waits for the GPU once in a step.

Rows are not compared with plain torch on the same GPU: cuBLAS chooses its algorithm by the alignment of its operands,
and in the flat tensor weights are aligned otherwise than alone; and torch's own AdamW rounds otherwise on a GPU (it
multiplies by a reciprocal where it divides on a CPU). With exact arithmetic (harness/exact.py) neither matters.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from harness.exact import rows_of, wrong_rows
from harness.models import TinyTransformer, batch, token_loss_sum
from harness.oracle import ADAMW, LR, Case, step_tokens

from zero_runtime.accounting import predicted_state_bytes
from zero_runtime.census import take_census
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime

pytestmark = pytest.mark.gpu
STAGES = (0, 1, 2, 3)
STEPS = 5
FP32 = Case(world=1)
BF16 = replace(FP32, precision=MixedPrecision("bf16"))
ONE_READ = 1  # loss, norm and agreement of the ranks, in one transfer at the end of a step


def runtime_of(case: Case, stage: int, device: torch.device) -> ZeroRuntime:
    plan = ZeroPlan.from_stage(stage)
    return ZeroRuntime(TinyTransformer(case.model), plan, case.precision, ADAMW, RuntimeSettings(), device)


def one_backward(runtime: ZeroRuntime, case: Case, step: int) -> None:
    ids, labels = (part.pin_memory().to(runtime.device, non_blocking=True) for part in batch(case.model, step, 0, 0))
    loss = token_loss_sum(runtime.model, ids, labels) / runtime.sum_over_ranks(step_tokens(case, step))
    runtime.backward(loss)


def losses_of(case: Case, stage: int, device: torch.device) -> list[float]:
    runtime = runtime_of(case, stage, device)
    losses = []
    for step in range(STEPS):
        one_backward(runtime, case, step)
        assert take_census(runtime).states == predicted_state_bytes(runtime).total
        losses.append(runtime.step(LR).loss)
    runtime.close()
    return losses


def test_every_row_has_the_bits_of_plain_torch_in_fp64(device: torch.device) -> None:
    assert wrong_rows(rows_of(1), device) == []


@pytest.mark.parametrize("case", [FP32, BF16], ids=["fp32", "bf16"])
def test_all_rows_have_the_same_losses_which_fall(case: Case, device: torch.device) -> None:
    first, *others = [losses_of(case, stage, device) for stage in STAGES]
    assert all(other == first for other in others)
    assert first[-1] < first[0]


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_waits_for_the_gpu_once(stage: int, device: torch.device) -> None:
    runtime = runtime_of(BF16, stage, device)
    for step in range(3):
        one_backward(runtime, BF16, step)
        runtime.step(LR)
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            one_backward(runtime, BF16, 3)
            runtime.step(LR)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [f"{one.filename}:{one.lineno}" for one in caught if "synchroniz" in str(one.message)]
    runtime.close()
    assert len(waits) == ONE_READ, waits
