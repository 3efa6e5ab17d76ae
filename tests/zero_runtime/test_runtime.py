"""ZeroRuntime checks the order of calls, stops on non-finite numbers, evaluates between steps and runs on one rank."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.models import batch, token_loss_sum
from harness.oracle import ADAMW, LR, Case, oracle
from harness.ranks import run_ranks
from harness.trainee import backwards_of_step, build_runtime, full_tensors
from torch import nn

from zero_runtime.errors import CallOrderError, NonFiniteError
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime
from zero_runtime.unit_parameters import DataState

STAGES = (0, 1, 2, 3)


def _states(runtime: ZeroRuntime) -> dict[str, torch.Tensor]:
    """Copies of every weight and moment of this rank, by name."""
    states = {f"master {unit.name}": unit.master_shard for unit in runtime.units}
    states |= {f"param {unit.name}": unit.param_shard for unit in runtime.units}
    states |= {f"moment {index}": moment for index, moment in enumerate(runtime.optimizer.state_tensors())}
    return {name: tensor.clone() for name, tensor in states.items() if tensor is not None}


def _same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


# ---- requests to stop ------------------------------------------------------------------------------------------------


def _asked_in_step_2(case: Case, *, asks: bool) -> tuple[list[bool], list[int], list[float]]:
    """Each step's stop flag, number of control messages, and loss. If `asks`, rank 1 alone asks to stop in step 2."""
    runtime = build_runtime(case, 2)
    steps = iter(range(1, 4))
    if asks:
        wish = partial(lambda rank: next(steps) == 2 and rank == 1, dist.get_rank())
        runtime.settings = replace(runtime.settings, stop_asked=wish)
    reports, messages = [], []
    for step in range(3):
        backwards_of_step(runtime, case, step)
        reports.append(runtime.step(LR))
        messages.append(runtime.reset_ledger().control.calls)
    return [report.stop for report in reports], messages, [report.loss for report in reports]


def test_one_ranks_stop_request_reaches_all_ranks_in_the_same_step_without_an_extra_message() -> None:
    asked = run_ranks(partial(_asked_in_step_2, asks=True), 2, Case(2))
    unasked = run_ranks(partial(_asked_in_step_2, asks=False), 2, Case(2))
    for rank in range(2):
        assert asked[rank][0] == [False, True, False]
        assert unasked[rank][0] == [False, False, False]
        assert asked[rank][1:] == unasked[rank][1:]


# ---- the order of calls ----------------------------------------------------------------------------------------------


def _wrong_orders(case: Case) -> list[str]:
    runtime = build_runtime(case, 2)
    refusals = []
    for backwards in range(case.micro_batches):
        with pytest.raises(CallOrderError) as refusal:
            runtime.step(LR)
        refusals.append(str(refusal.value))
        ids, labels = batch(case.model, 0, dist.get_rank(), backwards)
        loss = token_loss_sum(runtime.model, ids, labels)
        runtime.backward(loss)
        if backwards == 0:
            with pytest.raises(CallOrderError) as refusal:
                runtime.backward(loss)
            refusals.append(str(refusal.value))
    with pytest.raises(CallOrderError) as refusal:
        runtime.backward(torch.ones((), requires_grad=True))
    refusals.append(str(refusal.value))
    runtime.step(LR)  # the refused calls have changed nothing
    return refusals


def test_calls_out_of_order_are_refused_with_the_expected_call() -> None:
    for refusals in run_ranks(_wrong_orders, 2, Case(2, 2)):
        assert refusals[0] == "step: expected 2 backward calls since the last step, found 0"
        assert "this loss had its backward before" in refusals[1]
        assert "expected a new forward" in refusals[1]
        assert refusals[2] == "step: expected 2 backward calls since the last step, found 1"
        assert "call number 3 of this step, expected step() after 2" in refusals[3]
        assert "RuntimeSettings" in refusals[3]


# ---- non-finite numbers ----------------------------------------------------------------------------------------------


def _non_finite(case: Case) -> dict[tuple[int, str], tuple[str, bool]]:
    """By (stage, the factor of rank 1's loss): the error message, and whether every state kept its bits."""
    found = {}
    for stage in STAGES:
        for value in ("nan", "inf"):
            runtime = build_runtime(case, stage)
            backwards_of_step(runtime, case, 0)
            runtime.step(LR)
            before = _states(runtime)
            ids, labels = batch(case.model, 1, dist.get_rank(), 0)
            loss = token_loss_sum(runtime.model, ids, labels)
            runtime.backward(loss * float(value) if dist.get_rank() == 1 else loss)
            with pytest.raises(NonFiniteError) as refusal:
                runtime.step(LR)
            found[stage, value] = str(refusal.value), _same(before, _states(runtime))
    return found


def test_a_non_finite_loss_on_one_rank_stops_all_ranks_and_updates_nothing() -> None:
    for found in run_ranks(_non_finite, 3, Case(3)):
        for row, (refusal, unchanged) in found.items():
            assert "expected finite numbers; nothing was updated" in refusal, row
            assert unchanged, row


def _infinite_gradient(case: Case) -> tuple[str, bool]:
    runtime = build_runtime(case, 2)
    before = _states(runtime)
    ids, labels = batch(case.model, 0, dist.get_rank(), 0)
    loss = token_loss_sum(runtime.model, ids, labels)
    if dist.get_rank() == 1:
        loss.register_hook(lambda grad: grad * float("inf"))
    runtime.backward(loss)
    with pytest.raises(NonFiniteError) as refusal:
        runtime.step(LR)
    return str(refusal.value), _same(before, _states(runtime))


