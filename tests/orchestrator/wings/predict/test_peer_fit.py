"""Rows of `zlab fit --as ENGINE`: the engine's terms with the model's activations, and the largest micro-batch."""

from __future__ import annotations

from typing import Any

import pytest
from points import config_of_line

from orchestrator.wings.predict.peer_fit import PeerFit, peer_fit, peer_model
from orchestrator.wings.predict.step import ConfigMemory, rules_of
from zero_runtime.optim.configs import AdamWConfig
from zero_runtime.predict.memory.activation_count import LinearTrace, Trace
from zero_runtime.predict.memory.device_overhead import NO_OVERHEAD, DeviceOverhead
from zero_runtime.predict.memory.step_memory import StepMemory, StepPeaks

NUMEL, BLOCKS, RANKS, HIGH = 1000, 3, 4, 64
TOTAL = NUMEL * (BLOCKS + 1)
ACTIVATION_BYTES, BUFFER_BYTES, SEQ = 500, 24, 8
INPUT_BYTES = 16 * SEQ  # ids and labels of a sequence
SHAPES: dict[str, Any] = {
    "units": [{"name": "embed_tokens", "trainable": True, "shapes": [["weight", [10, NUMEL // 10]]]}]
    + [
        {"name": f"model.layers.{block}", "trainable": True, "shapes": [["a", [600]], ["b", [40, 10]]]}
        for block in range(BLOCKS)
    ]
}


def row(engine: str, words: str, limit: int = 10**9, overhead: DeviceOverhead = NO_OVERHEAD) -> PeerFit | None:
    line = f"precision=bf16 resources.device=cpu resources.ranks={RANKS} batch.seq={SEQ} batch.micro=1 {words}"
    config = config_of_line(line)
    trace = Trace()
    trace.went(trace.came(ACTIVATION_BYTES, in_block=True))
    linear = LinearTrace(trace, [ACTIVATION_BYTES], 1, HIGH)
    tokens = SEQ * (config.batch.accumulation or 1)
    part = StepMemory(linear, StepPeaks(1, HIGH, (), 0), tokens, BUFFER_BYTES)  # our peaks are not used by the rules
    memory = ConfigMemory(config, [], rules_of(config, {"state_bytes": 8.0}), (part,))
    return peer_fit(engine, "a", (), memory, SHAPES, limit, overhead)


def test_blocks_are_the_units_whose_names_end_with_a_number() -> None:
    model = peer_model(SHAPES, AdamWConfig())
    assert [[one.numel for one in block] for block in model.blocks] == [[600, 400]] * BLOCKS
    assert [one.numel for one in model.others] == [NUMEL]
    assert [one.decays for one in model.blocks[0]] == [False, True]  # of one dimension, and of two
    assert model.numel == TOTAL


@pytest.mark.parametrize(("stage", "bytes_each"), [(0, 18.0), (1, 6 + 12 / RANKS)])
def test_megatron_has_its_published_bytes_at_rest(stage: int, bytes_each: float) -> None:
    found = row("megatron", f"zero=stage{stage}")
    assert found is not None
    assert found.memory.resting == bytes_each * TOTAL
    assert found.peak == found.memory.resting + HIGH * (ACTIVATION_BYTES + INPUT_BYTES) + BUFFER_BYTES
    assert (found.micro, found.capped) == (HIGH, True)


@pytest.mark.parametrize("micro", [0, 1, 7, HIGH - 1])
def test_the_largest_micro_batch_is_the_last_one_whose_peak_fits(micro: int) -> None:
    each = ACTIVATION_BYTES + INPUT_BYTES
    limit = 18 * TOTAL + BUFFER_BYTES + (micro + 1) * each - 1
    found = row("megatron", "zero=stage0", limit + 100, DeviceOverhead(0, 50, 100))
    assert found is not None
    assert (found.micro, found.capped) == (micro, False)
    assert found.activations == max(micro, 1) * ACTIVATION_BYTES


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("megatron", "zero=stage2"),
        ("fsdp2", "zero=stage0"),
        ("deepspeed", "zero=stage1 recompute=by_operation"),
        ("deepspeed", "zero=stage1 loss=tiled"),
        ("megatron", "zero=stage1 precision=fp32"),
    ],
)
def test_settings_that_the_rules_do_not_know_have_no_row(engine: str, words: str) -> None:
    assert row(engine, words) is None


def test_ranks_on_a_cpu_have_what_is_offloaded_in_the_memory_that_they_compute_in() -> None:
    on_device, on_host = (row("fsdp2", f"zero=stage2 offload={where}") for where in ("none", "optimizer_cpu"))
    assert on_device is not None
    assert on_host is not None
    assert on_device.memory.resting == on_host.memory.resting


def test_fsdp2_keeps_the_parameters_of_the_forward_unless_it_gathers_them_again() -> None:
    reshards, keeps = row("fsdp2", "zero=stage3"), row("fsdp2", "zero=stage2")
    assert reshards is not None
    assert keeps is not None
    assert keeps.peak - reshards.peak == 2 * NUMEL * (BLOCKS - 1)
