"""Checkpoints of one rank of a run: when they are saved, and what a resumed run goes on from."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.config.schema import AdapterKind, CheckpointKind, RunConfig, WeightsExport, to_dict
from orchestrator.records.record_file import EventTail, append_event, read_or_warn
from orchestrator.records.run_record import AttemptPaths
from orchestrator.text.units import spans
from orchestrator.workloads.companions import write_companions
from zero_runtime.checkpoint.background import BackgroundSaver
from zero_runtime.checkpoint.foreign.formats import foreign_reader
from zero_runtime.checkpoint.foreign.source import ForeignCheckpoint, load_foreign
from zero_runtime.checkpoint.hugging_face.gathered import save_gathered_weights
from zero_runtime.checkpoint.load import CheckpointReader, load_checkpoint
from zero_runtime.checkpoint.retention import Retention, Skipped, clear_leftovers, newest_good_together, open_together
from zero_runtime.checkpoint.save import SaveSettings
from zero_runtime.dtypes import TORCH_DTYPE
from zero_runtime.errors import CheckpointError
from zero_runtime.runtime import ZeroRuntime

AUTO, NONE = "auto", "none"


@dataclass
class Progress:
    """How far training has come; `samples` is the position in the data, whatever the global batch was."""

    step: int = 0
    samples: int = 0


class Saving:
    """Saves when it is due and once at the end; all ranks call it alike."""

    def __init__(
        self, attempt: AttemptPaths, config: RunConfig, runtime: ZeroRuntime, data_hash: str, *, restarted: bool = False
    ) -> None:
        self._attempt = attempt
        self._config = config.checkpoint
        self._steps = config.measure.warmup_steps + config.measure.steps
        self._run = to_dict(config)
        self._runtime = runtime
        self._data_hash = data_hash
        self._contents: dict[str, str] = (read_or_warn(attempt.state) or {}).get("contents") or {}
        self._restarted = restarted
        self._rank = runtime.collectives.rank
        retention = Retention(config.checkpoint.keep_last, config.checkpoint.keep_every)
        # A base that lies in a folder of its own is not written again with every checkpoint of its adapters.
        with_frozen = config.adapter.kind is AdapterKind.none or config.model.path is None
        settings = SaveSettings(retention=retention, with_frozen=with_frozen)
        self._saver = BackgroundSaver(attempt.checkpoints, settings)
        self._last = 0  # step of the last save
        self._stalls_s: list[float] = []
        self.first_update = 0  # updates that another library had made before this run began
        self.curve: list[float] = []  # losses of the steps before the one that it goes on from, on rank 0
        self.missing_steps: list[list[int]] = []  # first and last of each row of steps that the curve lacks
        self.earlier_result: dict[str, Any] | None = None  # of a run that made and saved every step of this one

    # ---- going on ----------------------------------------------------------------------------------------------

    def resume(self) -> Progress:
        """Fill the runtime from the checkpoint that the configuration names, if any, and tell how far it had come."""
        if self._rank == 0:
            clear_leftovers(self._attempt.checkpoints)
        checkpoint = self._own() if self._restarted else None
        if checkpoint is None:
            reader = None if self._config.resume in (AUTO, NONE) else foreign_reader(Path(self._config.resume))
            if reader is not None:
                return self._take_over(reader)
            checkpoint = self._chosen()
        if checkpoint is None:
            return Progress()
        trainer = checkpoint.index.trainer
        progress = Progress(trainer["step"], trainer["samples"])
        self._check_data(checkpoint.path, trainer)
        if progress.step >= self._steps:
            self.earlier_result = self._result_in(checkpoint.path, trainer)
        load_checkpoint(self._runtime, checkpoint)
        self.first_update = trainer.get("first_update", 0)
        self._last = progress.step
        if self._rank == 0:
            metrics = Path(trainer["metrics"])
            self._continue_curve(metrics, progress.step)
            lacking = {"missing_steps": self.missing_steps, "metrics": str(metrics)} if self.missing_steps else {}
            self._tell("resumed", step=progress.step, path=str(checkpoint.path), **lacking)
        return progress

    def _take_over(self, reader: Callable[[Iterable[str]], ForeignCheckpoint]) -> Progress:
        """Another library's states; steps, data and schedule begin anew, since it knows nothing of ours."""
        found = load_foreign(self._runtime, reader)
        self.first_update = self._runtime.updates
        if self._rank == 0:
            self._tell("resumed", step=0, path=str(found.path), kind=found.kind, updates=found.updates)
        return Progress()

    def _check_data(self, path: Path, trainer: Mapping[str, Any]) -> None:
        """What makes no sense to go on from is refused before anything is read."""
        if trainer["data_hash"] != self._data_hash:
            raise CheckpointError(
                f"{path}: expected the data that it was trained on (hash {trainer['data_hash']}), found hash "
                f"{self._data_hash}; give the same data group and batch.seq, or checkpoint.resume=none"
            )
        began_with = (trainer.get("contents") or {}).get("model")
        if path.parent == self._attempt.checkpoints and began_with not in (None, self._contents.get("model")):
            raise CheckpointError(
                f"{path}: expected the weights that it began with in {self._run['model']['path']}, found that they "
                "changed since; give the same weights, or checkpoint.resume=none"
            )

    def _result_in(self, path: Path, trainer: Mapping[str, Any]) -> dict[str, Any]:
        """What was measured by the run that saved its last step here, where that run is this one or one like it."""
        is_own = path.parent == self._attempt.checkpoints
        if trainer["step"] > self._steps or not is_own or "result" not in trainer:
            raise CheckpointError(
                f"{path}: expected a checkpoint from before the last step, {self._steps}, found step "
                f"{trainer['step']}: nothing is left to train; give more measure.steps, or checkpoint.resume=none to "
                "start anew"
            )
        found: dict[str, Any] = trainer["result"]
        told = found["checkpoints"]
        # It could not count itself.
        saved = {
            "saved": told["saved"] + 1,
            "folder": str(path.parent),
            "measured_by": str(Path(trainer["metrics"]).parent),
        }
        return {**found, "checkpoints": {**told, **saved, "weights": self._weights_folder()}}

    def _own(self) -> CheckpointReader | None:
        """What this attempt saved before its job was put back into the queue, whatever `resume` says of others'."""
        found = newest_good_together(self._runtime.collectives, self._attempt.checkpoints, self._tell_passed_over)
        return found if found is not None and found.index.trainer["metrics"] == str(self._attempt.metrics) else None

    def _chosen(self) -> CheckpointReader | None:
        resume = self._config.resume
        if resume == NONE:
            return None
        collectives = self._runtime.collectives
        if resume != AUTO:
            return open_together(collectives, resume)
        return newest_good_together(collectives, self._attempt.checkpoints, self._tell_passed_over)

    def _tell_passed_over(self, one: Skipped) -> None:
        self._tell("passed_over", path=str(one.path), why=one.why)

    def _continue_curve(self, metrics: Path, step: int) -> None:
        """The learning curve up to the checkpoint goes on in this attempt's record, marked as an earlier attempt's.

        A job that was killed and put back into the queue has told some steps twice: the last telling counts. Steps
        whose lines are lost or cannot be believed are `missing_steps`.
        """
        steps = {
            event["step"]: event
            for event in EventTail(metrics).read_new()
            if event["event"] == "step" and 1 <= event["step"] <= step
        }
        self.missing_steps = spans(number for number in range(1, step + 1) if number not in steps)
        for event in (steps[number] for number in sorted(steps)):
            if metrics != self._attempt.metrics:
                append_event(self._attempt.metrics, {**event, "earlier": True})
            self.curve.append(event["loss"])

    # ---- saving ------------------------------------------------------------------------------------------------

    def after_step(self, progress: Progress) -> None:
        """Save where `every` says so; the last step's is saved by `finish`, which has a result to put in."""
        every = self._config.every
        if every is not None and progress.step % every == 0 and progress.step < self._steps:
            self._save(progress)

    def stop(self, progress: Progress) -> bool:
        """The state is saved and on the disk; False where the run saves nothing."""
        if progress.step > self._last:
            self._save(progress)
        self._saver.wait(self._runtime)
        return self._config.kind is not CheckpointKind.none

    def finish(self, progress: Progress, result: Callable[[], dict[str, Any]]) -> None:
        """The last state is saved with the result, so that an end before that is written loses no number; and
        everything is on the disk. `result`: a collective; every rank calls it where there is something to save."""
        if self._config.kind is not CheckpointKind.none:
            self._save(progress, {"result": json.loads(json.dumps(result()), parse_constant=lambda _: None)})
        self._saver.wait(self._runtime)
        self.write_weights()

    def write_weights(self) -> None:
        """The trained weights as a Hugging Face folder, where it is asked for."""
        dtype = str(self._config.weights)
        if self._config.weights is WeightsExport.none:
            return
        save_gathered_weights(self._runtime, self._attempt.weights, dtype=TORCH_DTYPE[dtype])
        if self._rank == 0:
            write_companions(self._attempt.weights, self._run, dtype)

    def _weights_folder(self) -> str | None:
        return str(self._attempt.weights) if self._config.weights is not WeightsExport.none else None

    def _save(self, progress: Progress, more: Mapping[str, Any] | None = None) -> None:
        if self._config.kind is CheckpointKind.none:
            return
        trainer = {
            "step": progress.step,
            "samples": progress.samples,
            "data_hash": self._data_hash,
            "contents": self._contents,
            "first_update": self.first_update,
            "metrics": str(self._attempt.metrics),
            "config": self._run,
            **(more or {}),
        }
        start = time.perf_counter()
        self._saver.save(self._runtime, step=progress.step, trainer=trainer)
        if not self._config.background:
            self._saver.wait(self._runtime)
        self._last = progress.step
        self._stalls_s.append(time.perf_counter() - start)
        if self._rank == 0:
            self._tell("saved", step=progress.step, stall_ms=1e3 * self._stalls_s[-1])

    def _tell(self, event: str, **values: Any) -> None:
        append_event(self._attempt.metrics, {"event": event, "time": time.time(), **values})

    def facts(self, resumed_from: int) -> dict[str, Any]:
        """For the result: how often was saved, what the median save held up, and where this run went on from."""
        stalls = self._stalls_s
        return {
            "saved": len(stalls),
            "stall_ms": 1e3 * statistics.median(stalls) if stalls else None,
            "folder": str(self._attempt.checkpoints) if stalls else None,
            "resumed_from_step": resumed_from or None,
            "weights": self._weights_folder(),
        }
