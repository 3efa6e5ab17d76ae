"""Predicted bytes while a model is built, a state is saved and loaded, and weights are written are those that torch's
allocator counts on CPU ranks, but for storages of a few numbers.

The combinations and the measurement are those of benchmarks/predicted_moments.py, which prints the errors.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from harness.ranks import run_ranks

from benchmarks.predicted_moments import Moments, combinations, leave_out_object_messages, measured, predicted
from benchmarks.predicted_peaks import MODELS, Case, Predictions, allocated, config_of
from orchestrator.config.schema import Checkpoint, CheckpointKind, Device, RunConfig, WeightsExport
from orchestrator.wings.predict.activations import answers
from orchestrator.wings.predict.memory_cache import units_key
from orchestrator.wings.predict.moments import all_moments, counted_from, met
from orchestrator.wings.predict.shapes import units_of
from orchestrator.wings.predict.step import ConfigMemory, Memories
from zero_runtime.collectives import Collectives
from zero_runtime.phase_clock import PhaseClock

SMALL_BYTES = 256  # counters, in tensors of a few numbers; messages of objects are left out
LARGEST_PART_BYTES = 4 * 512 * 128  # of a part that is read from a scratch file: the embedding of the models, in fp32
CASES = combinations(24, seed=0)
SHORT = [Case("llama", 2, 3, "bf16", 1, "none", 1, "full", "all host", 1, 0)]


def check(cases: list[Case]) -> None:
    predictions = Predictions()
    by_rank = run_ranks(measured, cases[0].world, cases)
    for place, case in enumerate(cases):
        ranks = [rank[place] for rank in by_rank]
        for name, foreseen, *found in zip(Moments._fields, predicted(case, predictions), *ranks, strict=True):
            left_out, part = max(found) - foreseen, 0
            if name == "saving" and "nvme" in case.offload:  # which two parts are held at a time is not predicted
                part = 2 * LARGEST_PART_BYTES
            assert -part <= left_out <= part + SMALL_BYTES, (case, name, found, foreseen)


def test_the_bytes_outside_of_steps_are_the_predicted_ones() -> None:
    check(SHORT)


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_bytes_outside_of_steps_are_the_predicted_ones_for_other_settings(world: int) -> None:
    check([case for case in CASES if case.world == world and case not in SHORT])


def counted_of_a_message() -> int:
    """The bytes that the measurement counts of a message of a megabyte, of which gloo may hold a part for longer."""
    leave_out_object_messages()
    collectives = Collectives(2, PhaseClock(torch.device("cpu")))
    return allocated(lambda: collectives.gather_objects("x" * 2**20))[0]


def test_messages_of_objects_are_not_counted() -> None:
    assert run_ranks(counted_of_a_message, 2) == [0, 0]


# ---- on a GPU, and what a run meets ----------------------------------------------------------------------------------

STAGE_3 = Case("llama", 2, 3, "bf16", 1, "none", 1, "full", "none", 1, 0)
EMBEDDING = MODELS["llama"]["vocab_size"] * MODELS["llama"]["hidden_size"]


def on_gpus(case: Case) -> RunConfig:
    config = config_of(case)
    return replace(config, resources=replace(config.resources, device=Device.cuda))


def memory_of(config: RunConfig) -> ConfigMemory:
    memory = Memories(dict(answers([config])) | {units_key(config): units_of(config)}).of(config)
    assert memory is not None
    return memory


def test_on_a_gpu_drawn_and_read_values_and_copies_are_on_the_host() -> None:
    building, loading, saving, exporting, _ = all_moments(memory_of(on_gpus(STAGE_3)))
    assert building.host == EMBEDDING * (4 + 2) + 5056  # fp32, and its conversion to bf16
    # A rank reads its half of the embedding, and the whole of a smaller projection that its shard holds, in fp32.
    assert loading.host == 4 * MODELS["llama"]["intermediate_size"] * MODELS["llama"]["hidden_size"]
    shards = 12 * sum(size.padded_numel for size, _ in memory_of(on_gpus(STAGE_3)).units) // 2
    assert saving.host == shards
    assert exporting.host == EMBEDDING * 2


def test_offloaded_shards_are_on_the_host_at_every_moment() -> None:
    away = memory_of(on_gpus(STAGE_3._replace(offload="all host")))
    plain = all_moments(memory_of(on_gpus(STAGE_3)))
    for mine, other in zip(all_moments(away)[:4], plain, strict=False):
        assert mine.host >= away.away().host > 0
        assert mine.device < other.device


def test_a_scratch_file_is_read_part_by_part_in_place_of_a_copy() -> None:
    memory = memory_of(on_gpus(STAGE_3._replace(offload="all nvme")))
    saving = counted_from(memory).saving()
    assert saving.host - memory.away().host < all_moments(memory_of(on_gpus(STAGE_3)))[2].host
    assert memory.away(stepped=False).host < memory.away().host  # one slot is enough before the first step


def test_a_run_meets_the_moments_that_its_settings_ask_for() -> None:
    memory = memory_of(on_gpus(STAGE_3))
    assert [moment.name for moment in met(memory).outside] == ["drawing initial values"]
    checkpoint = Checkpoint(CheckpointKind.sharded, every=5, resume="auto", weights=WeightsExport.bf16)
    saves = replace(memory, config=replace(memory.config, checkpoint=checkpoint))
    outside, kept = met(saves)
    names = ["drawing initial values", "loading a state", "saving a state", "exporting weights"]
    assert [moment.name for moment in outside] == names
    assert kept == outside[2].host  # the copy is there in all steps after the first save
    assert outside[3].host == kept + EMBEDDING * 2
    once = replace(memory, config=replace(memory.config, checkpoint=replace(checkpoint, every=None)))
    assert met(once).kept == 0