def test_a_non_finite_gradient_on_one_rank_stops_all_ranks_even_if_every_loss_is_finite() -> None:
    for refusal, unchanged in run_ranks(_infinite_gradient, 2, Case(2)):
        assert "and gradient norm nan" in refusal or "and gradient norm inf" in refusal
        assert unchanged


# ---- evaluation ------------------------------------------------------------------------------------------------------


def _evaluate(runtime: ZeroRuntime, case: Case, step: int) -> float:
    with torch.no_grad():
        return float(token_loss_sum(runtime.model, *batch(case.model, 100 + step, 0, 0)))


def _with_and_without_evaluation(case: Case) -> dict[int, Any]:
    found = {}
    for stage in STAGES:
        results = []
        for evaluates in (False, True):
            runtime = build_runtime(case, stage, prefetch=2)
            losses, evaluations = [], []
            if evaluates:
                evaluations.append(_evaluate(runtime, case, -1))
            for step in range(case.steps):
                backwards_of_step(runtime, case, step)
                if evaluates:
                    _evaluate(runtime, case, step)  # between the last backward and the update, too
                losses.append(runtime.step(LR).loss)
                if evaluates:
                    evaluations += [_evaluate(runtime, case, step), _evaluate(runtime, case, step)]
            results.append((losses, _states(runtime)))
        (losses, states), (evaluated_losses, evaluated_states) = results
        resting = [unit.parameters.state for unit in runtime.units]
        found[stage] = losses == evaluated_losses, _same(states, evaluated_states), evaluations, resting
    return found


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.full), 2])
def test_evaluation_between_steps_changes_no_bits_and_sees_the_same_model_at_every_stage(world: int) -> None:
    case = Case(world, 2, steps=3)
    results = run_ranks(_with_and_without_evaluation, world, case)
    for by_stage in results:
        for stage, (same_losses, same_states, evaluations, _) in by_stage.items():
            assert same_losses, f"stage {stage}"
            assert same_states, f"stage {stage}"
            assert evaluations[1::2] == evaluations[2::2]
            assert evaluations[0] == results[0][0][2][0]
        assert by_stage[0][2] == by_stage[1][2]  # both stages accumulate gradients in the same way
        assert by_stage[2][2] == by_stage[3][2]


def test_sharded_parameters_are_sharded_again_after_an_evaluation() -> None:
    """No prefetched gather is left in flight, although no backward followed to end it."""
    for by_stage in run_ranks(_with_and_without_evaluation, 2, Case(2, steps=2)):
        assert set(by_stage[3][3]) == {DataState.STALE}


# ---- one rank --------------------------------------------------------------------------------------------------------


def _alone(case: Case) -> dict[int, tuple[list[float], dict[str, torch.Tensor], int]]:
    found = {}
    for stage in STAGES:
        runtime = build_runtime(case, stage)
        losses = []
        for step in range(case.steps):
            backwards_of_step(runtime, case, step)
            losses.append(runtime.step(LR).loss)
        ledger = runtime.reset_ledger()
        found[stage] = losses, full_tensors(runtime, "master_shard"), ledger.data_elements + ledger.control.elements
    return found


def test_a_single_rank_trains_like_plain_torch_and_sends_nothing() -> None:
    case = Case(1, 2, steps=3)
    (by_stage,) = run_ranks(_alone, 1, case)
    for stage, (losses, weights, sent) in by_stage.items():
        wanted = oracle(case, reduces_every_backward=ZeroPlan.from_stage(stage).reduces_every_backward)
        assert losses == wanted.losses
        assert all(torch.equal(weights[name], weight) for name, weight in wanted.weights.items())
        assert sent == 0


def _token_sum() -> tuple[int, torch.dtype]:
    runtime = build_runtime(Case(dist.get_world_size()), 0)
    total = runtime.sum_over_ranks(2**40 + dist.get_rank())
    return int(total), total.dtype


def test_counts_are_summed_over_ranks_as_int64() -> None:
    assert run_ranks(_token_sum, 2) == [(2**41 + 1, torch.int64)] * 2


# ---- reference cycles ------------------------------------------------------------------------------------------------


class Doubled(nn.Module):
    """Blocks with an operation between them, so that the output of one is not the input of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(2 * x)
        return x.sum()


def _garbage() -> dict[int, int]:
    """By stage: number of objects that only the cyclic garbage collector could free after two steps."""
    found = {}
    for stage in STAGES:
        runtime = ZeroRuntime(
            Doubled(), ZeroPlan.from_stage(stage), MixedPrecision(), ADAMW, RuntimeSettings(), torch.device("cpu")
        )

        def step(runtime: ZeroRuntime = runtime) -> None:
            runtime.backward(runtime(torch.ones(2, 4)))
            runtime.step(LR)

        step()
        gc.collect()
        gc.disable()
        step()
        step()
        found[stage] = gc.collect()
        gc.enable()
    return found


def test_a_step_leaves_no_reference_cycles() -> None:
    """Cycles would keep parts of the graph in memory until the garbage collector runs, at an unpredictable time."""
    for found in run_ranks(_garbage, 2):
        assert found == dict.fromkeys(STAGES, 0)
