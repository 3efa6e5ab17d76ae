"""Every stage, and hybrid sharding, against plain single-process PyTorch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from harness.models import TinySpec
from harness.oracle import EPS, LR, Case, Nudge, Trace, oracle
from harness.ranks import run_ranks
from harness.trainee import train

from zero_runtime.optim.loss_scaler import LossScaleRule
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision

STAGES = (0, 1, 2, 3)
# Three steps are enough to compare bits: a wrong step shows in the next loss, and later steps depend on the moments and
# the update count. test_matrix.py runs twenty steps.
STEPS_OF_EQUAL_BITS = 3
LONG = pytest.mark.full
ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}  # unit roundoff, round to nearest
UNIT_ROUNDOFF = ROUNDOFF["fp32"]


@cache
def ranks_traces(case: Case) -> dict[int, Trace]:
    return run_ranks(train, case.world, case)[0]


@cache
def oracle_trace(case: Case, reduces_every_backward: bool, nudge: Nudge | None = None) -> Trace:
    return oracle(case, reduces_every_backward=reduces_every_backward, nudge=nudge)


def expected(case: Case, stage: int) -> Trace:
    return oracle_trace(case, ZeroPlan.from_stage(stage).reduces_every_backward)


def assert_same_bits(found: Trace, wanted: Trace) -> None:
    assert found.losses == wanted.losses
    assert found.weights.keys() == wanted.weights.keys()
    for name, weight in wanted.weights.items():
        assert torch.equal(found.weights[name], weight), f"{name}: {(found.weights[name] - weight).abs().max()}"


@pytest.mark.parametrize(
    ("world", "tied", "micro_batches"),
    [
        pytest.param(*one, marks=() if one in ((2, False, 1), (2, True, 3)) else LONG)
        for one in product((1, 2), (False, True), (1, 3))
    ],
)
@pytest.mark.parametrize("stage", STAGES)
def test_fp32_has_the_bits_of_plain_torch(stage: int, world: int, tied: bool, micro_batches: int) -> None:
    case = Case(world, micro_batches, STEPS_OF_EQUAL_BITS, model=TinySpec(tied=tied))
    assert_same_bits(ranks_traces(case)[stage], expected(case, stage))


BF16 = MixedPrecision("bf16")  # fp32 reduction, accumulation and master
BF16_PAPER = MixedPrecision("bf16", reduce="bf16", accumulate="bf16")


BF16_COMPUTED_IN_FP32 = MixedPrecision("bf16", compute="fp32")


@pytest.mark.parametrize(
    "precision", [BF16, BF16_PAPER, BF16_COMPUTED_IN_FP32], ids=["reduce_fp32", "reduce_bf16", "compute_fp32"]
)
@pytest.mark.parametrize("micro_batches", [pytest.param(1, marks=LONG), 3])
@pytest.mark.parametrize("world", [pytest.param(1, marks=LONG), 2])
@pytest.mark.parametrize("stage", STAGES)
def test_bf16_has_the_bits_of_plain_torch(
    stage: int, world: int, micro_batches: int, precision: MixedPrecision
) -> None:
    case = Case(world, micro_batches, STEPS_OF_EQUAL_BITS, precision=precision)
    assert_same_bits(ranks_traces(case)[stage], expected(case, stage))


# One frozen block, through which gradients pass, and a part of the next are stored as codes. Each is decoded by the
# arithmetic of the reference, code x scale in fp32, rounded once, so that bits are equal. Blocks are recomputed in the
# first case alone: the codes are then decoded for the recomputation.
CODED = {
    "int4": Case(2, 2, precision=MixedPrecision(weights="int4"), model=TinySpec(frozen=True, recomputed=True)),
    "int8, bf16": Case(2, 1, precision=MixedPrecision("bf16", weights="int8"), model=TinySpec(frozen=True)),
    "int4, computed in fp32": Case(
        2, 1, precision=MixedPrecision("bf16", compute="fp32", weights="int4"), model=TinySpec(frozen=True)
    ),
    "int4, groups": Case(
        4, 1, precision=MixedPrecision(weights="int4"), shard_ranks=2, model=TinySpec(frozen=True), clip_norm=None
    ),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=LONG if "groups" in name else ()) for name in CODED])
@pytest.mark.parametrize("stage", STAGES)
def test_frozen_codes_have_the_bits_of_plain_torch_on_the_values_that_are_read_back(stage: int, name: str) -> None:
    case = replace(CODED[name], steps=STEPS_OF_EQUAL_BITS)
    assert_same_bits(ranks_traces(case)[stage], expected(case, stage))


# ---- world 3: the backend chooses the order of the sum ---------------------------------------------------------------
#
# |fl(sum) - sum| <= (n-1) u sum|g| for any order of n terms (Higham, Accuracy and Stability of Numerical Algorithms,
# eq. 4.4, to first order in u), so two orders differ by at most twice that. n counts ranks and micro-batches.


def gradient_bound(case: Case, wanted: Trace, name: str) -> torch.Tensor:
    roundoff = (
        ROUNDOFF[case.precision.reduce]
        if case.micro_batches == 1
        else max(ROUNDOFF[case.precision.reduce], ROUNDOFF[case.precision.accumulate])
    )
    return 2 * (case.world * case.micro_batches - 1) * roundoff * wanted.abs_grad_sum[name]


def assert_within(found: torch.Tensor, wanted: torch.Tensor, bound: torch.Tensor, name: str) -> None:
    excess = (found.double() - wanted.double()).abs() - bound
    assert excess.max() <= 0, f"{name}: {excess.max()} above the bound"


def update_bound(case: Case, wanted: Trace, name: str) -> torch.Tensor:
    """How far AdamW's first update may move when each gradient moves by its bound d.

    From zero moments the update is -lr * g / (|g| + eps) and decay, whose slope is lr * eps / (|g| + eps)^2; over
    [|g| - d, |g| + d] that is largest at the low end, and it never exceeds 2 lr. The dozen roundings of the step are
    relative to the update (lr) and to the weight, since the update is computed as a difference of weights.
    """
    grad, shift = wanted.first_grads[name].double().abs(), gradient_bound(case, wanted, name)
    low = (grad - shift).clamp(min=0)
    moved = (LR * EPS * shift / (low + EPS) ** 2).clamp(max=2 * LR)
    return moved + 12 * ROUNDOFF["fp32"] * (LR + wanted.weights[name].double().abs() + 2 * LR * case.steps)


FEWER_STEPS = 8  # enough for the loss to fall by a tenth; test_matrix.py runs twenty at every world
WORLD_3 = [
    Case(3, micro_batches, FEWER_STEPS, precision=precision, model=TinySpec(tied=tied))
    for micro_batches in (1, 3)
    for precision, tied in ((MixedPrecision(), False), (MixedPrecision(), True), (BF16, False), (BF16_PAPER, True))
]


def case_name(case: Case) -> str:
    dtypes = f"{case.precision.param}_reduce_{case.precision.reduce}"
    return f"{dtypes}_micro{case.micro_batches}" + ("_tied" if case.model.tied else "")


# The short form runs the dtype that rounds most, with tied weights; test_bytes.py covers micro-batches at this world.
SHORT_WORLD_3 = [Case(3, 1, FEWER_STEPS, precision=BF16_PAPER, model=TinySpec(tied=True))]
WORLD_3_PARAMS = [pytest.param(case, marks=() if case in SHORT_WORLD_3 else LONG) for case in WORLD_3]


@pytest.mark.full
@pytest.mark.parametrize("case", WORLD_3_PARAMS, ids=case_name)
def test_at_world_3_stages_of_one_accumulation_class_have_the_same_bits(case: Case) -> None:
    traces = ranks_traces(case)
    for first, *others in [(0, 1), (2, 3)] if case.micro_batches > 1 else [STAGES]:
        for other in others:
            assert_same_bits(traces[other], traces[first])


@pytest.mark.parametrize("case", WORLD_3_PARAMS, ids=case_name)
@pytest.mark.parametrize("stage", STAGES)
def test_at_world_3_gradient_norm_and_update_are_within_the_bound(stage: int, case: Case) -> None:
    found, wanted = ranks_traces(case)[stage], expected(case, stage)
    shifts = []
    for name, grad in wanted.first_grads.items():
        bound = gradient_bound(case, wanted, name)
        assert_within(found.first_grads[name], grad, bound, name)
        assert_within(found.first_update[name], wanted.first_update[name], update_bound(case, wanted, name), name)
        shifts.append(bound.flatten())
    # Norms are 1-Lipschitz in the gradient; summing n squares in any order adds a relative n u on each side.
    numel = sum(shift.numel() for shift in shifts)
    norm_bound = float(torch.cat(shifts).norm()) + numel * ROUNDOFF["fp32"] * wanted.norms[0]
    assert abs(found.norms[0] - wanted.norms[0]) <= norm_bound


@pytest.mark.parametrize("case", WORLD_3_PARAMS, ids=case_name)
@pytest.mark.parametrize("stage", STAGES)
def test_at_world_3_the_losses_stay_within_the_drift_bound(stage: int, case: Case) -> None:
    """Rounding errors grow from step to step, so the bound follows from the drift between two correct sum orders."""
    found, wanted = ranks_traces(case)[stage], expected(case, stage)
    every = ZeroPlan.from_stage(stage).reduces_every_backward
    other_order = oracle_trace(case, every, Nudge(reversed_ranks=True))
    assert_losses_within(found, wanted, drift_between(case, wanted, other_order))
    assert wanted.losses[-1] < 0.9 * wanted.losses[0], "the run must learn, or equal losses prove nothing"


def drift_between(case: Case, right: Trace, also_right: Trace) -> float:
    """How far rounding alone moves a loss: the largest difference between two correct runs, and at least the effect on
    the first loss of rounding one parameter the other way (two runs may happen to round the same throughout)."""
    observed = max(abs(a - b) for a, b in zip(right.losses, also_right.losses, strict=True))
    influence = max(
        float((right.first_grads[name].double() * right.weights[name].double()).abs().max()) for name in right.weights
    )
    return max(observed, ROUNDOFF[case.precision.param] * influence)


def assert_losses_within(found: Trace, wanted: Trace, drift: float) -> None:
    """The bound is 20 times the drift, since one sample measures it only roughly, plus the spacing of fp32: each
    rank's loss is rounded to fp32 on both sides, so two losses that differ by less may be neighbours."""
    for step, (loss, right) in enumerate(zip(found.losses, wanted.losses, strict=True)):
        bound = 20 * drift + 2.0**-23 * right
        assert abs(loss - right) <= bound, f"step {step}: {loss} against {right}, drift {drift}"


