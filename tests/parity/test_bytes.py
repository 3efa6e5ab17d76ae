"""Counted bytes and counted collectives equal the formulas, at every stage and in every precision."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from harness.models import IGNORED, TinySpec, batch, token_loss_sum
from harness.oracle import LR, Case
from harness.ranks import run_ranks
from harness.trainee import backwards_of_step, build_runtime

from zero_runtime.accounting import predicted_state_bytes
from zero_runtime.census import ActivationCensus, take_census
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.messages import CollectiveCounts, collective_elements
from zero_runtime.runtime import ZeroRuntime
from zero_runtime.state_bytes import formula

STAGES = (0, 1, 2, 3)
PAPER = MixedPrecision("bf16", reduce="bf16", accumulate="bf16", master="fp32")
PRECISIONS = [
    MixedPrecision(),
    PAPER,
    MixedPrecision("bf16"),  # the default of precision=bf16: fp32 reduction, accumulation and master
    MixedPrecision("bf16", reduce="bf16"),
    MixedPrecision("bf16", reduce="bf16", accumulate="bf16", master="bf16"),
    MixedPrecision("fp32", reduce="bf16"),
    MixedPrecision("bf16", compute="fp32"),
]
MODEL = TinySpec()
GLOO_THREADS = 8  # more than any group has
SCALARS_BYTES = 64  # a loss, a norm, a token count and the like; the smallest gradient of the model has more


def _let_go_of_operands(runtime: ZeroRuntime) -> None:
    """A thread of a gloo group keeps a collective's tensors until its next collective: give every thread small ones."""
    for _ in range(GLOO_THREADS):
        shard = torch.zeros(runtime.collectives.replica_count)
        full = torch.zeros(runtime.collectives.world)
        runtime.collectives.reduce(full, shard).wait()
        runtime.collectives.all_gather(full, shard).wait()


def _census_of_rows(case: Case) -> dict[int, tuple]:
    """By stage: the census between the second step's last backward and its update, predicted bytes, and numel."""
    found = {}
    for stage in STAGES:
        runtime = build_runtime(case, stage)
        backwards_of_step(runtime, case, 0)
        runtime.step(LR)
        backwards_of_step(runtime, case, 1)
        _let_go_of_operands(runtime)
        numel = sum(unit.layout.numel for unit in runtime.units)
        found[stage] = (take_census(runtime), predicted_state_bytes(runtime), numel)
        runtime.close()
        del runtime
        gc.collect()  # so that the next stage's census does not count this one's hooks and scalars
    return found


def dtypes_of(precision: MixedPrecision) -> str:
    return "-".join(dtype for dtype in vars(precision).values() if dtype)


COUNTED = [(precision, micro, world) for world in (3, 1) for micro in (2, 1) for precision in PRECISIONS]
SHORT_COUNTED = [(precision, 2, 3) for precision in (PAPER, MixedPrecision("bf16", compute="fp32"))]


@pytest.mark.parametrize(
    ("precision", "micro_batches", "world"),
    [
        pytest.param(
            *cell,
            marks=() if cell in SHORT_COUNTED else pytest.mark.full,
            id=f"{dtypes_of(cell[0])}-micro{cell[1]}-world{cell[2]}",
        )
        for cell in COUNTED
    ],
)
def test_counted_model_states_equal_the_memory_model(precision: MixedPrecision, micro_batches: int, world: int) -> None:
    case = Case(world, micro_batches, precision=precision)
    for by_stage in run_ranks(_census_of_rows, world, case):
        for stage, (census, predicted, _) in by_stage.items():
            counted = (census.params, census.grads, census.optimizer)
            assert counted == (predicted.params, predicted.grads, predicted.optimizer), f"stage {stage}"
            assert census.other <= SCALARS_BYTES, f"stage {stage}: something is kept that is no model state"


@pytest.mark.parametrize(
    ("precision", "closed_forms"),
    [
        (PAPER, ["16Ψ", "4Ψ + 12Ψ/N", "2Ψ + 14Ψ/N", "16Ψ/N"]),
        pytest.param(MixedPrecision(), ["16Ψ", "8Ψ + 8Ψ/N", "4Ψ + 12Ψ/N", "16Ψ/N"], marks=pytest.mark.full),
        (MixedPrecision("bf16"), ["18Ψ", "6Ψ + 12Ψ/N", "2Ψ + 16Ψ/N", "18Ψ/N"]),
    ],
    ids=["the_paper", "fp32", "bf16"],
)
def test_counted_bytes_less_padding_are_the_closed_form(precision: MixedPrecision, closed_forms: list[str]) -> None:
    world = 2
    by_stage = run_ranks(_census_of_rows, world, Case(world, precision=precision))[0]
    for stage, (census, predicted, numel) in by_stage.items():
        assert census.other <= SCALARS_BYTES
        text = formula(ZeroPlan.from_stage(stage), precision)
        assert text == closed_forms[stage]
        exact = sum(int(term.partition("Ψ")[0]) * numel / (world if "/N" in term else 1) for term in text.split(" + "))
        assert census.states - predicted.padding == pytest.approx(exact, abs=0.5)  # padding is in integer bytes


