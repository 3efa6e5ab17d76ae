"""Users can read and write full tensors; wrong calls and non-finite numbers are explained; close frees all memory."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from harness.models import TinySpec, TinyTransformer, batch, token_loss_sum
from harness.oracle import LR, Case, oracle
from harness.ranks import run_ranks
from harness.trainee import backwards_of_step, build_runtime

from zero_runtime.census import take_census
from zero_runtime.errors import CallOrderError, NonFiniteError, PlanError
from zero_runtime.optim.loss_scaler import LossScaleRule
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision

STAGES = (0, 1, 2, 3)
CASE = Case(2, steps=1)
BLOCK_WEIGHT = "blocks.1.up.weight"


def _reads(case: Case) -> dict[int, tuple]:
    """By stage: all parameters before the step, one full gradient, and that parameter and its full states after it."""
    found = {}
    for stage in STAGES:
        runtime = build_runtime(case, stage)
        backwards_of_step(runtime, case, 0)
        gradient = runtime.full_grad(BLOCK_WEIGHT)
        with runtime.full_params() as params:
            before = dict(params)
        runtime.step(LR)
        with runtime.full_params([BLOCK_WEIGHT]) as params:
            after = dict(params)
        found[stage] = (before, gradient, after, runtime.full_optimizer_state(BLOCK_WEIGHT))
    return found


def test_full_tensors_equal_those_of_plain_torch_at_every_stage() -> None:
    wanted = oracle(CASE, reduces_every_backward=False)
    initial = dict(TinyTransformer(CASE.model).named_parameters())
    for by_stage in run_ranks(_reads, 2, CASE):
        for before, gradient, after, states in by_stage.values():
            assert before.keys() == initial.keys()
            assert all(torch.equal(before[name], initial[name]) for name in initial)
            assert torch.equal(gradient, wanted.first_grads[BLOCK_WEIGHT])
            assert after.keys() == {BLOCK_WEIGHT}
            assert torch.equal(after[BLOCK_WEIGHT], wanted.weights[BLOCK_WEIGHT])
            # arXiv 1711.05101: the first moment after one step from zero is (1 - beta1) g.
            assert torch.equal(states["exp_avg"], torch.zeros_like(gradient).lerp_(gradient, 1 - 0.9))
            assert states["exp_avg_sq"].shape == gradient.shape


def _edits(case: Case) -> dict[int, tuple]:
    """By stage: the loss and the edited weight on this rank, after rank 0 alone has edited the weight."""
    found = {}
    for stage in STAGES:
        runtime = build_runtime(case, stage)
        with runtime.full_params([BLOCK_WEIGHT], write=True) as params:
            if dist.get_rank() == 0:
                params[BLOCK_WEIGHT].fill_(0.25)
        ids, labels = batch(case.model, 0, 0, 0)
        with torch.no_grad():
            loss = float(token_loss_sum(runtime.model, ids, labels))
        with runtime.full_params([BLOCK_WEIGHT]) as params:
            found[stage] = (loss, params[BLOCK_WEIGHT])
    return found


def test_every_rank_computes_with_the_values_that_rank_0_wrote() -> None:
    plain = TinyTransformer(CASE.model)
    with torch.no_grad():
        plain.get_parameter(BLOCK_WEIGHT).fill_(0.25)
        ids, labels = batch(CASE.model, 0, 0, 0)
        wanted = float(token_loss_sum(plain, ids, labels))
    for by_stage in run_ranks(_edits, 2, CASE):
        for loss, weight in by_stage.values():
            assert loss == wanted
            assert bool((weight == 0.25).all())


def _wrong_calls(case: Case) -> list[str]:
    """Error messages of calls in a wrong order, on a runtime that can still train afterwards."""
    messages = []

    def expect(kind: type[Exception], call) -> None:
        with pytest.raises(kind) as caught:
            call()
        messages.append(str(caught.value))

    runtime = build_runtime(case, 3)
    expect(CallOrderError, lambda: runtime.step(LR))
    expect(CallOrderError, lambda: runtime.full_grad(BLOCK_WEIGHT))
    expect(PlanError, lambda: runtime.full_grad("blocks.9.up.weight"))
    ids, labels = batch(case.model, 0, dist.get_rank(), 0)
    with torch.no_grad():
        loss = token_loss_sum(runtime.model, ids, labels)
    expect(CallOrderError, lambda: runtime.backward(loss))
    backwards_of_step(runtime, case, 0)
    extra = token_loss_sum(runtime.model, ids, labels)
    expect(CallOrderError, lambda: runtime.backward(extra))
    runtime.step(LR)
    with runtime.no_sync():
        backwards_of_step(runtime, case, 1)
    expect(CallOrderError, lambda: runtime.step(LR))
    return messages


def test_a_wrong_order_of_calls_raises_an_error_that_names_the_expected_call() -> None:
    for messages in run_ranks(_wrong_calls, 2, CASE):
        step, early, unknown, graphless, extra, unsynced = messages
        assert "expected 1 backward calls" in step
        assert "after the step's last backward" in early
        assert "blocks.9.up.weight" in unknown
        assert "no_grad" in graphless
        assert "expected step()" in extra
        assert "no_sync" in unsynced


def _two_losses_of_one_forward(case: Case) -> dict[int, dict]:
    """By stage: the full gradient after two backward calls through one graph, each with half of the loss."""
    found = {}
    for stage in STAGES:
        runtime = build_runtime(replace(case, micro_batches=2), stage)
        ids, labels = batch(case.model, 0, dist.get_rank(), 0)
        loss = token_loss_sum(runtime.model, ids, labels) / 64
        runtime.backward(loss * 0.5, retain_graph=True)
        runtime.backward(loss * 0.5)
        found[stage] = runtime.full_grad(BLOCK_WEIGHT)
        runtime.step(LR)
    return found


def test_gradients_of_two_backward_calls_through_one_graph_are_summed() -> None:
    plain = TinyTransformer(CASE.model)
    for rank in range(2):
        ids, labels = batch(CASE.model, 0, rank, 0)
        (token_loss_sum(plain, ids, labels) / 64).backward()
    wanted = plain.get_parameter(BLOCK_WEIGHT).grad
    for by_stage in run_ranks(_two_losses_of_one_forward, 2, CASE):
        for gradient in by_stage.values():
            assert torch.equal(gradient, wanted)  # halves are exact, and a + a = 2a


def _poisoned(case: Case, where: str) -> tuple[str, str, bool]:
    """The error, the diagnosis and whether the parameters are unchanged, if rank 1 has a bad loss or gradient."""
    runtime = build_runtime(case, 3)
    ids, labels = batch(case.model, 0, dist.get_rank(), 0)
    if where == "grad" and dist.get_rank() == 1:  # a finite value with an infinite slope
        runtime.model.blocks[0].up.register_forward_hook(lambda up, _, out: out + (up.bias * 0).sqrt().sum())

    def backwards() -> None:
        loss = token_loss_sum(runtime.model, ids, labels) / 60
        if where == "loss" and dist.get_rank() == 1:
            loss = loss * float("nan")
        runtime.backward(loss)

    backwards()
    with runtime.full_params() as params:
        before = dict(params)
    with pytest.raises(NonFiniteError) as caught:
        runtime.step(LR)
    told = runtime.find_non_finite(backwards)
    with runtime.full_params() as params:
        same = all(torch.equal(params[name], before[name]) for name in params)
    return str(caught.value), told, same


@pytest.mark.parametrize(("where", "parameter"), [("loss", "head.weight"), ("grad", "blocks.0.up.bias")])
def test_a_non_finite_number_on_one_rank_stops_all_and_is_traced_to_rank_and_parameter(
    where: str, parameter: str
) -> None:
    case = Case(2, model=TinySpec())
    for message, told, same in run_ranks(_poisoned, 2, case, where):
        assert "nothing was updated" in message
        assert "rank 1" in told
        assert "rank 0:" not in told
        assert parameter in told
        assert same


def _scale_at_its_minimum(case: Case) -> tuple[str, int, str]:
    runtime = build_runtime(case, 2)
    with runtime.full_params(["head.weight"], write=True) as params:
        params["head.weight"].fill_(7e4)  # beyond fp16's range, within bf16's
    for step in range(10):
        backwards_of_step(runtime, case, step)
        try:
            runtime.step(LR)
        except NonFiniteError as error:
            told = runtime.find_non_finite(lambda: backwards_of_step(runtime, case, step))  # noqa: B023
            return str(error), runtime.updates, told
    raise AssertionError("ten steps without a diagnosis")


def test_weights_beyond_the_range_of_fp16_are_reported_with_the_advice_to_use_bf16() -> None:
    case = Case(2, precision=MixedPrecision("fp16"), loss_scale=LossScaleRule(initial_power=2, hysteresis=1))
    for message, updates, told in run_ranks(_scale_at_its_minimum, 2, case):
        assert updates == 0
        assert "expected finite numbers" in message
        assert "bf16" in told
        assert "7e+04" in told or "70000" in told


def _lives(case: Case, count: int) -> list[int]:
    """Bytes of live tensors after each of `count` runtimes has taken a step and been closed."""
    left = []
    for index in range(count):
        runtime = build_runtime(case, STAGES[index % 4])
        backwards_of_step(runtime, case, 0)
        runtime.step(LR)
        runtime.close()
        runtime.close()
        census = take_census(runtime)
        assert census.states == 0
        # What the model keeps: see [Note: the model afterwards].
        kept = sum(param.untyped_storage().nbytes() for param in runtime.model.parameters())
        assert (kept > 0) is (index % 4 < 3)
        del runtime
        gc.collect()
        left.append(census.other - kept)
    return left


@pytest.mark.parametrize("count", [6, pytest.param(12, marks=pytest.mark.full)])
def test_closed_runtimes_leave_no_memory_behind_in_their_process(count: int) -> None:
    for left in run_ranks(_lives, 2, CASE, count):
        # A leak adds up, so the minimum over the later runtimes shows it. A single value may still include the operands
        # of the last collective, which gloo's thread frees when it starts the next. The closed runtime keeps 8 bytes.
        assert min(left[count // 2 :]) == min(left) == 8


def test_shard_ranks_that_do_not_divide_the_world_or_suit_the_stage_are_refused() -> None:
    with pytest.raises(PlanError, match="divisor"):
        ZeroPlan.from_stage(3, shard_ranks=3).shard_count(4)
    with pytest.raises(PlanError, match="shard_ranks"):
        ZeroPlan.from_stage(0, shard_ranks=2)
