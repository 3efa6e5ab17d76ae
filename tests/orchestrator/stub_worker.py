"""A worker without torch that writes the events and the result of a real one, and fails where a test asks for it."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import stub_distributed

from orchestrator.config.schema import RunConfig, from_dict
from orchestrator.launch.rank import RankInfo
from orchestrator.machine.hardware import described_cpu
from orchestrator.machine.provenance import version_of
from orchestrator.records import turns
from orchestrator.records.record_file import append_event, read_json, write_json_atomic
from orchestrator.records.run_record import AttemptPaths
from orchestrator.wings.faults import Faults
from orchestrator.worker.rounds import MeasuredRounds
from zero_runtime.errors import RankError, RankMemoryError


def run_rank(attempt: AttemptPaths, rank: RankInfo) -> None:
    turns.LOOK_S = 0.02  # how often a rank looks for its turn is no promise, and waiting is idle
    config = from_dict(read_json(attempt.config) or {})
    write_environment(attempt.root, rank.rank)
    print(f"rank {rank.rank} of {rank.world} is here")
    if str(config.zero.stage) == os.environ.get("STUB_FAILING_STAGE"):
        raise RuntimeError(f"stage {config.zero.stage} was told to fail")
    if str(config.batch.micro) == os.environ.get("STUB_LACKING_MICRO"):
        facts: dict[str, object] = {"phase": "forward", "step": 1, "unit": "", "wanted": None, "held": {}}
        raise RankMemoryError(f"rank {rank.rank}: out of memory in forward of step 1", rank.rank, facts, on_host=False)
    if str(config.batch.micro) == os.environ.get("STUB_ODD_MICRO"):
        raise RuntimeError("an error of its own")
    if os.environ.get("STUB_ENDED_BY_WATCH"):  # rank 1 fails, and rank 0 is in a collective that nothing interrupts
        if rank.rank == 1:
            raise RuntimeError("rank 1 was told to fail")
        assert rank.on_end is not None
        rank.on_end(RankError("rank 1 failed", (1,)))
        os._exit(1)
    faults = Faults.from_env()
    if rank.rank == 0:
        append_event(attempt.metrics, {"event": "ready", "parameters": 1_200_000, "data_hash": "c0ffee"})
    warmup, steps = config.measure.warmup_steps, config.measure.warmup_steps + config.measure.steps
    steps_s: list[float] = []
    rounds = measured_rounds(attempt, config, rank, steps_s)
    steps = rounds.divide(warmup, steps)
    for step in range(1, steps + 1):
        if rounds.begins(step - 1):
            rounds.begin()
        faults.at_step(step, rank.rank)
        stub_distributed.barrier(attempt.root, f"step{step}", rank.rank, rank.world)
        time.sleep(float(os.environ.get("STUB_STEP_S", "0.01")))
        if rank.rank == 0:
            append_event(attempt.metrics, step_event(step, warmup))
        steps_s.append(0.1088)
        if (number := rounds.ends(step - 1)) is not None:
            rounds.end(number)
    if rank.rank == 0:
        append_event(attempt.metrics, {"event": "validation", "step": steps, "loss": 5.3})
        append_event(attempt.metrics, {"event": "finish"})
        result = make_result(config, 9412.0 + 100 * config.zero.stage**2)
        write_json_atomic(attempt.result, result | rounds.to_dict())


def measured_rounds(attempt: AttemptPaths, config: RunConfig, rank: RankInfo, steps_s: list[float]) -> MeasuredRounds:
    """The rounds of a rank. The load is unknown, so that no round is measured again."""

    def tell(event: str, **values: Any) -> None:
        if rank.rank == 0:
            append_event(attempt.metrics, {"event": event, **values})

    return MeasuredRounds(attempt, config.measure, steps_s, lambda used: [used._replace(busy_s={})], tell, lambda: None)


def step_event(step: int, warmup: int) -> dict[str, Any]:
    speed = {"tokens_per_second": 9400.0 + step, "step_ms": 108.0, "memory_mib": 512.0, "memory_kind": "rss"}
    loss = {"loss": 6.0 - 0.01 * step, "lr": 1e-3, "grad_norm": 1.5}
    return {"event": "step", "step": step, "warmup": step <= warmup, **loss, **speed}


def write_environment(folder: Path, rank: int) -> None:
    """Records the environment that the process was started with, which the allocator read, and the rank's place."""
    whole = Path("/proc/self/environ").read_bytes().decode()
    at_exec = dict(word.split("=", 1) for word in whole.split("\0") if "=" in word)
    facts: dict[str, object] = {
        "whole": whole,
        "at_exec": at_exec,
        "rank": os.environ["RANK"],
        "world": os.environ["WORLD_SIZE"],
    }
    facts["local_rank"] = os.environ["LOCAL_RANK"]
    (folder / f"environment{rank}.json").write_text(json.dumps(facts))