# ---- clipping --------------------------------------------------------------------------------------------------------

CLIP_NORM = 0.2  # well below the norms of these runs, so every step is clipped
PARAMETERS_BOUND = 10_000  # more elements than the model has


def clipped(world: int, tied: bool) -> Case:
    return Case(world, 1, FEWER_STEPS, clip_norm=CLIP_NORM, model=TinySpec(tied=tied))


@pytest.mark.parametrize(
    ("world", "tied"),
    [
        (2, True),
        *(pytest.param(*one, marks=LONG) for one in ((1, False), (2, False), (1, True), (3, False), (3, True))),
    ],
)
@pytest.mark.parametrize("stage", STAGES)
def test_clipping_follows_the_global_norm_with_each_element_once(stage: int, world: int, tied: bool) -> None:
    case = clipped(world, tied)
    found, wanted = ranks_traces(case)[stage], expected(case, stage)
    every = ZeroPlan.from_stage(stage).reduces_every_backward
    relative = PARAMETERS_BOUND * UNIT_ROUNDOFF  # of a sum of that many squares in any order
    assert abs(found.norms[0] - wanted.norms[0]) <= relative * wanted.norms[0]
    assert min(wanted.norms) > CLIP_NORM
    nudged = oracle_trace(case, every, Nudge(clip_factor=1 + relative, reversed_ranks=True))
    drift = drift_between(case, wanted, nudged)
    assert_losses_within(found, wanted, drift)
    unclipped = oracle_trace(replace(case, clip_norm=None), every)
    assert abs(unclipped.losses[-1] - wanted.losses[-1]) > 20 * drift, "clipping must matter here"


