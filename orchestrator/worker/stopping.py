"""Signals that ask a run to stop: a rank records its signal, and all ranks stop together (StepReport.stop)."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

from orchestrator.config.cluster import ClusterKind
from orchestrator.config.schema import CheckpointKind, RunConfig
from orchestrator.launch.rank import STOP_SIGNAL
from zero_runtime.process_identity import own_age_s

# SLURM may send a job's signal this much before the requested time, and the process starts a little after the job.
EARLY_S = 60.0
LATE_START_S = 15.0


class StopSignals:
    """Whether one rank wants training to stop.

    A run that saves checkpoints stops for every signal. A run that saves nothing gains nothing from stopping before its
    time limit and continues; the steps that it does not reach are lost either way, and a requeued run would start from
    the beginning and meet the limit again. Other requests, such as a preemption, stop it and it is requeued, since the
    next try may not be interrupted.
    """

    @classmethod
    def of(cls, config: RunConfig) -> StopSignals | None:
        """Installs the handlers. None for a local run that saves nothing: its steps do not ask whether to stop."""
        if config.checkpoint.kind is CheckpointKind.none and config.cluster.kind is not ClusterKind.slurm:
            return None
        signals = cls(config)
        for number in (STOP_SIGNAL, signal.SIGTERM):
            signal.signal(number, signals.note)
        return signals

    def __init__(self, config: RunConfig) -> None:
        self._saves = config.checkpoint.kind is not CheckpointKind.none
        limit_s = 60 * config.resources.time_limit_min
        self._near_limit_s = limit_s - config.cluster.signal_delay_s - EARLY_S - LATE_START_S
        self._began = time.monotonic() - own_age_s()  # unaffected by changes of the system clock
        self._asked = False

    def asked(self) -> bool:
        return self._asked

    def note(self, number: int, frame: FrameType | None = None) -> None:
        """The signal handler: only sets a flag and logs one line, since it runs between any two instructions."""
        name = signal.Signals(number).name
        if number == STOP_SIGNAL and not self._saves and time.monotonic() - self._began >= self._near_limit_s:
            _say(f"{name}: the time limit is near; nothing could be saved (checkpoint=none), so the run continues")
            return
        self._asked = True
        _say(f"{name}: asked to stop")


def _say(text: str) -> None:
    os.write(2, f"{text}\n".encode())  # print is not safe in a handler