def make_result(config: RunConfig, median: float = 9412.0) -> dict[str, Any]:
    world, batch = config.resources.ranks or 1, config.batch
    return {
        "schema": 1,
        "label": "stub",
        "world": world,
        "device": "cpu",
        "backend": "gloo",
        "stage": config.zero.stage,
        "precision": config.precision.dtypes.param,
        "model": {"name": config.model.name, "parameters": 1_200_000},
        "data": {"name": "stdlib", "hash": "c0ffee", "train_samples": 81234, "validation_samples": 4275},
        "batch": {
            "micro": batch.micro,
            "accumulation": batch.accumulation,
            "global_size": batch.global_size,
            "seq": batch.seq,
            "tokens_per_step": (batch.global_size or 0) * batch.seq,
        },
        "throughput": {
            "tokens_per_second": {"median": median, "p10": median * 0.98, "p90": median * 1.01},
            "tokens_per_second_per_rank": median / world,
            "samples_per_second": median / batch.seq,
            "step_ms": {"median": 108.8, "p10": 107.5, "p90": 111.0},
            "steps_counted": config.measure.steps,
            "warmup_steps": config.measure.warmup_steps,
        },
        "phases_ms": {
            "data": 0.9,
            "forward": 33.1,
            "backward": 61.0,
            "communication_exposed": 9.4,
            "optimizer": 4.4,
        },
        "memory": _memory(),
        "communication": _communication(),
        "loss": {"first": 5.5712, "last": 4.9018, "validation": 5.3},
        "steps": config.steps(81234),
        "environment": {
            "torch": version_of("torch"),
            "python": platform.python_version(),
            "host": "box",
            "cpu": described_cpu(),
            "gpu": None,
            "git": "abc",
        },
    }


def _memory() -> dict[str, Any]:
    state = {"predicted_bytes": 2_400_000, "measured_bytes": 2_400_000}
    return {
        "states": [
            {"component": "params", **state},
            {"component": "grads", "predicted_bytes": 1_200_000, "measured_bytes": 1_300_000},
            {"component": "optimizer", "predicted_bytes": 7_200_000, "measured_bytes": 7_200_000},
        ],
        "formula": "2Ψ + 16Ψ/N",
        "padding_bytes": 1024,
        "other_tensors_bytes": 65536,
        "activations_bytes": 14_000_000,
        "peak_rss_bytes": 641_000_000,
        "peak_allocated_bytes": None,
        "peak_reserved_bytes": None,
    }


def _communication() -> dict[str, Any]:
    sent = {"calls": 6, "elements": 600_000, "bytes": 1_200_000}
    return {
        "data": {
            "all_gather": sent,
            "reduce_scatter": dict(sent, bytes=2_400_000),
            "all_reduce": {"calls": 0, "elements": 0, "bytes": 0},
        },
        "theory_elements": 1_199_800,
        "padding_elements": 200,
        "theory": "2Ψ·(N-1)/N",
        "control_bytes": 48,
    }
