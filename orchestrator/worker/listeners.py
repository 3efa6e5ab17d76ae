"""What a run does beside its steps, as listeners: objects that are told of a few moments, and live in wings."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestrator import wings

if TYPE_CHECKING:  # the command refuses a fault that never acts, by a wing that has a listener, and imports no torch
    from orchestrator.config.schema import RunConfig
    from orchestrator.launch.rank import RankInfo
    from orchestrator.records.run_record import AttemptPaths
    from orchestrator.rounds.recorded import Round
    from orchestrator.worker.loop import Loop
    from orchestrator.worker.measurement import Measurement
    from orchestrator.worker.result_writer import ResultWriter
    from orchestrator.worker.saving import Saving
    from orchestrator.workloads.data import TokenData
    from zero_runtime.runtime import ZeroRuntime


@dataclass
class RankRun:
    """The parts of one rank's run, for the loop and for listeners. examples: texts that the trained model generated."""

    attempt: AttemptPaths
    config: RunConfig
    rank: RankInfo
    runtime: ZeroRuntime
    data: TokenData
    loop: Loop
    measurement: Measurement
    writer: ResultWriter
    saving: Saving
    examples: list[dict[str, Any]] = field(default_factory=list)


class Listener:
    """Is told of the moments of a run. Every rank has the same listeners, and tells them in the same order."""

    def __init__(self, run: RankRun) -> None:
        self.run = run

    def before_round(self) -> None:
        """A round of measured steps begins now, after the wait for its turn."""

    def after_round(self, one: Round) -> None:
        """The round ended, and the clock of its last step was read. What is set in it is recorded."""

    def before_step(self, step: int) -> None:
        """The clock of this step (from 1) has begun: what is done here is in the step's time."""

    def after_step(self, step: int) -> None:
        """The step was made and its round ended; nothing was saved yet."""

    def at_end(self) -> None:
        """The last step was made, and the peaks were read; the last checkpoint was not saved yet."""

    def add_to(self, result: dict[str, Any]) -> None:
        """All was measured and saved: adds to the result, which is empty on all ranks but 0."""


def listeners_of(run: RankRun) -> list[Listener]:
    """The listeners that the configuration asks for, in the order in which they are told."""
    config = run.config
    asked = {
        "energy": True,
        "fault": bool(os.environ.get(wings.FAULT)),
        "validation": config.measure.validation_batches != 0,
        "examples": config.trains_to_the_end and config.train.examples > 0,
        "profile": config.measure.profile,
        "work": config.engine.counted,
    }
    return [wings.load(wings.LISTENERS[name])(run) for name, is_asked in asked.items() if is_asked]
