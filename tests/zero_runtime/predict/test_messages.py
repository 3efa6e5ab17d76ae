"""What the collectives send agrees with the ZeRO paper (arXiv 1910.02054): the volumes of section 7."""

from __future__ import annotations

import pytest

from zero_runtime.plan import ZeroPlan
from zero_runtime.predict.messages import CollectiveCounts, collective_elements, collective_formula

STAGES = (0, 1, 2, 3)


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 7])
def test_collective_counts_follow_section_7_of_the_paper_for_each_number_of_micro_batches(micro_batches: int) -> None:
    counts = [CollectiveCounts.of(ZeroPlan.from_stage(stage), micro_batches) for stage in STAGES]
    assert [(one.gathers, one.reductions) for one in counts] == [
        (0, 1),  # an all-reduce, which is both
        (1, 1),
        (1, micro_batches),
        (2 * micro_batches, micro_batches),
    ]


def test_reducing_at_the_boundary_leaves_one_reduction_per_step() -> None:
    for stage, gathers in ((2, 1), (3, 8)):
        counts = CollectiveCounts.of(ZeroPlan.from_stage(stage), 4, reduces_at_boundary=True)
        assert (counts.gathers, counts.reductions) == (gathers, 1)


def sent(stage: int, *, world: int, micro_batches: int = 1, shard_ranks: int | None = None) -> int:
    plan = ZeroPlan.from_stage(stage, shard_ranks=shard_ranks)
    counts = CollectiveCounts.of(plan, micro_batches)
    return collective_elements(counts, 960, world=world, shard_count=plan.shard_count(world))


@pytest.mark.parametrize("stage", STAGES)
def test_each_collective_sends_all_elements_except_the_ranks_own(stage: int) -> None:
    assert sent(stage, world=1) == 0
    assert sent(stage, world=2) == (960, 960, 960, 1440)[stage]
    assert sent(stage, world=3, micro_batches=4) == (1280, 1280, 3200, 7680)[stage]


def test_shard_groups_add_a_reduction_across_their_replicas() -> None:
    # Groups of 2 in a world of 4: 1/2 of 960 per collective within a group, 2 x 1/2 of the shard's 480 per reduction
    # across groups.
    assert sent(1, world=4, shard_ranks=2) == 2 * 480 + 480
    assert sent(3, world=4, shard_ranks=2) == 3 * 480 + 480
    assert sent(3, world=4, shard_ranks=4) == 3 * 720
    assert sent(3, world=4, shard_ranks=1) == 2 * 720


def test_the_formula_of_the_collectives_prints_the_volume_with_and_without_groups() -> None:
    def told(stage: int, shard_count: int) -> str:
        return collective_formula(CollectiveCounts.of(ZeroPlan.from_stage(stage)), world=4, shard_count=shard_count)

    assert [told(0, 1), told(1, 4), told(2, 4), told(3, 4)] == [f"{n}Ψ·(N-1)/N" for n in (2, 2, 2, 3)]
    assert told(3, 2) == "3Ψ·(G-1)/G + 2Ψ/G·(N/G-1)/(N/G)"
