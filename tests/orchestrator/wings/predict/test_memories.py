"""What configurations share is computed once, and only what they share."""

from __future__ import annotations

from dataclasses import asdict, replace

from points import config_of_line

from orchestrator.config.schema import Device
from orchestrator.wings.predict.memory_cache import trace_key, units_key
from orchestrator.wings.predict.step import ConfigMemory, Memories, rules_of
from orchestrator.wings.predict.tensor_messages import TensorMessages
from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.memory.activation_count import LinearTrace, Mark, Trace
from zero_runtime.state_bytes import UnitSize

NUMEL = 64
SHAPES = {
    **{"state_bytes": 8.0, "block_numel": 1, "tensor": TensorMessages().plain(), "buffer_bytes": 0},
    "units": [
        {
            **{"name": "h.0", "shapes": [["weight", [NUMEL]]], "trainable": True, "is_root": True, "offloaded": True},
            **{"numel": NUMEL, "precision": asdict(MixedPrecision())},
        }
    ],
}
TRACED = {"linear": LinearTrace.of_one(1, Trace(marks=[(0, Mark.BEFORE_FORWARD, 0), (0, Mark.GRADIENT, 0)])).plain()}


def test_states_that_leave_a_gpu_stay_on_a_cpu_of_the_same_settings() -> None:
    cpu = config_of_line("zero=stage2 precision=fp32 offload=optimizer_cpu resources.device=cpu resources.ranks=1")
    gpu = replace(cpu, resources=replace(cpu.resources, device=Device.cuda))
    answers = {units_key(cpu): SHAPES} | {trace_key([one], 1, 1): TRACED for one in (cpu, gpu)}
    memories = Memories(answers)
    between = [memories.of(one).parts[0].peaks.between_steps for one in (cpu, gpu)]  # type: ignore[union-attr]
    assert between[0] - between[1] == 8 * NUMEL  # the optimizer's states


def test_points_that_differ_in_nothing_that_counts_share_their_peaks_and_others_do_not() -> None:
    line = "zero=stage2 precision=fp32 resources.device=cpu resources.ranks=2"
    first, same, other = (config_of_line(f"{line} {more}") for more in ("", "optimizer.lr=0.1", "zero=stage1"))
    assert first.batch is not same.batch  # which the line leaves open
    assert first.zero is same.zero
    assert first.zero != other.zero
    memories = Memories({units_key(first): SHAPES, trace_key([first], 1, 1): TRACED})
    peaks = [memories.of(one).parts[0].peaks for one in (first, same, other)]  # type: ignore[union-attr]
    assert peaks[0] is peaks[1]
    assert peaks[0].gathers is not peaks[2].gathers
    assert peaks[2] == Memories({units_key(other): SHAPES, trace_key([other], 1, 1): TRACED}).of(other).parts[0].peaks  # type: ignore[union-attr]


def test_the_bytes_sent_in_a_step_are_those_of_the_paper_and_of_the_replicas() -> None:
    for line, elements in (("zero=stage1", 2 * 3 / 4), ("zero=stage3", 3 * 3 / 4), ("zero=stage0", 2 * 3 / 4)):
        assert sent(line) == elements * 4 * NUMEL
    # Three collectives in a group of 2, and an all-reduce of half of the elements over 2 replicas.
    grouped = "zero=stage3 zero.shard_ranks=2"
    assert sent(grouped) == (3 / 2 + 2 * (1 / 2) / 2) * 4 * NUMEL
    # With outer sharding half of that all-reduce in each reduction, and as much in each exchange of parameters.
    outer = f"{grouped} batch.accumulation=3 zero.outer_sharding"
    assert sent(f"{outer}=optim") == (9 / 2 + (3 + 1) * (1 / 2) / 2) * 4 * NUMEL


def sent(line: str) -> int:
    found = config_of_line(f"{line} precision=fp32 resources.device=cpu resources.ranks=4")
    units = [(UnitSize(NUMEL, NUMEL, trainable=True), MixedPrecision())]
    return ConfigMemory(found, units, rules_of(found, {"state_bytes": 8.0}), ()).sent_bytes()
