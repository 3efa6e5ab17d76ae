"""Rank 0's account of a run: its events while it goes on, and result.json at the end."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from orchestrator import wings
from orchestrator.config.schema import RunConfig
from orchestrator.launch.rank import RankInfo
from orchestrator.records.record_file import EventAppender, write_json_atomic
from orchestrator.records.run_record import AttemptPaths
from orchestrator.worker import measure
from orchestrator.worker.measurement import Measurement
from orchestrator.worker.result import RunFacts, combined
from orchestrator.worker.saving import Reached, Saving
from orchestrator.worker.setup import TrainingSetup, refuse_different_data
from orchestrator.workloads.data import TokenData
from zero_runtime.census import storage_bytes
from zero_runtime.step_report import StepReport


class ResultWriter:
    """Writes events and the result. All ranks must make the same calls; ranks other than 0 write nothing.

    steps: of the whole run.
    """

    def __init__(
        self,
        attempt: AttemptPaths,
        config: RunConfig,
        rank: RankInfo,
        built: TrainingSetup,
        data: TokenData,
        steps: int,
    ) -> None:
        self._attempt, self._config, self._data, self._rank = attempt, config, data, rank
        self._runtime, self._kept = built.runtime, built.recomputation.memory
        self._events = EventAppender(attempt.metrics)
        self._training: dict[str, Any] | None = None
        self.facts = RunFacts(config, built.runtime, built.accounts, data, rank.world, steps)

    # ---- events ------------------------------------------------------------------------------------------------

    def tell(self, event: str, **values: Any) -> None:
        """Records an event. An OSError ends the run, as on a full disk."""
        # A write takes about 0.1 ms. On a GPU the step's event comes when the host has issued the next backward, so the
        # device does not wait for it.
        if self._rank.rank == 0:
            self._events.append({"event": event, "time": time.time(), **values})

    def tell_ready(self, **more: Any) -> None:
        """The model is built. ValueError if the ranks read different data."""
        refuse_different_data(self._runtime.collectives, self._data.hash)
        self.tell(
            "ready",
            parameters=self.facts.parameters,
            data_hash=self._data.hash,
            predicted=self.facts.accounts.states({}) | self._planned(),
            **wings.load(wings.USAGE)(self._runtime.device, peak=False),
            **more,
        )

    def _planned(self) -> dict[str, Any]:
        if self._rank.rank != 0 or not self._runtime.trains:
            return {}
        found: dict[str, Any] = wings.load(wings.PREDICTED).planned(self._config)
        return found

    def warning(self) -> str | None:
        """What a user should know of this run before its first step."""
        return "; ".join(self._data.notes) or None

    def tell_step(self, step: int, report: StepReport, lr: float | None, seconds: float, *, warmup: bool) -> None:
        """The event of a step (from 1) that took so many seconds."""
        if self._rank.rank != 0:
            return  # before the memory is read, which takes a system call
        self.tell(
            "step",
            step=step,
            warmup=warmup,
            **({"of": self.facts.steps} if self._config.trains_to_the_end else {}),
            loss=report.loss,
            grad_norm=report.grad_norm if math.isfinite(report.grad_norm) else None,
            skipped=report.skipped,
            loss_scale=report.loss_scale,
            lr=lr,
            step_ms=seconds * 1e3,
            tokens_per_second=self.facts.tokens_per_step / seconds,
            **wings.load(wings.USAGE)(self._runtime.device),
        )

    def tell_validation(self, saving: Saving, step: int, loss: float, **more: bool) -> None:
        """The event of a validation, unless the record has it from an earlier attempt."""
        if step not in saving.validations:
            saving.validations[step] = loss
            self.tell("validation", step=step, loss=loss, **more)

    # ---- the result --------------------------------------------------------------------------------------------

    def conclude_training(self, saving: Saving, progress: Reached, examples: list[dict[str, Any]]) -> None:
        """Notes how far a training came that went to its end."""
        samples = progress.samples
        self._training = {
            # Those that were asked for: a last step is filled up from the next pass.
            "epochs": min(samples / self._data.train_samples, self._config.train.epochs or math.inf),
            "tokens": samples * self._config.batch.seq,
            "learned_tokens": self._data.learned_tokens(samples),
            "validations": len(saving.validations),
            "best": saving.best_facts(),
            "last_checkpoint": saving.folder_of(progress.step),
            "examples": examples,
        }

    def memory(self, readings: measure.Readings) -> dict[str, Any]:
        """The largest numbers of bytes over the ranks. A collective."""
        assert readings.census is not None
        local = {
            **asdict(readings.census),
            # Slots of a scratch file are first needed in an update, and the census may be before the first one.
            "host": max(readings.census.host, storage_bytes(self.facts.accounts.held().host)),
            "activations_bytes": readings.activations_bytes,
            "activations_host_bytes": 0 if self._kept is None else self._kept.nbytes,
            **(readings.peaks or measure.peaks(self._runtime.device)),
        }
        return measure.worst_of(self._runtime.collectives.gather_objects(local))

    def result(self, measurement: Measurement, saving: Saving, first: int) -> dict[str, Any]:
        """Everything measured so far, of a run from step `first`. Rank 0 combines the readings of all ranks; other
        ranks get an empty dict. A collective."""
        memory = self.memory(measurement.readings)
        measurement.readings.rounds = measurement.rounds.found
        return self._combined(measurement, memory, saving, first) if self._rank.rank == 0 else {}

    def _combined(
        self, measurement: Measurement, memory: Mapping[str, Any], saving: Saving, first: int
    ) -> dict[str, Any]:
        readings, rounds, missing = measurement.readings, measurement.rounds, saving.missing_steps
        finite = [loss for loss in readings.losses if math.isfinite(loss)]
        return (
            combined(self.facts, readings, dict(memory), rounds.others_share(), measurement.warmup_steps)
            | rounds.to_dict()
            | {
                "communication": self.facts.accounts.communication(readings.ledger),
                "loss": {
                    # A resumed run whose earlier record lacks step 1 knows no first loss.
                    "first": None if missing and missing[0][0] == 1 else finite[0],
                    "last": finite[-1],
                    "validation": readings.validation_loss,
                    "missing_steps": missing,
                },
                "checkpoints": saving.facts(first),
            }
            | ({} if self._training is None else {"training": self._training})
        )

    def write(self, result: dict[str, Any], saving: Saving, validation_loss: float | None) -> None:
        """Writes result.json and the last event. Other ranks do nothing."""
        if self._rank.rank != 0:
            return
        if validation_loss is not None:  # of an earlier attempt that ended before it recorded it
            self.tell_validation(saving, self.facts.steps, validation_loss)
        write_json_atomic(self._attempt.result, result)  # first without: counting may take long, or fail
        # Only after the peaks are measured: they would include the memory that counting takes.
        result["memory"] |= wings.load(wings.PREDICTED).known(self._config)
        write_json_atomic(self._attempt.result, result)
        self.tell("finish")
