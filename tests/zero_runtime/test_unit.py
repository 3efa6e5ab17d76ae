"""A unit makes only allowed state transitions, frees memory on release, aliases its tensors and keeps padding zero."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness.oracle import LR, Case
from harness.ranks import run_ranks
from harness.trainee import backwards_of_step, build_runtime
from torch import nn

from zero_runtime.collectives import Collectives
from zero_runtime.errors import UnitStateError
from zero_runtime.flat_layout import LayoutRules
from zero_runtime.initial_values import InitialValues
from zero_runtime.phase_clock import PhaseClock
from zero_runtime.plan import Phase, ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.unit import Unit
from zero_runtime.unit_gradients import GradState
from zero_runtime.unit_parameters import DataState
from zero_runtime.unit_planner import UnitRules, plan_units

STAGES = (0, 1, 2, 3)
FP32 = MixedPrecision()
BF16 = MixedPrecision("bf16")


class Odd(nn.Module):
    """Parameters of every awkward shape in one unit: a matrix, an empty one, one element, 0-dim."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(7, 5, generator=generator))
        self.empty = nn.Parameter(torch.zeros(3, 0))
        self.one = nn.Parameter(torch.randn(1, generator=generator))
        self.scalar = nn.Parameter(torch.tensor(2.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.matrix).sum() * self.scalar + self.one.sum() + self.empty.sum()


def make_unit(stage: int, precision: MixedPrecision = FP32, micro_batches: int = 1) -> Unit:
    dist.barrier()  # a rank that sends nothing could leave while another still connects to it
    plan = ZeroPlan.from_stage(stage)
    device = torch.device("cpu")
    collectives = Collectives(plan.shard_count(dist.get_world_size()), PhaseClock(device))
    model = Odd()
    (spec,) = plan_units(model, UnitRules(precision))
    rules = LayoutRules(collectives.shard_count, collectives.data_world)
    layout = rules.layout(spec.shapes, trainable=True)
    unit = Unit(spec, layout, plan, collectives, device, micro_batches=micro_batches)
    unit.materialize(InitialValues(model, seed=0))
    unit.wait_unshard()  # as in a forward; a plan that shards parameters leaves every new unit sharded
    collectives.ledger.reset()
    return unit


def storage_bytes(*tensors: torch.Tensor | None) -> int:
    """Bytes of the distinct storages under the tensors."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())


# ---- the two state machines ------------------------------------------------------------------------------------------

DATA_CYCLE = [DataState.STALE, DataState.UNSHARDING, DataState.UNSHARDED, DataState.STALE]
GRAD_CYCLE = [GradState.EMPTY, GradState.LOCAL, GradState.REDUCING, GradState.REDUCED, GradState.EMPTY]
ALLOWED = {
    *pairwise(DATA_CYCLE),
    *pairwise(GRAD_CYCLE),
    (GradState.LOCAL, GradState.LOCAL),
    (GradState.REDUCED, GradState.LOCAL),
    (GradState.LOCAL, GradState.EMPTY),
}


def _moves() -> dict[tuple, str | None]:
    """By (from, to): the error message, or None if the unit made the transition."""
    unit = make_unit(3)
    outcome: dict[tuple, str | None] = {}
    machines: list[tuple[Any, Any]] = [(DataState, unit.parameters), (GradState, unit.gradients)]
    for states, machine in machines:
        for before, after in product(states, states):
            machine.state = before
            try:
                machine.move(after)
                outcome[before, after] = None
            except UnitStateError as refusal:
                outcome[before, after] = str(refusal)
            assert machine.state is (before if outcome[before, after] else after)
    return outcome


def test_a_forbidden_state_transition_raises_an_error_that_names_the_unit_and_both_states() -> None:
    (outcome,) = run_ranks(_moves, 1)
    assert {move for move, refusal in outcome.items() if refusal is None} == ALLOWED
    for (before, after), refusal in outcome.items():
        if refusal is not None:
            assert "unit root: " in refusal
            assert f"from {before.value} to {after.value}" in refusal


def _repeated_verbs() -> dict[int, list[tuple[Any, ...]]]:
    """By stage: (data state, gradient state, number of collectives) after each method call; each is called twice."""
    found = {}
    for stage in STAGES:
        unit = make_unit(stage)
        unit.reshard(Phase.STEP)
        release: Callable[[], None] = partial(unit.reshard, Phase.STEP)
        verbs: list[Callable[[], None]] = [
            unit.unshard,
            unit.wait_unshard,
            unit.wait_reduce,
            release,
            unit.gradients.free,
        ]
        trail = []
        for verb in verbs:
            for _ in range(2):
                verb()
                trail.append((unit.parameters.state.value, unit.gradients.state.value, _calls(unit)))
        unit.begin_backward()
        unit.reduce_grad()
        for verb in (unit.wait_reduce, unit.gradients.free):
            for _ in range(2):
                verb()
                trail.append((unit.parameters.state.value, unit.gradients.state.value, _calls(unit)))
        found[stage] = trail
    return found


def _calls(unit: Unit) -> int:
    return sum(volume.calls for volume in unit._collectives.ledger.data.values())


def test_repeating_an_operation_is_a_no_op() -> None:
    for by_stage in run_ranks(_repeated_verbs, 2):
        for stage, trail in by_stage.items():
            gathers = 0 if stage == 0 else 1
            states = ["unsharding", "unsharded", "unsharded", "stale", "stale", "stale", "stale"]
            grads = ["empty"] * 5 + ["reduced", "empty"]
            calls = [gathers] * 5 + [gathers + 1] * 2
            assert trail[::2] == trail[1::2]
            assert trail[::2] == list(zip(states, grads, calls, strict=True)), f"stage {stage}"


def _waits_without_a_start() -> tuple[DataState, int]:
    unit = make_unit(3)
    unit.reshard(Phase.FORWARD)
    unit.wait_unshard()
    return unit.parameters.state, _calls(unit)


def test_wait_unshard_starts_the_gather_if_it_was_not_started() -> None:
    assert run_ranks(_waits_without_a_start, 2) == [(DataState.UNSHARDED, 1)] * 2


# ---- release ---------------------------------------------------------------------------------------------------------


def _release(stage: int) -> dict[str, Any]:
    unit = make_unit(stage)
    matrix = unit.params[0]
    flat_bytes = unit.layout.padded_numel * 4
    values = [param.detach().clone() for param in unit.params]
    x = torch.ones(2, 5, requires_grad=True)
    output = F.linear(x, matrix)
    found: dict[str, Any] = {"flat": flat_bytes, "full": storage_bytes(unit.parameters.unsharded_param)}
    unit.reshard(Phase.FORWARD)
    found["released"] = storage_bytes(unit.parameters.unsharded_param, *unit.params)
    found["kept"] = storage_bytes(unit.param_shard)
    if found["released"] == 0:
        for read in (lambda: F.linear(x, matrix), lambda: F.embedding(torch.tensor([0]), matrix), lambda: matrix[0]):
            with pytest.raises(RuntimeError, match="storage of size 0"):
                read()
    unit.wait_unshard()
    found["regathered"] = storage_bytes(unit.parameters.unsharded_param, *unit.params)
    found["values"] = all(torch.equal(param, value) for param, value in zip(unit.params, values, strict=True))
    output.sum().backward()
    assert x.grad is not None
    found["saved_tensor"] = torch.equal(x.grad, values[0].sum(0).expand(2, 5))
    return found


def test_a_released_unit_has_no_memory_and_using_it_in_a_layer_raises() -> None:
    """Layers and indexing create a view of the storage, and creating a view checks the storage's size.

    In torch 2.13 element-wise reads crash the process and `.numpy()` reads freed memory. Only releasing the memory in
    another way could make those raise an error.
    """
    for found in run_ranks(_release, 2, 3):
        assert found["full"] == found["flat"]
        assert found["released"] == 0
        assert found["kept"] == found["flat"] // 2


def test_gathering_again_restores_the_values_in_tensors_that_autograd_saved() -> None:
    for found in run_ranks(_release, 2, 3):
        assert found["regathered"] == found["flat"]
        assert found["values"]
        assert found["saved_tensor"]


def test_replicated_parameters_stay_in_memory_after_forward() -> None:
    for found in run_ranks(_release, 2, 2):
        assert found["released"] == found["kept"] == found["flat"]
        assert found["values"]


# ---- initial values and aliases --------------------------------------------------------------------------------------


def _births() -> dict[tuple[int, str], dict[str, Any]]:
    found = {}
    for stage, precision in product(STAGES, (FP32, BF16)):
        model = Odd()
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        unit = make_unit(stage, precision)
        low, high = unit.layout.shard_range(unit._collectives.shard_rank)
        flat = torch.zeros(unit.layout.padded_numel)
        flat[: unit.layout.numel] = torch.cat([value.reshape(-1) for value in before.values()])
        assert unit.master_shard is not None
        found[stage, precision.param] = {
            "values": torch.equal(unit.parameters.unsharded_param, flat.to(unit.parameters.unsharded_param.dtype)),
            "shard": torch.equal(unit.param_shard, flat[low:high].to(unit.param_shard.dtype)),
            "master": torch.equal(unit.master_shard, flat[low:high]),
            "shapes": [tuple(param.shape) for param in unit.params],
            "one_master": unit.master_shard is unit.param_shard,
            "slice": unit.param_shard.untyped_storage()._cdata
            == unit.parameters.unsharded_param.untyped_storage()._cdata,
            "views": {param.untyped_storage()._cdata for param in unit.params}
            == {unit.parameters.unsharded_param.untyped_storage()._cdata},
            "bytes": storage_bytes(unit.parameters.unsharded_param, unit.param_shard, unit.master_shard),
            "flat": unit.layout.padded_numel,
        }
    return found


@pytest.fixture(scope="module")
def births() -> list[dict[tuple[int, str], dict[str, Any]]]:
    return run_ranks(_births, 2)


def test_a_new_unit_holds_the_initial_values_and_an_unrounded_master(births: list[dict]) -> None:
    for by_row in births:
        for row, found in by_row.items():
            assert found["values"], row
            assert found["shard"], row
            assert found["master"], row
            assert found["shapes"] == [(7, 5), (3, 0), (1,), ()]
            assert found["views"], row


def test_the_master_is_the_parameter_shard_if_their_dtypes_are_equal(births: list[dict]) -> None:
    for by_row in births:
        assert {row: found["one_master"] for row, found in by_row.items()} == {
            row: row[1] == "fp32" for row in product(STAGES, ("fp32", "bf16"))
        }


def test_the_shard_of_replicated_parameters_is_a_slice_of_the_full_tensor(births: list[dict]) -> None:
    for by_row in births:
        assert {row: found["slice"] for row, found in by_row.items()} == {
            row: row[0] != 3 for row in product(STAGES, ("fp32", "bf16"))
        }


def test_aliased_tensors_share_storage_so_a_unit_has_the_expected_bytes(births: list[dict]) -> None:
    """Bytes per parameter at world 2, before the first release: stage 3 still has its full copy next to the shard."""
    wanted = {
        **{(stage, "fp32"): 4.0 for stage in (0, 1, 2)},
        (3, "fp32"): 4 + 4 / 2,
        (0, "bf16"): 2 + 4,
        **{(stage, "bf16"): 2 + 4 / 2 for stage in (1, 2)},
        (3, "bf16"): 2 + 2 / 2 + 4 / 2,
    }
    for by_row in births:
        assert {row: found["bytes"] / found["flat"] for row, found in by_row.items()} == wanted


def _refreshes() -> dict[tuple[int, str], bool]:
    found = {}
    for stage, precision in product(STAGES, (FP32, BF16)):
        unit = make_unit(stage, precision)
        assert unit.master_shard is not None
        unit.master_shard.fill_(1 + 2**-7 + 2**-9)  # between two bf16 numbers, nearer to the lower one
        unit.parameters.refresh_param_shard()
        unit.reshard(Phase.STEP)
        unit.wait_unshard()
        wanted = unit.master_shard.to(unit.param_shard.dtype)[0]
        found[stage, precision.param] = bool((unit.parameters.unsharded_param == wanted).all())
    return found


def test_refresh_rounds_the_master_into_the_shard_and_the_next_gather_uses_it() -> None:
    for by_row in run_ranks(_refreshes, 2):
        assert len(by_row) == 8
        assert all(by_row.values()), by_row


# ---- gradients -------------------------------------------------------------------------------------------------------


def _give(unit: Unit, index: int, value: float) -> None:
    param = unit.params[index]
    param.grad = torch.full_like(param, value)
    unit.take_grad(index, sums_locally=False)
    assert param.grad is None


def _gradients() -> dict[int, torch.Tensor]:
    """By stage: this rank's gradient shard, after two micro-batches.

    The second micro-batch has no gradient for the 0-dim parameter.
    """
    found = {}
    for stage in STAGES:
        unit = make_unit(stage, micro_batches=2)
        for micro, indices in enumerate([(3, 2, 1, 0), (0, 1, 2)]):
            unit.begin_backward()
            for index in indices:
                _give(unit, index, (index + 1) * 10.0**micro * (dist.get_rank() + 1))
            if stage >= 2 or micro == 1:
                unit.reduce_grad()
        unit.wait_reduce()
        assert unit.grad_shard is not None
        found[stage] = unit.grad_shard.clone()
    return found


def test_gradients_are_summed_over_micro_batches_and_ranks_and_missing_ones_count_as_zero() -> None:
    results = run_ranks(_gradients, 2)
    # The ranks give 1 + 2 = 3, times (index + 1), times 1 + 10; 1 for the parameter unused in the second micro-batch.
    sums = torch.cat([torch.full((35,), 33.0), torch.full((1,), 3 * 33.0), torch.tensor([4 * 3.0])])
    for stage in STAGES:
        shards = [by_stage[stage] for by_stage in results]
        full = torch.cat(shards) if stage else shards[0]
        assert torch.equal(full[:37], sums), f"stage {stage}"
        assert not full[37:].any()


# ---- gradients after a reduction -------------------------------------------------------------------------------------


def _reopened() -> None:
    """Three reductions in one step; the second gradient leaves `matrix` out, and tiers may take a sum away."""
    rank = dist.get_rank()
    for stage, is_sent_away, is_summed in product(STAGES, (False, True), (True, False)):
        unit = make_unit(stage)
        if not is_summed and not ZeroPlan.from_stage(stage).keeps_full_grads:
            continue
        unit.gradients.sums_over_ranks = is_summed
        for round_ in range(3):
            unit.begin_backward()
            unit.reopen_grad()
            for index, param in enumerate(unit.params):
                if index or round_ != 1:
                    param.grad = torch.full_like(param, float(10**round_ * (rank + 1)))
                    unit.take_grad(index, sums_locally=False)
            unit.reduce_grad()
            unit.wait_reduce()
            if is_sent_away and is_summed:
                assert unit.grad_shard is not None
                unit.gradients.give_away(unit.grad_shard.clone())
        ranks = 3 if is_summed else rank + 1
        whole = unit.gradients.unsharded_grad if not is_summed else unit.grad_shard
        assert whole is not None
        found = unit.full_of(whole) if is_summed else {one.name: one.of(whole) for one in unit.layout.segments}
        assert found["matrix"].unique().tolist() == [101.0 * ranks], (stage, is_sent_away, is_summed)
        assert float(found["scalar"].sum()) == 111.0 * ranks, (stage, is_sent_away, is_summed)
        unit.gradients.free()
        assert unit.grad_shard is None
        assert unit.gradients.kept == (None, None)


def test_backwards_after_a_reduction_add_to_its_sum() -> None:
    run_ranks(_reopened, 2)


# ---- padding ---------------------------------------------------------------------------------------------------------


def _paddings() -> list[tuple[str, int, float]]:
    """(unit, number of padding elements, sum of their magnitudes) of gradients after each backward, and of all other
    states after the last step.
    """
    found = []
    for stage, precision in product(STAGES, (FP32, BF16)):
        case = Case(dist.get_world_size(), 2, steps=3, precision=precision)
        runtime = build_runtime(case, stage)
        for step in range(case.steps):
            backwards_of_step(runtime, case, step)
            found += [_padding_of(unit, unit.grad_shard) for unit in runtime.units]
            runtime.step(LR)
        moments = iter(runtime.optimizer.state_tensors())
        for unit in runtime.units:
            for shard in (unit.param_shard, unit.master_shard, next(moments), next(moments)):
                found.append(_padding_of(unit, shard))
            unit.wait_unshard()
            tail = unit.parameters.unsharded_param[unit.layout.numel :]
            found.append((unit.name, tail.numel(), float(tail.float().abs().sum())))
    return found


def _padding_of(unit: Unit, shard: torch.Tensor | None) -> tuple[str, int, float]:
    assert shard is not None
    low, _ = unit.layout.shard_range(unit._collectives.shard_rank)
    tail = shard[max(unit.layout.numel - low, 0) :]
    return unit.name, tail.numel(), float(tail.float().abs().sum())


@pytest.mark.full
def test_padding_stays_zero_in_every_state_during_training() -> None:
    results = run_ranks(_paddings, 3)
    assert sum(numel for found in results for _, numel, _ in found) > 0
    assert {total for found in results for _, _, total in found} == {0.0}
