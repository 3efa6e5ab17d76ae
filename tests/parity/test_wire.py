"""Quantised gathers and reductions: every rank computes with the values of the codes, each gradient is rounded once,
and the bytes are the closed forms."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness.models import TinyTransformer, batch, token_loss_sum
from harness.oracle import ADAMW, LR, Case
from harness.ranks import run_ranks
from harness.trainee import backwards_of_step, full_tensors

from zero_runtime import runtime
from zero_runtime.accounting import predicted_state_bytes
from zero_runtime.census import take_census
from zero_runtime.kernels.wire_format import dequantise_, packed_numel, quantise_
from zero_runtime.limits import ConfigError
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.messages import CollectiveCounts, gathered, reduced
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime
from zero_runtime.unit import Unit
from zero_runtime.wire import BITS, Wire

BF16 = MixedPrecision("bf16")
BOTH = Wire("int8", "int8")
FED_BACK = Wire(None, "int4", error_feedback=True)
STEPS = 3


def build(case: Case, stage: int, wire: Wire) -> ZeroRuntime:
    settings = RuntimeSettings(micro_batches=case.micro_batches, clip_norm=case.clip_norm, wire=wire)
    plan = ZeroPlan.from_stage(stage, shard_ranks=case.shard_ranks)
    return ZeroRuntime(TinyTransformer(case.model), plan, case.precision, ADAMW, settings, torch.device("cpu"))


def read_back(values: torch.Tensor, dtype: str) -> torch.Tensor:
    packed = torch.empty(packed_numel(values.numel(), BITS[dtype]), dtype=torch.uint8)
    quantise_(packed, values, BITS[dtype])
    found = torch.empty(values.numel())
    dequantise_(found, packed, BITS[dtype])
    return found


# ---- bits and bytes --------------------------------------------------------------------------------------------------


def _trained(case: Case, wire: Wire) -> dict[int, tuple[dict[str, torch.Tensor], tuple[int, int]]]:
    """By stage: the weights after some steps; and the bytes that the last step sent, counted and in closed form."""
    found = {}
    for stage in (1, 2, 3):
        runtime = build(case, stage, wire)
        for step in range(STEPS):
            runtime.reset_ledger()
            backwards_of_step(runtime, case, step)
            runtime.step(LR)
        counted = sum(volume.bytes for volume in runtime.reset_ledger().data.values())
        found[stage] = (full_tensors(runtime, "master_shard"), (counted, _closed(runtime, case, wire)))
        runtime.close()
    return found


def _closed(runtime: ZeroRuntime, case: Case, wire: Wire) -> int:
    counts = CollectiveCounts.of(runtime.plan, case.micro_batches)
    groups, total = (runtime.collectives.shard_count, runtime.collectives.replica_count), 0
    for unit in runtime.units:
        shard, itemsize = unit.layout.shard_numel, unit.parameters.param_dtype.itemsize
        total += counts.gathers * gathered(wire, runtime.plan, shard, groups[0], itemsize, trainable=True).nbytes
        total += counts.reductions * reduced(wire, shard, *groups, 4).nbytes
    return total


@pytest.mark.parametrize(
    ("case", "wire"),
    [
        (Case(4, precision=BF16), BOTH),
        (Case(2, precision=BF16), FED_BACK),
        pytest.param(Case(4, precision=BF16, shard_ranks=2), BOTH, marks=pytest.mark.full),
        pytest.param(Case(3, precision=replace(BF16, compute="fp32"), clip_norm=0.5), BOTH, marks=pytest.mark.full),
        pytest.param(Case(3), FED_BACK, marks=pytest.mark.full),
    ],
    ids=["world4", "fed_back", "shard2xreplicate2", "computes_fp32", "fp32"],
)
def test_stages_1_to_3_have_equal_bits_and_send_the_bytes_of_the_closed_form(case: Case, wire: Wire) -> None:
    for by_stage in run_ranks(_trained, case.world, case, wire):
        for stage, (weights, (counted, closed)) in by_stage.items():
            assert all(torch.equal(value, by_stage[1][0][name]) for name, value in weights.items()), stage
            assert counted == closed, stage


def _gathers(case: Case, stage: int) -> None:
    runtime = build(case, stage, Wire("int8"))
    backwards_of_step(runtime, case, 0)
    runtime.step(LR)
    for unit in runtime.units:
        shards = [torch.empty_like(unit.param_shard) for _ in range(case.world)]
        # The master is exact: what every rank computes with is read back from the codes of its rounded values.
        dist.all_gather(shards, unit.master_shard.to(unit.parameters.param_dtype))
        unit.wait_unshard()
        wanted = torch.cat([read_back(shard, "int8") for shard in shards]).to(unit.parameters.param_dtype)
        assert torch.equal(unit.parameters.unsharded_param, wanted.to(unit.parameters.unsharded_param.dtype))


@pytest.mark.parametrize("stage", [1, 3])
def test_every_rank_computes_with_the_values_of_the_codes(stage: int) -> None:
    run_ranks(_gathers, 2, Case(2, precision=BF16), stage)


def _unequal_calls(case: Case) -> list[float]:
    """The losses of calls without gradients, of which rank 0 makes one more than the others."""
    runtime = build(case, 3, Wire("int8"))
    with runtime.uneven_forwards():
        calls = range(1 if dist.get_rank() else 2)
        return [float(token_loss_sum(runtime.model, *batch(case.model, 0, 0, 0))) for _ in calls]


def test_ranks_that_join_a_gather_of_codes_send_codes() -> None:
    first, second = run_ranks(_unequal_calls, 2, Case(2))
    assert first == second * 2


def _reduces(case: Case, stage: int, wire: Wire) -> list[float]:
    """Checks the sums of one step's gradients; returns the largest error of each unit, divided by its bound."""
    runtime = build(case, stage, wire)
    with runtime.no_sync():
        backwards_of_step(runtime, replace(case, micro_batches=1), 0)
    local = {unit.name: unit.gradients.unsharded_grad.clone() for unit in runtime.units}
    for unit in runtime.units:
        unit.begin_backward()
        unit.reduce_grad()
        unit.wait_reduce()
    return [_check_sum(unit, local[unit.name], wire) for unit in runtime.units]


