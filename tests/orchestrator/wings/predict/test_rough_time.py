"""A step on described hardware is estimated from its data sheet, and the estimate is marked as rough."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.compose import arguments, compose
from orchestrator.config.schema import RunConfig
from orchestrator.machine.hardware import Hardware
from orchestrator.plan.points import checked_points
from orchestrator.plan.rules.scene import Scene
from orchestrator.wings.predict import memory_cache, rough_time, shapes, speed, step
from orchestrator.wings.predict.activations import answers
from orchestrator.wings.predict.memory_cache import units_key
from orchestrator.wings.predict.tensor_messages import TensorMessages
from zero_runtime.predict.timing.data_sheet import PUBLISHED, Layout, Ring, segment_s, update_bytes
from zero_runtime.predict.timing.work import LinearWork

SEQ, MICROS = 16, (2, 4)


def config(line: str) -> RunConfig:
    words = f"--plan model=llama_tiny batch.seq={SEQ} batch.micro=3 resources.device=cuda hardware=a100_80gb {line}"
    scene = Scene(Hardware(4, "cpu"), plan_only=True)
    found, problems = checked_points(compose.compose(arguments.split(words.split())), scene)
    assert problems == []
    return found[0].config


@pytest.fixture(scope="module")
def counted() -> dict[str, Any]:
    """The answers for the model at 2 to 4 sequences."""
    one = config("resources.ranks=1")
    found = dict(answers([replace(one, batch=replace(one.batch, micro=micro)) for micro in MICROS]))
    return found | {units_key(one): shapes.units_of(one)}


def trace_key() -> str:
    one = config("resources.ranks=1")
    family = [replace(one, batch=replace(one.batch, micro=micro)) for micro in MICROS]
    return memory_cache.trace_key(family, *MICROS)


def speed_of(line: str, counted: dict[str, Any], **groups: Any) -> speed.Speed | None:
    memory = step.Memories(counted).of(replace(config(line), **groups))
    assert memory is not None
    return speed.speed_of(memory, "this machine")


def test_one_gpu_takes_the_time_of_its_work_and_of_the_update(counted: dict[str, Any]) -> None:
    one = config("resources.ranks=1 zero=stage0")
    peaks, memory = rough_time.peaks_of(one), step.Memories(counted).of(one)
    assert peaks is not None
    assert memory is not None
    work = LinearWork.of_plain(counted[trace_key()]["work"]).at(3)
    seconds = sum(segment_s(piece, peaks) for of_key in work.values.values() for piece in of_key)
    found = speed_of("resources.ranks=1 zero=stage0", counted)
    assert found is not None
    assert found.time.model_s == pytest.approx(seconds)
    numel = sum(size.padded_numel for size, _ in memory.units)
    moved = update_bytes(one.precision.mixed, 8.0, 1, clips=True)
    assert found.time.update_s == pytest.approx(numel * moved / (peaks.memory_bytes_per_s * PUBLISHED.memory))
    assert found.time.exposed_s == found.time.control_s == 0
    assert found.tokens_per_second == pytest.approx(3 * SEQ / found.time.total_s)


def test_the_estimate_is_rough_and_has_the_utilization_of_the_peak(counted: dict[str, Any]) -> None:
    """6 operations for each parameter and token, of 312e12 a second on each of 8 GPUs."""
    found, memory = speed_of("resources.ranks=8 zero=stage3", counted), step.Memories(counted).of(config(""))
    assert found is not None
    assert memory is not None
    assert found.rough
    flops = 6 * sum(size.numel for size, _ in memory.units) * 8 * 3 * SEQ
    assert found.mfu == pytest.approx(flops / (8 * 312e12 * found.time.total_s))


def test_ranks_wait_for_their_links_and_longer_across_nodes(counted: dict[str, Any]) -> None:
    one, node, nodes = (
        speed_of(line, counted)
        for line in (
            "resources.ranks=1 zero=stage3",
            "resources.ranks=8 zero=stage3",
            "resources.ranks=16 resources.nodes=2 zero=stage3",
        )
    )
    assert one is not None
    assert node is not None
    assert nodes is not None
    assert one.time.exposed_s < node.time.exposed_s < nodes.time.exposed_s


@pytest.mark.parametrize("line", ["offload=optimizer_cpu zero=stage2", "offload=optimizer_param_cpu zero=stage3"])
def test_offload_on_described_hardware_is_not_predicted(line: str, counted: dict[str, Any]) -> None:
    assert speed_of(f"resources.ranks=8 {line}", counted) is None


@pytest.mark.parametrize("lacking", ["bf16_tflops", "memory_gb_per_s", "link_gb_per_s"])
def test_a_number_that_the_data_sheet_lacks_is_not_guessed(lacking: str, counted: dict[str, Any]) -> None:
    node = replace(config("").hardware, **{lacking: None})
    assert speed_of("resources.ranks=8 zero=stage3", counted, hardware=node) is None


def test_nothing_is_measured_for_described_hardware() -> None:
    assert speed.missing([config("resources.ranks=8")], "this machine") == []


def test_the_ranks_of_a_group_wait_for_every_sum_over_their_slices(counted: dict[str, Any]) -> None:
    """A micro-batch of 3 x 16 tokens has 6 sums of 3 x 16 x 128 numbers in bf16, over a ring of 4 ranks on a node."""
    one, memory = config("resources.ranks=8 parallel.tp=4"), step.Memories(counted).of(config("resources.ranks=8"))
    peaks = rough_time.peaks_of(one)
    assert memory is not None
    assert peaks is not None
    divided = replace(memory, config=one, tensor=TensorMessages((128,) * 6))
    alone_s = Ring(4, 1).curve(peaks, PUBLISHED, rounds=2).at(2 * 3 * SEQ * 128)
    assert rough_time._tensor_s(divided, peaks) == pytest.approx(6 * alone_s)
    across = replace(divided, config=config("resources.ranks=8 resources.nodes=4 parallel.tp=4"))
    assert rough_time._tensor_s(across, peaks) > rough_time._tensor_s(divided, peaks)
    assert rough_time._tensor_s(memory, peaks) == 0.0


def test_the_ranks_of_a_group_wait_for_every_exchange_of_their_parts(counted: dict[str, Any]) -> None:
    """4 blocks exchange twice in forward and twice in backward; a rank sends 3/4 of what it holds of 3 x 16 / 4 tokens,
    as in one round of a ring of 4 ranks on a node."""
    one, memory = config("resources.ranks=8 parallel.sp=4"), step.Memories(counted).of(config("resources.ranks=8"))
    peaks = rough_time.peaks_of(one)
    assert memory is not None
    assert peaks is not None
    parts = replace(memory, config=one, tensor=TensorMessages(traded=((128, 128),) * 4))
    alone_s = Ring(4, 1).curve(peaks, PUBLISHED).at(2 * 3 * SEQ * 128 / 4)
    assert rough_time._tensor_s(parts, peaks) == pytest.approx(16 * alone_s)
    assert rough_time.data_layout(one, 8) == Layout(8, 1, 8)  # ZeRO shards over all of them


def test_zero_shards_over_one_rank_of_each_group() -> None:
    assert rough_time.data_layout(config("resources.ranks=8 parallel.tp=4"), 2) == Layout(2, 1, 2)
    assert rough_time.data_layout(config("resources.ranks=16 resources.nodes=2 parallel.tp=8"), 2) == Layout(2, 2, 2)
