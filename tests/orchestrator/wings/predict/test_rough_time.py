"""A step on described hardware is estimated from its data sheet, and the estimate is marked as rough."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.compose import arguments, compose
from orchestrator.config.schema import RunConfig
from orchestrator.machine.hardware import Hardware
from orchestrator.planning.points import checked_points
from orchestrator.planning.rules.scene import Scene
from orchestrator.wings.predict import memory_cache, rough_time, shapes, speed, step
from orchestrator.wings.predict.activations import answers
from orchestrator.wings.predict.memory_cache import units_key
from orchestrator.wings.predict.tensor_messages import TensorMessages
from zero_runtime.predict.timing.data_sheet import (
    HOST,
    LONGEST,
    PUBLISHED,
    SHORTEST,
    Layout,
    Ring,
    segment_s,
    update_bytes,
)
from zero_runtime.predict.timing.step_time import StepSeconds
from zero_runtime.predict.timing.work import LinearWork

SEQ, MICROS = 16, (2, 4)
WHOLE = replace(PUBLISHED, messages=1.0)  # a message of a tensor group is not divided


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
    assert found.time.update_s == pytest.approx(numel * moved / (peaks.memory_bytes_per_s * PUBLISHED.update))
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


OFFLOADS = ["offload=optimizer_cpu zero=stage2", "offload=optimizer_param_cpu zero=stage3"]


@pytest.mark.parametrize("line", [*OFFLOADS, "offload=optimizer_param_nvme zero=stage3"])
def test_an_offload_is_slower_than_the_same_without_and_has_no_range(line: str, counted: dict[str, Any]) -> None:
    away, plain = (speed_of(f"resources.ranks=8 {words}", counted) for words in (line, line.split()[-1]))
    assert away is not None
    assert plain is not None
    assert away.tokens_per_second < plain.tokens_per_second
    assert away.time.update_s > plain.time.update_s
    assert (away.within, plain.within is None) == (None, False)


def test_an_update_on_the_host_goes_on_in_the_next_forward(counted: dict[str, Any]) -> None:
    """The forward waits for the first of the units; of a slower host for all that the forward does not take."""
    line = "resources.ranks=1 zero=stage2 offload=optimizer_cpu"
    found, memory = speed_of(line, counted), step.Memories(counted).of(config(line))
    slow = speed_of(line, counted, hardware=replace(config(line).hardware, host_memory_gb_per_s=0.01))
    assert found is not None
    assert slow is not None
    assert memory is not None
    numel = sum(size.padded_numel for size, _ in memory.units)
    moved = update_bytes(config(line).precision.mixed, 8.0, 1, clips=True)
    host_s = numel * moved / (0.01e9 * HOST.memory)
    assert host_s - slow.time.model_s < slow.time.update_s < host_s
    assert 0 < found.time.update_s < host_s


@pytest.mark.parametrize("lacking", ["host_link_gb_per_s", "host_memory_gb_per_s", "drive_gb_per_s"])
def test_an_offload_over_an_unknown_bandwidth_is_not_predicted(lacking: str, counted: dict[str, Any]) -> None:
    node = replace(config("").hardware, **{lacking: None})
    assert speed_of("resources.ranks=8 zero=stage3 offload=optimizer_nvme", counted, hardware=node) is None


def test_the_range_is_that_of_the_published_runs(counted: dict[str, Any]) -> None:
    found = speed_of("resources.ranks=1 zero=stage0", counted)
    assert found is not None
    assert found.within is not None
    tokens = found.tokens_per_second
    assert found.within == pytest.approx((tokens / LONGEST, tokens / SHORTEST))
    assert found.within[0] < tokens < found.within[1]


@pytest.mark.parametrize(
    ("line", "keys", "why"),
    [
        ("resources.ranks=8 zero=stage3", {"link_gb_per_s": 32}, "PCIe"),
        ("resources.ranks=512 resources.nodes=64 zero=stage3", {}, "more than 32 nodes"),
        ("resources.ranks=1 zero=stage0", {"gpu": "Tesla T4"}, "GPUs other than A100 and Hopper"),
        ("resources.ranks=1 zero=stage0", {}, "batches so small"),  # 48 tokens of a tiny model
    ],
)
def test_what_no_published_run_has_is_ordered_but_shows_no_number(
    line: str, keys: dict[str, Any], why: str, counted: dict[str, Any]
) -> None:
    found = speed_of(line, counted, hardware=replace(config("").hardware, **keys))
    assert found is not None
    assert why in found.outside
    assert found.tokens_per_second > 0
    assert (found.shown, found.text, found.to_dict()["tokens_per_second"]) == (None, "outside", None)


def test_a_tensor_parallel_group_of_two_nodes_shows_no_number() -> None:
    two_nodes = config("resources.ranks=16 resources.nodes=2")
    groups = {tp: replace(two_nodes, parallel=replace(two_nodes.parallel, tp=tp)) for tp in (8, 16)}
    time = rough_time.RoughTime(StepSeconds(1.0, 0, 0, 0, 0, 0, 0), launch_share=0.0)
    assert [rough_time.outside(one, time) for one in groups.values()] == [
        "",
        "tensor-parallel groups across nodes",
    ]


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
    alone_s = Ring(4, 1).curve(peaks, WHOLE, rounds=2).at(2 * 3 * SEQ * 128)
    assert rough_time.tensor_s(divided, peaks, PUBLISHED) == pytest.approx(6 * alone_s)
    across = replace(divided, config=config("resources.ranks=8 resources.nodes=4 parallel.tp=4"))
    assert rough_time.tensor_s(across, peaks, PUBLISHED) > rough_time.tensor_s(divided, peaks, PUBLISHED)
    assert rough_time.tensor_s(memory, peaks, PUBLISHED) == 0.0


def test_the_ranks_of_a_group_wait_for_every_exchange_of_their_parts(counted: dict[str, Any]) -> None:
    """4 blocks exchange twice in forward and twice in backward; a rank sends 3/4 of what it holds of 3 x 16 / 4 tokens,
    as in one round of a ring of 4 ranks on a node."""
    one, memory = config("resources.ranks=8 parallel.sp=4"), step.Memories(counted).of(config("resources.ranks=8"))
    peaks = rough_time.peaks_of(one)
    assert memory is not None
    assert peaks is not None
    parts = replace(memory, config=one, tensor=TensorMessages(traded=((128, 128),) * 4))
    alone_s = Ring(4, 1).curve(peaks, WHOLE).at(2 * 3 * SEQ * 128 / 4)
    assert rough_time.tensor_s(parts, peaks, PUBLISHED) == pytest.approx(16 * alone_s)
    assert rough_time.data_layout(one, 8) == Layout(8, 1, 8)  # ZeRO shards over all of them


def test_zero_shards_over_one_rank_of_each_group() -> None:
    assert rough_time.data_layout(config("resources.ranks=8 parallel.tp=4"), 2) == Layout(2, 1, 2)
    assert rough_time.data_layout(config("resources.ranks=16 resources.nodes=2 parallel.tp=8"), 2) == Layout(2, 2, 2)