@pytest.mark.parametrize(
    ("world", "tied"), [(2, True), *(pytest.param(world, False, marks=LONG) for world in (1, 2, 3))]
)
def test_a_clipped_run_has_the_same_bits_at_every_stage(world: int, tied: bool) -> None:
    """The norm is summed in the same parts at every stage, so clipping has the same result at every stage."""
    traces = ranks_traces(clipped(world, tied))
    for stage in STAGES[1:]:
        assert_same_bits(traces[stage], traces[0])
        assert traces[stage].norms == traces[0].norms


# ---- fp16 ------------------------------------------------------------------------------------------------------------

FP16 = MixedPrecision("fp16")
# Starts so high that the first steps overflow, and grows again within the run.
JUMPY_SCALE = LossScaleRule(initial_power=23, window=4, hysteresis=2)


@pytest.mark.parametrize("micro_batches", [1, pytest.param(3, marks=LONG)])
@pytest.mark.parametrize("world", [pytest.param(1, marks=LONG), 2])
@pytest.mark.parametrize("stage", STAGES)
def test_fp16_has_the_bits_and_the_scale_trace_of_plain_torch(stage: int, world: int, micro_batches: int) -> None:
    case = Case(world, micro_batches, 12, precision=FP16, loss_scale=JUMPY_SCALE)
    found, wanted = ranks_traces(case)[stage], expected(case, stage)
    assert found.scales == wanted.scales
    assert found.skipped == wanted.skipped
    assert_same_bits(found, wanted)
    assert any(wanted.skipped), "the run must overflow, or the trace proves nothing"
    assert not all(wanted.skipped)


