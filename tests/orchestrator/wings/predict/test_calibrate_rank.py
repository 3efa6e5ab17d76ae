"""Ranks measure all that a prediction needs, equally on all of them, and stop when the time is over."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import pytest
import torch
from harness.ranks import run_ranks
from points import config_of_line

from orchestrator.wings.predict import activations, memory_cache, shapes, speed
from orchestrator.wings.predict import calibrate_rank as calibrate
from orchestrator.wings.predict.step import Memories
from orchestrator.worker.machine_load import STAT, busy_seconds, usable_cores
from zero_runtime.collectives import Collectives
from zero_runtime.optim.configs import AdamWConfig
from zero_runtime.phase_clock import PhaseClock
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.timing import machine_timer
from zero_runtime.settings import RuntimeSettings

LINE = (
    "model=llama_tiny model.config.num_hidden_layers=2 model.config.hidden_size=32 model.config.intermediate_size=48 "
    "model.config.num_attention_heads=2 model.config.num_key_value_heads=2 precision=fp32 zero=stage2 batch.micro=2 "
    "batch.seq=16 resources.ranks=2 resources.threads=1 resources.device=cpu tracking=none"
)


def quick() -> None:
    """Few sizes and repetitions: what is tested is not how long something takes."""
    calibrate.SIZES[:] = [1 << 10, 1 << 16]
    calibrate.UPDATED[:] = [256, 4096]
    machine_timer.BUDGET_S = machine_timer.BESIDE_S = 0.01
    machine_timer.BUFFERS_BYTES = 1 << 18


def answered(jobs: list[dict[str, Any]], budget_s: float) -> tuple[dict[str, Any], list[str], float | None]:
    quick()
    told: list[str] = []
    calibration = calibrate.Calibration(torch.device("cpu"), None, lambda job, _answer: told.append(job["kind"]))
    return calibration.answers(jobs, budget_s), told, calibration.others_share


def test_what_was_measured_predicts_the_step(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of_line(LINE)
    jobs = list(speed.jobs(config))
    first, second = run_ranks(answered, 2, [job.plain() for job in jobs], 600.0)
    assert first[0] == second[0]
    assert first[1] == ["copies", "links", "update", "segments"]
    assert second[1] == []  # rank 0 tells
    assert first[2] == second[2]
    # Known wherever the system counts the time of its cores.
    assert (first[2] is not None) == bool(sum(busy_seconds(STAT, usable_cores()).values()))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    answers = dict(activations.answers([config])) | {memory_cache.units_key(config): shapes.units_of(config)}
    memory = Memories(answers).of(config)
    assert memory is not None
    assert speed.speed_of(memory, "here") is None  # nothing is known yet
    speed.store("here", [(job, first[0][job.key]) for job in jobs])
    found = speed.speed_of(memory, "here")
    assert found is not None
    assert not found.rough
    assert all(math.isfinite(value) and value >= 0 for value in asdict(found.time).values())
    assert found.time.model_s > 0
    assert found.time.control_s > 0
    assert found.tokens_per_second == pytest.approx(2 * 2 * 16 / found.time.total_s)
    assert speed.missing([config], "here") == jobs  # for the next round
    speed.store("here", [(job, first[0][job.key]) for job in jobs] * (speed.ROUNDS - 1))
    assert speed.missing([config], "here") == []
    assert speed.missing([config], "elsewhere") == jobs


def test_one_rank_has_a_real_step_too(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of_line(f"{LINE} resources.ranks=1 zero=stage0")
    jobs = list(speed.jobs(config))
    [(answers, told, _)] = run_ranks(answered, 1, [job.plain() for job in jobs], 600.0)
    assert told == ["copies", "update", "segments"]
    anchor = answers[jobs[-1].key]["anchor"]
    assert anchor["seconds"] > 0
    assert len(anchor["segments"]) == len(anchor["marks"]) + 1


def updates(sum_s: float) -> list[tuple[float, float]]:
    """The curve of updates of a rank on which a sum over the ranks takes so long."""
    quick()
    machine_timer.Repeated.sum_s = lambda self: sum_s  # type: ignore[method-assign]
    device = torch.device("cpu")
    repeated = machine_timer.Repeated(Collectives(1, PhaseClock(device), None), device)
    settings = [ZeroPlan.from_stage(0), MixedPrecision(), AdamWConfig(), RuntimeSettings()]
    return list(machine_timer.time_updates(repeated, device, *settings, [256]).points)  # type: ignore[arg-type]


def test_the_sum_over_the_ranks_is_no_part_of_an_update() -> None:
    """Predictions count it with the other sums."""
    [[(_, alone)]] = run_ranks(updates, 1, 0.0)
    [[(_, less)]] = run_ranks(updates, 1, 1e3)
    assert alone > 0
    assert less == 0


def test_no_job_begins_after_the_time_is_over() -> None:
    config = config_of_line(LINE)
    jobs = [job.plain() for job in speed.jobs(config)]
    first, _ = run_ranks(answered, 2, jobs, -1.0)
    assert first[:2] == ({}, [])
