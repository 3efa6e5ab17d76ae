"""The byte rules of other engines are sums of the terms that their sources allocate."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.published_closed_forms import paper_bytes_per_param
from benchmarks.published_peers import model_of_numels
from zero_runtime.plan import ZeroPlan
from zero_runtime.predict.memory.peer_deepspeed import DeepSpeedSettings, deepspeed
from zero_runtime.predict.memory.peers import (
    Moment,
    PeerMemory,
    PeerTerm,
    ddp,
    fsdp2,
)

BLOCK = (6_000_000, 2_000_000, 4_000)
MODEL = model_of_numels((BLOCK,) * 4, (8_000_000,))
WORLD = 8
NUMEL = MODEL.numel  # a multiple of WORLD
PLANS = {stage: ZeroPlan.from_stage(stage) for stage in range(4)}
NO_BUCKETS = DeepSpeedSettings(contiguous_gradients=False, param_persistence_threshold=0)


def test_the_model_adds_up() -> None:
    assert NUMEL == 4 * 8_004_000 + 8_000_000
    assert MODEL.largest_block == 8_004_000
    assert NUMEL % WORLD == 0


def test_the_peak_is_that_of_the_worst_moment() -> None:
    memory = PeerMemory(
        "an engine",
        (
            PeerTerm("parameters", 100),
            PeerTerm("gradients", 10, Moment.GRADIENTS),
            PeerTerm("bucket", 5, Moment.COMPUTE),
            PeerTerm("temporaries", 30, Moment.STEP),
        ),
    )
    assert memory.resting == 110
    assert memory.peak() == memory.peak(35) == 140
    assert memory.peak(36) == 141
    assert memory.peak(36, micro_batches=2) == 151


@pytest.mark.parametrize("stage", PLANS)
def test_without_buckets_deepspeed_has_the_papers_bytes(stage: int) -> None:
    memory = deepspeed(MODEL, PLANS[stage], WORLD, NO_BUCKETS)
    # With the optimizer sharded alone it keeps the gradients of its own part alone, as with sharded gradients.
    paper = PLANS[2 if stage == 1 else stage]
    assert memory.resting == paper_bytes_per_param(paper, WORLD) * NUMEL
    whole = deepspeed(MODEL, PLANS[stage], WORLD, replace(NO_BUCKETS, accumulates=True))
    more = whole.at(Moment.COMPUTE) - memory.at(Moment.COMPUTE)
    assert more == (2 * NUMEL * (WORLD - 1) // WORLD if stage == 1 else 0)


def test_deepspeed_keeps_small_parameters_and_the_bucket_where_parameters_are_sharded() -> None:
    memory = deepspeed(MODEL, PLANS[3], WORLD)
    persistent, bucket = 4 * 4_000 * 2, 500_000_000 * 2
    assert memory.resting == 16 * NUMEL // WORLD + persistent + bucket


def test_weights_kept_for_backward_are_the_complete_model() -> None:
    settings = replace(NO_BUCKETS, memory_efficient_linear=False)
    memory = deepspeed(MODEL, PLANS[3], WORLD, settings)
    assert memory.at(Moment.COMPUTE) == 2 * NUMEL


def test_live_parameters_are_limited_by_the_model_and_by_the_setting() -> None:
    assert deepspeed(MODEL, PLANS[3], WORLD, NO_BUCKETS).at(Moment.COMPUTE) == 2 * NUMEL
    few = replace(NO_BUCKETS, max_live_parameters=1, prefetch_bucket_size=100)
    assert deepspeed(MODEL, PLANS[3], WORLD, few).at(Moment.COMPUTE) == 2 * (MODEL.largest_block + 100)


def test_two_buckets_with_overlapping_communication() -> None:
    one = deepspeed(MODEL, PLANS[2], WORLD)
    two = deepspeed(MODEL, PLANS[2], WORLD, DeepSpeedSettings(overlap_comm=True))
    assert one.at(Moment.COMPUTE) == 2 * NUMEL  # the model is smaller than a bucket
    assert two.at(Moment.COMPUTE) == 4 * NUMEL


def test_a_bucket_holds_the_largest_parameter() -> None:
    memory = deepspeed(MODEL, PLANS[2], WORLD, DeepSpeedSettings(reduce_bucket_size=1))
    assert memory.at(Moment.COMPUTE) == 2 * 8_000_000


def test_offloaded_states_are_not_on_the_device() -> None:
    away = replace(NO_BUCKETS, optimizer_on_host=True)
    assert deepspeed(MODEL, PLANS[3], WORLD, away).resting == 2 * NUMEL // WORLD
    assert deepspeed(MODEL, PLANS[3], WORLD, replace(away, params_on_host=True)).resting == 0


def test_fp32_gradients_cost_two_more_bytes() -> None:
    settings = replace(NO_BUCKETS, fp32_gradients=True)
    assert deepspeed(MODEL, PLANS[2], WORLD, settings).resting == (2 + 16 / WORLD) * NUMEL
    assert deepspeed(MODEL, PLANS[1], WORLD, settings).resting == (8 + 12 / WORLD) * NUMEL


def test_fsdp2_shards_sixteen_bytes() -> None:
    memory = fsdp2(MODEL, WORLD)
    assert memory.resting == 16 * NUMEL // WORLD
    block, root = MODEL.largest_block, 8_000_000
    next_gather = 2 * (block + -(-block // WORLD))
    assert memory.at(Moment.COMPUTE) == 2 * root + 2 * block + next_gather + 2 * block + 4 * block
    kept = fsdp2(MODEL, WORLD, reshards=False)
    assert kept.at(Moment.COMPUTE) - memory.at(Moment.COMPUTE) == 2 * 3 * block


def test_ddp_has_sixteen_bytes_and_four_where_gradients_are_no_views_of_buckets() -> None:
    assert ddp(MODEL).resting == 16 * NUMEL
    assert ddp(MODEL, views=False).resting == 20 * NUMEL
    assert ddp(MODEL, accumulates=True).at(Moment.COMPUTE) == 4 * NUMEL  # until the last micro-batch copies them
