"""`zlab calibrate`: measures on this machine what predicted step times are made from. At most two minutes."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from orchestrator.config.schema import RunConfig, to_dict
from orchestrator.launch import local_executor
from orchestrator.launch import verdict as watching
from orchestrator.machine import slots
from orchestrator.machine.processes import signals_interrupt
from orchestrator.plan import speed
from orchestrator.plan.speed import Job
from orchestrator.records.record_file import EventTail, require_json, write_json_atomic
from orchestrator.records.run_record import AttemptPaths
from orchestrator.records.run_state import RunState

ENTRY = "orchestrator.worker.calibrate:run_rank"
BUDGET_S = 100.0  # of measuring; the start of the ranks takes the rest of two minutes
LOOK_S = 0.2
LIMIT_S = 600.0


class CalibrationError(RuntimeError):
    """The ranks that measure have failed; the message says why."""


def measure(jobs: Sequence[Job], hardware: str, told: Callable[[str], None], budget_s: float = BUDGET_S) -> int:
    """Measures the jobs, with one start of ranks for each number of ranks and threads. Keeps the answers; returns how
    many there are. Call it from the main thread."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        groups.setdefault(json.dumps(speed.place_of(job.config), sort_keys=True), []).append(job)
    done = 0
    for group in groups.values():
        began = time.monotonic()
        answers = _measured(group, told, budget_s)
        speed.store(hardware, answers)
        done += len(answers)
        budget_s -= time.monotonic() - began
    return done


def _measured(group: Sequence[Job], told: Callable[[str], None], budget_s: float) -> dict[str, Any]:
    config = group[0].config
    folder = Path(tempfile.mkdtemp(prefix="zlab-calibrate-"))
    try:
        paths = AttemptPaths(folder / "attempt")
        paths.root.mkdir()
        write_json_atomic(paths.config, to_dict(config))
        write_json_atomic(
            paths.root / "calibration.json", {"budget_s": budget_s, "jobs": [job.plain() for job in group]}
        )
        with signals_interrupt(), _slots(config, told) as lease:
            return _answers(paths, config, lease.gpus, len(group), told)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _answers(
    paths: AttemptPaths, config: RunConfig, gpus: Sequence[str] | None, count: int, told: Callable[[str], None]
) -> dict[str, Any]:
    """Starts the ranks and waits for their answers. However it ends, none of their processes is left."""
    job = local_executor.submit(paths, config, ENTRY, gpus)
    try:
        watch = watching.Watch(paths, config.resources.ranks or 1, LIMIT_S, job.controller_alive)
        tail, measured = EventTail(paths.metrics), 0
        while True:
            verdict = watch.look()
            if new := len(tail.read_new()):
                measured += new
                told(f"measured {measured} of {count}")
            if verdict is not None:
                break
            time.sleep(LOOK_S)
    finally:
        job.end()
    if verdict.state is not RunState.ok:
        raise CalibrationError(verdict.message)
    answers: dict[str, Any] = require_json(paths.result)["answers"]
    return answers


def _slots(config: RunConfig, told: Callable[[str], None]) -> slots.Lease:
    pool, wanted = slots.pool_of(config.resources.device), slots.wanted(config.resources)
    lease = pool.take(wanted)
    if lease is None:
        told(f"waiting for slots that another command holds: {'; '.join(pool.holders())}")
    while lease is None:
        time.sleep(LOOK_S)
        lease = pool.take(wanted)
    return lease
