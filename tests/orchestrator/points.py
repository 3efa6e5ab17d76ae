"""Points for tests of the stub worker, on the CPU and by default without MLflow, and a tiny run of the real worker."""

from __future__ import annotations

from pathlib import Path

from orchestrator.compose import arguments, compose
from orchestrator.config.optimizer import Optimizer
from orchestrator.config.schema import (
    Checkpoint,
    CheckpointKind,
    Data,
    DataKind,
    Device,
    Measure,
    Model,
    ResolvedBatch,
    ResolvedResources,
    RunConfig,
    Tracking,
    TrackingKind,
)
from orchestrator.config.state_groups import Precision, Zero
from orchestrator.machine.hardware import Hardware
from orchestrator.planning.point import Point
from orchestrator.planning.points import checked_points
from orchestrator.planning.rules.scene import Scene
from zero_runtime.precision import MixedPrecision

STUB = "stub_worker:run_rank"
LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
# The command line of one small run of the real worker.
TINY = (
    "model=llama_tiny data=synthetic zero=stage1 precision=fp32 tracking=none resources.device=cpu resources.ranks=1 "
    "resources.threads=1 batch.seq=16 batch.micro=1 measure.validation_batches=0 measure.warmup_steps=1 "
    "measure.steps=1 output=out"
)


def make_config(
    output: Path, *, stage: int = 2, limit_min: float = 1.0, tracking: TrackingKind = TrackingKind.none
) -> RunConfig:
    return RunConfig(
        model=Model("tiny", "llama", {"hidden_size": 64}),
        output=str(output),
        zero=Zero(stage=stage),
        batch=ResolvedBatch(micro=4, accumulation=2, global_size=16, seq=128),
        resources=ResolvedResources(Device.cpu, ranks=2, threads=1, time_limit_min=limit_min),
        measure=Measure(warmup_steps=2, steps=4),
        tracking=Tracking(tracking),
    )


def make_point(config: RunConfig) -> Point:
    return Point(f"stage{config.zero.stage}-bf16", config, (f"zero=stage{config.zero.stage}", "precision=bf16"))


def config_of(steps: int, *, every: int | None, stage: int = 2, resume: str = "auto", ranks: int = 2) -> RunConfig:
    """The configuration of a run of the real worker: a model of two tiny blocks, in fp32."""
    return RunConfig(
        model=Model("tiny", "llama", LLAMA),
        data=Data(DataKind.synthetic),
        zero=Zero(stage=stage),
        precision=Precision(MixedPrecision(), compute="fp32"),
        batch=ResolvedBatch(micro=1, accumulation=1, global_size=ranks, seq=16),
        resources=ResolvedResources(Device.cpu, ranks=ranks, threads=1),
        measure=Measure(warmup_steps=2, steps=steps - 2, validation_batches=1),
        optimizer=Optimizer(),
        checkpoint=Checkpoint(CheckpointKind.sharded, every=every, resume=resume),
    )


def config_of_line(line: str) -> RunConfig:
    """The resolved configuration of a command line, on a machine with four cores."""
    found, problems = checked_points(compose.compose(arguments.split(line.split())), Scene(Hardware(4, "cpu")))
    assert problems == []
    return found[0].config
