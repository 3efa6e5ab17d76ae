"""The parts of a result that a training run and an evaluation share, and the facts about the machine."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from orchestrator import wings
from orchestrator.config.schema import RunConfig
from orchestrator.machine.hardware import described_cpu
from orchestrator.machine.processes import output_of
from orchestrator.worker import measure
from orchestrator.worker.accounts import Accounts
from orchestrator.workloads.data import TokenData
from zero_runtime.world import transport


@dataclass(frozen=True)
class RunFacts:
    """What a run is, apart from its readings. `steps`: of the run, with those of the warm-up."""

    config: RunConfig
    runtime: Any
    accounts: Accounts
    data: TokenData
    world: int
    steps: int

    @property
    def parameters(self) -> int:
        return self.accounts.parameters

    @property
    def tokens_per_step(self) -> int:
        return self.config.batch.global_size * self.config.batch.seq


def combined(
    facts: RunFacts, readings: measure.Readings, memory: dict[str, Any], others: float | None, warmup: int
) -> dict[str, Any]:
    """The result of rank 0, without `communication`, `loss` and `checkpoints`. memory: the largest over the ranks."""
    backend, reason = transport()
    config, runtime, data, tokens = facts.config, facts.runtime, facts.data, facts.tokens_per_step
    speed = measure.throughput(readings, tokens, config.batch.global_size, facts.world, warmup)
    machine = environment(runtime.device)
    rates = wings.load(wings.PREDICTED).efficiency(config, speed["tokens_per_second"]["median"], machine["gpu"])
    return {
        "schema": 1,
        "measured_at": time.time(),
        "world": facts.world,
        "device": runtime.device.type,
        "backend": backend,
        "backend_reason": reason,
        "stage": config.zero.stage,
        "precision": config.precision.dtypes.param,
        "model": {"name": config.model.name, "parameters": facts.parameters},
        "data": {
            "name": data.name,
            "hash": data.hash,
            "train_samples": data.train_samples,
            "validation_samples": data.validation_samples,
        },
        "batch": {
            "micro": config.batch.micro,
            "accumulation": config.batch.accumulation,
            "global_size": config.batch.global_size,
            "seq": config.batch.seq,
            "tokens_per_step": tokens,
        },
        "throughput": speed | rates,
        "load": {"others_share": others},
        "phases_ms": measure.phases_ms(readings, warmup),
        "memory": measure.memory(facts.accounts, memory),
        "dtypes": readings.dtypes,
        "steps": facts.steps,
        "skipped_steps": readings.skipped,
        "loss_scale": runtime.scaler.scale,
        "environment": machine,
        **facts.accounts.added(),
    }


def environment(device: torch.device) -> dict[str, Any]:
    """The facts about the machine and the code that a reader of the numbers needs."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "host": platform.node(),
        "cpu": described_cpu(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "threads_per_rank": torch.get_num_threads(),
        "git": _git_commit(),
        "variables": {name: os.environ[name] for name in ("GLIBC_TUNABLES", "OMP_NUM_THREADS") if name in os.environ},
    }


def _git_commit() -> str | None:
    """The commit of this code, with "+" if files differ from it; None outside a checkout."""
    words = ("git", "describe", "--always", "--dirty=+", "--abbrev=10")
    description = output_of(*words, timeout_s=10, folder=Path(__file__).parent)
    return None if description is None else description.strip()