def _check_sum(unit: Unit, local: torch.Tensor, wire: Wire) -> float:
    rank, world = dist.get_rank(), dist.get_world_size()
    fulls = [torch.empty_like(local) for _ in range(world)]
    dist.all_gather(fulls, local)
    own = [unit.layout.shard_of(full, rank) for full in fulls]
    total = torch.zeros_like(own[0])
    for peer, values in enumerate(own):
        total += values if peer == rank else read_back(values, wire.reduce or "")
    assert torch.equal(unit.grad_shard, total)
    # Half of a scale for each term that was quantised, plus the roundings of fp32: three of the format, one of the sum.
    levels = {"int8": 127, "int4": 7}[wire.reduce or ""]
    largest = sum(float(values.abs().max()) for peer, values in enumerate(own) if peer != rank)
    exact = sum(values.double() for values in own)
    bound = largest / levels / 2 + 4 * 2.0**-24 * sum(float(values.abs().max()) for values in own)
    return float((unit.grad_shard.double() - exact).abs().max()) / max(bound, 1e-30)


@pytest.mark.parametrize(("world", "stage", "dtype"), [(2, 1, "int4"), (4, 3, "int8")])
def test_a_gradient_is_rounded_once_and_summed_in_fp32_in_the_order_of_the_ranks(
    world: int, stage: int, dtype: str
) -> None:
    case = Case(world, micro_batches=2, precision=BF16)
    for errors in run_ranks(_reduces, world, case, stage, Wire(None, dtype)):
        assert max(errors) <= 1


# ---- error feedback and memory ---------------------------------------------------------------------------------------


def _fed_back(case: Case) -> tuple[float, float, tuple[int, int]]:
    """The sum over some steps of the gradients that arrived, against that of the exact ones, with what is still kept
    back and without it; and the bytes of the gradients, counted and predicted."""
    sums: dict[str, list[torch.Tensor]] = {}
    errors = {}
    for wire in (Wire(), FED_BACK):
        runtime = build(case, 2, wire)
        for step in range(4):
            backwards_of_step(runtime, case, step)
            for unit in runtime.units:
                sums.setdefault(unit.name, []).append(unit.full_of(unit.grad_shard))
            bytes_now = take_census(runtime).grads, predicted_state_bytes(runtime).grads
            for unit in runtime.units:  # no update: both runs have the same gradients
                unit.gradients.free()
            runtime.zero_grad()
        for unit in runtime.units:
            kept = unit.gradients.kept[0]
            if kept is not None:
                dist.all_reduce(kept)
                errors[unit.name] = {
                    segment.name: segment.of(kept).view(segment.shape) for segment in unit.layout.segments
                }
        runtime.close()
    worst = [0.0, 0.0]
    for name, found in sums.items():
        for key in found[0]:
            exact, fed = (sum(one[key].double() for one in part) for part in (found[:4], found[4:]))
            worst[0] = max(worst[0], float((exact - fed - errors[name][key].double()).abs().max()))
            worst[1] = max(worst[1], float((exact - fed).abs().max()))
    return worst[0], worst[1], bytes_now


def test_what_error_feedback_keeps_back_is_all_that_is_missing_from_the_sum_of_gradients() -> None:
    """Sums of 4 gradients below 1 on 2 ranks, with fewer than 32 additions that round by 2^-24 each."""
    for left, missing, (counted, predicted) in run_ranks(_fed_back, 2, Case(2, precision=BF16)):
        assert left <= 32 * 2.0**-24
        assert missing > 100 * left
        assert counted == predicted


# ---- refusals --------------------------------------------------------------------------------------------------------


def _refused(stage: int, precision: MixedPrecision, wire: Wire) -> str:
    """The refusal, which comes before groups: a rank that ends breaks the connection of one that still makes them."""
    made = mock.patch.object(runtime, "make_collectives", side_effect=AssertionError("groups were made first"))
    with made, pytest.raises(ConfigError) as caught:
        build(Case(2, precision=precision), stage, wire)
    return str(caught.value)


def test_stage_0_and_masters_that_are_the_gathered_parameters_are_refused_with_the_reason() -> None:
    assert "needs sharded optimizer states" in run_ranks(partial(_refused, 0, BF16, BOTH), 2)[0]
    assert "needs sharded parameters, or masters apart" in run_ranks(partial(_refused, 2, MixedPrecision(), BOTH), 2)[0]
    with pytest.raises(ConfigError, match=r"zero\.error_feedback needs zero\.reduce_dtype"):
        Wire(error_feedback=True)
    with pytest.raises(ConfigError, match=r"zero\.gather_dtype must be int8"):
        Wire("int4")  # type: ignore[arg-type]