def _census_with_a_leak(case: Case) -> tuple[int, int, int]:
    runtime = build_runtime(case, 2)
    backwards_of_step(runtime, case, 0)
    before = take_census(runtime)
    predicted = predicted_state_bytes(runtime)
    leaked = torch.empty_like(runtime.units[0].grad_shard)  # no unit owns it: only a census of all tensors counts it
    after = take_census(runtime)
    assert predicted_state_bytes(runtime) == predicted
    return after.states - before.states, after.other - before.other, leaked.nbytes


def test_a_leaked_buffer_changes_the_count_but_not_the_prediction() -> None:
    for states, other, leaked in run_ranks(_census_with_a_leak, 2, Case(2)):
        assert states == 0
        assert other == leaked


def _census_with_a_kept_gradient(case: Case) -> tuple[int, int, int]:
    """Stage 2 shards gradients. Here it is broken so that it keeps one full gradient: the count must show that."""
    runtime = build_runtime(case, 2)
    unit = runtime.units[0]
    backwards_of_step(runtime, case, 0)
    unit.gradients.unsharded_grad = torch.zeros(unit.layout.padded_numel)
    return take_census(runtime).grads, predicted_state_bytes(runtime).grads, unit.gradients.unsharded_grad.nbytes


def test_a_full_gradient_that_is_not_freed_changes_the_count_but_not_the_prediction() -> None:
    for counted, predicted, kept in run_ranks(_census_with_a_kept_gradient, 2, Case(2)):
        assert counted == predicted + kept


def _ledgers_of_rows(case: Case) -> dict[int, list[tuple]]:
    """By stage, for each step: counted data elements, counted control elements, and the model's padded numel."""
    found: dict[int, list[tuple]] = {}
    for stage in STAGES:
        runtime = build_runtime(case, stage)
        padded = sum(unit.layout.padded_numel for unit in runtime.units)
        for step in range(3):
            backwards_of_step(runtime, case, step)
            runtime.step(LR)
            ledger = runtime.reset_ledger()
            found.setdefault(stage, []).append((ledger.data_elements, ledger.control.elements, padded))
    return found


@pytest.mark.parametrize(
    ("world", "micro_batches"),
    [(2, 1), (3, 4), *(pytest.param(*one, marks=pytest.mark.full) for one in ((1, 1), (1, 4), (2, 4), (3, 1)))],
)
def test_counted_collectives_equal_the_theory_and_padding_exactly(micro_batches: int, world: int) -> None:
    case = Case(world, micro_batches)
    factors = {0: 2, 1: 2, 2: micro_batches + 1, 3: 3 * micro_batches}
    for by_stage in run_ranks(_ledgers_of_rows, world, case):
        for stage, steps in by_stage.items():
            for counted, _, padded in steps[1:]:  # with replicated parameters the first step gathers nothing
                assert counted * world == factors[stage] * padded * (world - 1)
                plan = ZeroPlan.from_stage(stage)
                counts = CollectiveCounts.of(plan, micro_batches)
                shard_count = plan.shard_count(world)
                assert counted == collective_elements(counts, padded, world=world, shard_count=shard_count)


def test_control_messages_have_five_elements_and_are_counted_separately() -> None:
    for by_stage in run_ranks(_ledgers_of_rows, 2, Case(2)):
        for steps in by_stage.values():
            assert {control for _, control, _ in steps} == {5}  # a token count; loss, squared norm, two fingerprints


def _activations(case: Case) -> tuple[int, int]:
    runtime = build_runtime(case, 3)
    ids, labels = batch(case.model, 0, dist.get_rank(), 0)
    with ActivationCensus(runtime) as small:
        loss = token_loss_sum(runtime.model, ids, labels)
    del loss
    ids, labels = ids.repeat(2, 1), labels.repeat(2, 1)
    with ActivationCensus(runtime) as large:
        loss = token_loss_sum(runtime.model, ids, labels)
    assert (labels != IGNORED).any()
    assert loss.requires_grad
    return small.bytes, large.bytes


def test_activations_grow_with_the_batch_and_hold_no_model_state() -> None:
    wide = replace(MODEL, width=64)  # states far larger than the activations of 33 tokens
    for small, large in run_ranks(_activations, 2, Case(2, model=wide)):
        # All saved activations have one row per token, except a few scalars of LayerNorm and the loss.
        assert 1.9 * small < large <= 2 * small
