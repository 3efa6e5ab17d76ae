"""Ranks on this machine that answer one question and leave no record: in a folder that is removed at the end."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.config.schema import RunConfig, to_dict
from orchestrator.launch import local_executor
from orchestrator.launch.local_run import waited_slots
from orchestrator.launch.verdict import Watch
from orchestrator.machine.interfaces import check_meeting_place
from orchestrator.machine.processes import signals_interrupt
from orchestrator.records.record_file import EventTail, require_json, write_json_atomic
from orchestrator.records.run_record import AttemptPaths
from orchestrator.records.run_state import RunState

LOOK_S = 0.2


class RanksFailed(RuntimeError):
    """The ranks have failed; the message says why. lacked_memory: whether they were out of memory."""

    def __init__(self, message: str, *, lacked_memory: bool = False) -> None:
        super().__init__(message)
        self.lacked_memory = lacked_memory


def run(
    config: RunConfig,
    entry: str,
    asked: Mapping[str, Any],
    told: Callable[[str], None],
    on_events: Callable[[Sequence[dict[str, Any]]], None],
    *,
    limit_s: float,
) -> dict[str, Any]:
    """The result.json of ranks that run `entry`. Call it from the main thread; it waits for free slots.

    asked: documents that the ranks read, by file name. on_events: called with the new events. RanksFailed if
    a rank fails, OSError if they could not meet. However it ends, none of their processes is left.
    """
    check_meeting_place(os.environ)
    folder = Path(tempfile.mkdtemp(prefix="zlab-ranks-"))
    try:
        paths = AttemptPaths(folder / "attempt")
        paths.root.mkdir()
        write_json_atomic(paths.config, to_dict(config))
        for name, document in asked.items():
            write_json_atomic(paths.root / name, document)
        with signals_interrupt(), waited_slots(config, told) as lease:
            job = local_executor.submit(paths, config, entry, lease.gpus)
            try:
                _await(Watch(paths, config.resources.ranks, limit_s, job.controller_alive), paths, on_events)
            finally:
                job.end()
            return require_json(paths.result)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _await(watch: Watch, paths: AttemptPaths, on_events: Callable[[Sequence[dict[str, Any]]], None]) -> None:
    tail = EventTail(paths.metrics)
    while True:
        verdict = watch.look()
        if new := tail.read_new():
            on_events(new)
        if verdict is not None:
            break
        time.sleep(LOOK_S)
    if verdict.state is not RunState.ok:
        raise RanksFailed(verdict.message, lacked_memory=verdict.state in (RunState.oom, RunState.oom_host))
