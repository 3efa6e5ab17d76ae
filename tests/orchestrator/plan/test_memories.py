"""What configurations share is computed once, and only what they share."""

from __future__ import annotations

from dataclasses import asdict, replace

from orchestrator.compose import arguments, compose
from orchestrator.config.schema import Device, RunConfig
from orchestrator.machine.hardware import Hardware
from orchestrator.plan.memory_cache import trace_key, units_key
from orchestrator.plan.points import checked_points
from orchestrator.plan.rules.scene import Scene
from orchestrator.plan.step import Memories
from zero_runtime.memory.activation_count import LinearTrace, Mark, Trace
from zero_runtime.precision import MixedPrecision

NUMEL = 64


def config(line: str) -> RunConfig:
    found, problems = checked_points(compose.compose(arguments.split(line.split())), Scene(Hardware(4, "cpu")))
    assert problems == []
    return found[0].config


def test_states_that_leave_a_gpu_stay_on_a_cpu_of_the_same_settings() -> None:
    cpu = config("zero=stage2 precision=fp32 offload=optimizer_cpu resources.device=cpu resources.ranks=1")
    gpu = replace(cpu, resources=replace(cpu.resources, device=Device.cuda))
    unit = {"name": "h.0", "shapes": [["weight", [NUMEL]]], "trainable": True, "is_root": True, "offloaded": True}
    shapes = {"units": [unit | {"precision": asdict(MixedPrecision())}], "state_bytes": 8.0, "block_numel": 1}
    linear = LinearTrace.of_one(1, Trace(marks=[(0, Mark.BEFORE_FORWARD, 0), (0, Mark.GRADIENT, 0)])).plain()
    answers = {units_key(cpu): shapes | {"buffer_bytes": 0}} | {trace_key(one, 1, 1): linear for one in (cpu, gpu)}
    memories = Memories(answers)
    between = [memories.of(one).parts[0].states.between_steps for one in (cpu, gpu)]  # type: ignore[union-attr]
    assert between[0] - between[1] == 8 * NUMEL  # the optimizer's states
