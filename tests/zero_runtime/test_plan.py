"""Each ZeRO stage has the partitions and release points of the ZeRO paper; all other combinations are refused."""

from __future__ import annotations

from itertools import product

import pytest

from zero_runtime.errors import PlanError
from zero_runtime.plan import Partition, Phase, ZeroPlan

R, S = Partition.REPLICATED, Partition.SHARDED
WORLD = 4
ENDS_AT_STEP = {Phase.FORWARD: False, Phase.BACKWARD: False, Phase.STEP: True}
ALWAYS_ENDS = dict.fromkeys(Phase, True)

# stage: (params, grads, optimizer), shards of WORLD ranks, keeps full params and grads, reduces every backward, full
# parameters end after
TABLE = {
    0: ((R, R, R), 1, (True, True), False, ENDS_AT_STEP),
    1: ((R, R, S), WORLD, (True, True), False, ENDS_AT_STEP),
    2: ((R, S, S), WORLD, (True, False), True, ENDS_AT_STEP),
    3: ((S, S, S), WORLD, (False, False), True, ALWAYS_ENDS),
}


@pytest.mark.parametrize("stage", TABLE)
def test_each_stage_is_defined_as_in_the_paper(stage: int) -> None:
    states, shards, keeps, every_backward, ends = TABLE[stage]
    plan = ZeroPlan.from_stage(stage)
    assert (plan.params, plan.grads, plan.optimizer) == states
    assert plan == ZeroPlan(*states)
    assert plan.shard_count(WORLD) == shards
    assert (plan.keeps_full_params, plan.keeps_full_grads) == keeps
    assert plan.reduces_every_backward is every_backward
    assert {phase: plan.releases_params_after(phase) for phase in Phase} == ends


def test_a_single_rank_has_one_shard_at_every_stage() -> None:
    assert {ZeroPlan.from_stage(stage).shard_count(1) for stage in TABLE} == {1}


def test_each_stage_shards_one_more_state_than_the_previous_stage() -> None:
    sharded = [sum(state is S for state in vars(ZeroPlan.from_stage(stage)).values()) for stage in TABLE]
    assert sharded == [0, 1, 2, 3]


@pytest.mark.parametrize("row", sorted(set(product((R, S), repeat=3)) - {row[0] for row in TABLE.values()}, key=str))
def test_a_combination_that_is_not_a_stage_is_refused_with_the_fix(row: tuple[Partition, Partition, Partition]) -> None:
    with pytest.raises(PlanError) as refusal:
        ZeroPlan(*row)
    assert f"({', '.join(state.value for state in row)})" in str(refusal.value)
    assert "use ZeroPlan.from_stage(0 | 1 | 2 | 3)" in str(refusal.value)


@pytest.mark.parametrize("stage", [-1, 4, "2", None, 1.5])
def test_an_unknown_stage_is_refused_with_the_valid_stages(stage: object) -> None:
    with pytest.raises(PlanError, match=r"zero\.stage must be 0, 1, 2 or 3, found ") as refusal:
        ZeroPlan.from_stage(stage)  # type: ignore[arg-type]
    assert f"found {stage!r} " in str(refusal.value)


def test_outer_sharding_splits_states_over_all_ranks_and_parameters_over_a_group() -> None:
    plan = ZeroPlan.from_stage(3, shard_ranks=4, outer_sharding="optim")
    assert (plan.shard_count(32), plan.group_ranks(32), plan.held_params) == (32, 4, Partition.GROUP)
    assert {one: plan.ranks_of(one, 32) for one in Partition} == {R: 1, Partition.GROUP: 4, S: 32}
    with pytest.raises(PlanError, match="expected a divisor of the 30 ranks"):
        plan.shard_count(30)
    hybrid = ZeroPlan.from_stage(3, shard_ranks=4)
    assert (hybrid.shard_count(32), hybrid.group_ranks(32), hybrid.held_params) == (4, 4, S)


def test_a_plan_error_is_a_value_error() -> None:
    assert issubclass(PlanError, ValueError)