# ---- no_sync ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [pytest.param(MixedPrecision(), marks=LONG), BF16_PAPER], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world", [pytest.param(1, marks=LONG), 2])
@pytest.mark.parametrize("stage", STAGES)
def test_no_sync_sums_locally_and_reduces_once(stage: int, world: int, precision: MixedPrecision) -> None:
    case = Case(world, 3, STEPS_OF_EQUAL_BITS, precision=precision, no_sync=True)
    assert_same_bits(ranks_traces(case)[stage], expected(case, stage))


# ---- hybrid sharding -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batches", [1, pytest.param(3, marks=LONG)])
@pytest.mark.parametrize("stage", STAGES[1:])
def test_hybrid_sharding_stays_within_the_rounding_bound(stage: int, micro_batches: int) -> None:
    case = Case(4, micro_batches, shard_ranks=2, steps=STEPS_OF_EQUAL_BITS)
    found, wanted = ranks_traces(case)[stage], expected(case, stage)
    for name, grad in wanted.first_grads.items():
        assert_within(found.first_grads[name], grad, gradient_bound(case, wanted, name), name)
    every = ZeroPlan.from_stage(stage).reduces_every_backward
    nudged = oracle_trace(case, every, Nudge(reversed_ranks=True))
    assert_losses_within(found, wanted, drift_between(case, wanted, nudged))


def test_hybrid_sharding_in_groups_of_one_or_all_equals_a_plain_stage() -> None:
    whole = ranks_traces(Case(2, steps=3))
    for group, stage, row in ((1, 3, 0), (2, 3, 3), (2, 1, 1)):
        assert_same_bits(ranks_traces(Case(2, steps=3, shard_ranks=group))[stage], whole[row])
