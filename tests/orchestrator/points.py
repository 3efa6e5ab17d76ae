"""Points for tests that run the stub worker: small, on the CPU, without MLflow unless asked for."""

from __future__ import annotations

from pathlib import Path

from orchestrator.config.schema import Batch, Device, Measure, Model, Resources, RunConfig, Tracking, TrackingKind
from orchestrator.config.state_groups import Zero
from orchestrator.plan.point import Point

STUB = "stub_worker:run_rank"


def make_config(
    output: Path, *, stage: int = 2, limit_min: float = 1.0, tracking: TrackingKind = TrackingKind.none
) -> RunConfig:
    return RunConfig(
        model=Model("tiny", "llama", {"hidden_size": 64}),
        output=str(output),
        zero=Zero(stage=stage),
        batch=Batch(micro=4, accumulation=2, global_size=16, seq=128),
        resources=Resources(Device.cpu, ranks=2, threads=1, time_limit_min=limit_min),
        measure=Measure(warmup_steps=2, steps=4),
        tracking=Tracking(tracking),
    )


def make_point(config: RunConfig) -> Point:
    return Point(f"stage{config.zero.stage}-bf16", config, (f"zero=stage{config.zero.stage}", "precision=bf16"))
