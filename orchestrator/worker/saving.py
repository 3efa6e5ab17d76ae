"""Checkpoints of one rank of a run: when they are saved, and which one a run resumes from."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orchestrator import wings
from orchestrator.config.schema import AdapterKind, CheckpointKind, RunConfig, WeightsExport, to_dict
from orchestrator.records.record_file import EventTail, append_event, read_or_warn
from orchestrator.records.run_record import AttemptPaths
from orchestrator.text.units import spans
from zero_runtime.agreement import agree
from zero_runtime.dtypes import TORCH_DTYPE
from zero_runtime.errors import CheckpointError
from zero_runtime.runtime import ZeroRuntime
from zero_runtime.wings import FOREIGN_READER, LOAD_FOREIGN, RUN_CHECKPOINTS, WRITE_WEIGHTS_FOLDER, load
from zero_runtime.world import own_node

AUTO, NONE = "auto", "none"


@dataclass
class Reached:
    """How far training has come. `samples` is the position in the data, independent of the global batch size."""

    step: int = 0
    samples: int = 0


@dataclass(frozen=True)
class Best:
    """The step after which the validation loss was the lowest, and that loss."""

    step: int
    loss: float


class Saving:
    """Saves checkpoints when due and once at the end. All ranks must make the same calls."""

    def __init__(
        self,
        attempt: AttemptPaths,
        config: RunConfig,
        runtime: ZeroRuntime,
        data_hash: str,
        *,
        steps: int,
        restarted: bool = False,
    ) -> None:
        self._attempt = attempt
        self._config = config.checkpoint
        self._steps = steps
        self._keeps_best = config.trains_to_the_end and config.train.keep_best
        self._longer = "train.max_steps or train.epochs" if config.trains_to_the_end else "measure.steps"
        self._run = to_dict(config)
        self._runtime = runtime
        self._data_hash = data_hash
        self._contents: dict[str, str] = (read_or_warn(attempt.state) or {}).get("contents") or {}
        self._restarted = restarted
        self._rank = runtime.collectives.rank
        node = self._config.node_folder
        self._folder = attempt.checkpoints if node is None else Path(node, attempt.checkpoints.parent.name)
        self._checkpoints: Any = None  # RunCheckpoints, or None if the run neither saves nor resumes
        if restarted or self._config.kind is not CheckpointKind.none or self._config.resume != NONE:
            self._checkpoints = load(RUN_CHECKPOINTS)(
                runtime,
                self._folder,
                keep=(self._config.keep_last, self._config.keep_every),
                # A base model that was read from a folder is not written again with every checkpoint of its adapters.
                with_frozen=config.adapter.kind is AdapterKind.none or config.model.path is None,
                node=None if node is None else own_node(),
            )
        self._last = 0  # step of the last save
        self._stalls_s: list[float] = []
        self.first_update = 0  # updates that another library made before this run began
        self.best: Best | None = None  # the lowest validation loss so far
        self.curve: list[float] = []  # losses of the steps before the resumed one, on rank 0
        self.validations: dict[int, float] = {}  # losses of the validations up to the resumed step, on rank 0
        self.missing_steps: list[list[int]] = []  # first and last step of each range that the curve lacks
        self.earlier_result: dict[str, Any] | None = None  # result of a run that made and saved every step of this one

    # ---- resuming ----------------------------------------------------------------------------------------------

    def resume(self) -> Reached:
        """Loads the checkpoint that the configuration names, if any, into the runtime. Returns its progress."""
        if self._checkpoints is None:
            return Reached()
        self._checkpoints.clear_leftovers()
        reached = self._load()
        if self._config.kind is not CheckpointKind.none:
            self._checkpoints.set_aside(reached.step, self._tell_passed_over)
        return reached

    def _load(self) -> Reached:
        # A job that was requeued goes on where it stopped, also with checkpoint.resume=none.
        checkpoint = self._own() if self._restarted else None
        if checkpoint is None:
            named = self._config.resume not in (AUTO, NONE)
            reader = load(FOREIGN_READER)(Path(self._config.resume)) if named else None
            if reader is not None:
                return self._take_over(reader)
            checkpoint = self._chosen()
        if checkpoint is None:
            return Reached()
        trainer = checkpoint.index.trainer
        # Samples, not steps, say where the data goes on: this run's global batch may have another size.
        progress = Reached(trainer["step"], trainer["samples"])
        self._check_data(checkpoint.path, trainer)
        if progress.step >= self._steps:
            self.earlier_result = self._result_in(checkpoint.path, trainer)
        self._checkpoints.load(checkpoint)
        self.first_update = trainer.get("first_update", 0)
        self._last = progress.step
        # Another run's best checkpoint is in that run's folder, where this one's retention does not keep it.
        if checkpoint.path.parent == self._folder and trainer.get("best"):
            self.best = Best(**trainer["best"])
        if self._rank == 0:
            metrics = Path(trainer["metrics"])
            self._continue_curve(metrics, progress.step)
            missing = {"missing_steps": self.missing_steps, "metrics": str(metrics)} if self.missing_steps else {}
            self._tell("resumed", step=progress.step, path=str(checkpoint.path), **missing)
        return progress

    def _take_over(self, reader: Callable[[], Any]) -> Reached:
        """Loads another library's states and its number of updates, which Adam's bias correction needs.

        Steps, data and schedule start again: its checkpoint has none of ours.
        """
        foreign = load(LOAD_FOREIGN)(self._runtime, reader)
        self.first_update = self._runtime.updates
        if self._rank == 0:
            self._tell("resumed", step=0, path=str(foreign.path), kind=foreign.kind, updates=foreign.updates)
        return Reached()

    def _check_data(self, path: Path, trainer: Mapping[str, Any]) -> None:
        """Refuses a checkpoint with other data or other initial weights, before any state is read."""
        if trainer["data_hash"] != self._data_hash:
            raise CheckpointError(
                f"{path}: expected the data that it was trained on (hash {trainer['data_hash']}), found hash "
                f"{self._data_hash}; give the same data group and batch.seq, or checkpoint.resume=none"
            )
        began_with = (trainer.get("contents") or {}).get("model")
        if path.parent == self._folder and began_with not in (None, self._contents.get("model")):
            raise CheckpointError(
                f"{path}: expected the weights that it began with in {self._run['model']['path']}, found that they "
                "changed since; give the same weights, or checkpoint.resume=none"
            )

    def _result_in(self, path: Path, trainer: Mapping[str, Any]) -> dict[str, Any]:
        """The result of the run that saved its last step here, if it is a run of this point; else CheckpointError."""
        is_own = path.parent == self._folder
        if trainer["step"] > self._steps or not is_own or "result" not in trainer:
            raise CheckpointError(
                f"{path}: expected a checkpoint from before the last step, {self._steps}, found step "
                f"{trainer['step']}: nothing is left to train; give more {self._longer}, or checkpoint.resume=none to "
                "start again"
            )
        result: dict[str, Any] = trainer["result"]
        checkpoints = result["checkpoints"]
        # The result was built before this checkpoint was saved, so it does not count it.
        saved = {
            "saved": checkpoints["saved"] + 1,
            "folder": str(path.parent),
            "measured_by": str(Path(trainer["metrics"]).parent),
        }
        return {**result, "checkpoints": {**checkpoints, **saved, "weights": self._weights_folder()}}

    def _own(self) -> Any:
        """The newest checkpoint that this attempt saved before its job was requeued, whatever `resume` says."""
        checkpoint = self._checkpoints.newest_good(self._tell_passed_over)
        is_own = checkpoint is not None and checkpoint.index.trainer["metrics"] == str(self._attempt.metrics)
        return checkpoint if is_own else None

    def _chosen(self) -> Any:
        resume = self._config.resume
        if resume == NONE:
            return None
        if resume != AUTO:
            return self._checkpoints.open(resume)
        return self._checkpoints.newest_good(self._tell_passed_over)

    def _tell_passed_over(self, skipped: Any) -> None:
        self._tell("passed_over", path=str(skipped.path), why=skipped.why)

    def _continue_curve(self, metrics: Path, step: int) -> None:
        """Copies the learning curve up to the checkpoint to this attempt's record, marked as an earlier attempt's: the
        events of its steps and validations.

        A job that was killed and requeued has recorded some steps twice: the last record counts. Steps whose lines are
        missing or invalid are in `missing_steps`.
        """
        found = {
            (event["step"], event["event"]): event  # of a step, "step" comes before "validation"
            for event in EventTail(metrics).read_new()
            if event["event"] in ("step", "validation") and 1 <= event["step"] <= step
        }
        self.missing_steps = spans(number for number in range(1, step + 1) if (number, "step") not in found)
        for number, kind in sorted(found):
            event = found[number, kind]
            if metrics != self._attempt.metrics:
                append_event(self._attempt.metrics, {**event, "earlier": True})
            if kind == "step":
                self.curve.append(event["loss"])
            else:
                self.validations[number] = event["loss"]

    # ---- saving ------------------------------------------------------------------------------------------------

    def is_due(self, progress: Reached) -> bool:
        """Whether `after_step` saves now. The last step is saved by `finish`, which adds the result to it."""
        every = self._config.every
        return every is not None and progress.step % every == 0 and progress.step < self._steps

    def validated(self, step: int, loss: float) -> bool:
        """Takes a validation's loss. Returns whether it is the lowest finite one so far; its save is then kept."""
        if not math.isfinite(loss) or (self.best is not None and loss >= self.best.loss):
            return False
        self.best = Best(step, loss)
        return True

    def after_step(self, progress: Reached) -> None:
        """Saves if `every` is due, or if the step has the lowest validation loss and such checkpoints are kept."""
        is_best = self._keeps_best and self.best is not None and self.best.step == progress.step
        if self.is_due(progress) or (is_best and progress.step < self._steps):
            self._save(progress)

    def stop(self, progress: Reached) -> bool:
        """Returns once the state is saved and on disk; False if the run saves nothing."""
        # Nothing is saved twice: the last step may have been due.
        if progress.step > self._last:
            self._save(progress)
        self._wait()
        return self._config.kind is not CheckpointKind.none

    def finish(self, progress: Reached, result: Callable[[], dict[str, Any]]) -> None:
        """Saves the last state with the result, so that a run that ends before it writes the result loses nothing. Then
        waits for the disk. `result` is a collective: every rank calls it if the run saves."""
        if self._config.kind is not CheckpointKind.none:
            # A checkpoint's index is strict JSON: a loss that is not finite is null in it.
            self._save(progress, {"result": json.loads(json.dumps(result()), parse_constant=lambda _: None)})
        self._wait()
        self.write_weights()

    def write_weights(self) -> None:
        """Writes the trained weights as a Hugging Face folder, if configured."""
        dtype = str(self._config.weights)
        if self._config.weights is WeightsExport.none:
            return
        load(WRITE_WEIGHTS_FOLDER)(self._runtime, self._attempt.weights, dtype=TORCH_DTYPE[dtype])
        if self._rank == 0:
            wings.load(wings.WRITE_COMPANIONS)(self._attempt.weights, self._run, dtype)

    def _weights_folder(self) -> str | None:
        return str(self._attempt.weights) if self._config.weights is not WeightsExport.none else None

    def _save(self, progress: Reached, more: Mapping[str, Any] | None = None) -> None:
        if self._config.kind is CheckpointKind.none:
            return
        trainer = {
            "step": progress.step,
            "samples": progress.samples,
            "data_hash": self._data_hash,
            "contents": self._contents,
            "first_update": self.first_update,
            "metrics": str(self._attempt.metrics),
            "best": None if self.best is None else asdict(self.best),
            "config": self._run,
            **(more or {}),
        }
        also = (self.best.step,) if self._keeps_best and self.best is not None else ()
        start = time.perf_counter()
        self._checkpoints.save(step=progress.step, trainer=trainer, also=also)
        if not self._config.background:
            self._wait()
        self._last = progress.step
        self._stalls_s.append(time.perf_counter() - start)
        if self._rank == 0:
            self._tell("saved", step=progress.step, stall_ms=1e3 * self._stalls_s[-1])

    def _wait(self) -> None:
        """Block until the last save is on disk. All ranks meet here, also in a run that saves nothing."""
        if self._checkpoints is None:
            agree(self._runtime.collectives, None)
        else:
            self._checkpoints.wait()

    def _tell(self, event: str, **values: Any) -> None:
        append_event(self._attempt.metrics, {"event": event, "time": time.time(), **values})

    def best_facts(self) -> dict[str, Any] | None:
        """The lowest validation loss, its step, and the folder of its checkpoint, if it is kept; None without one."""
        if self.best is None:
            return None
        return {**asdict(self.best), "checkpoint": self.folder_of(self.best.step) if self._keeps_best else None}

    def folder_of(self, step: int) -> str | None:
        """The folder of the checkpoint that is saved after a step; None if the run saves none."""
        saves = self._config.kind is not CheckpointKind.none
        return self._checkpoints.folder_of(step) if saves else None

    def facts(self, resumed_from: int) -> dict[str, Any]:
        """Facts for the result: the number of saves, the median time that one blocks training, and the resumed step."""
        stalls = self._stalls_s
        return {
            "saved": len(stalls),
            "stall_ms": 1e3 * statistics.median(stalls) if stalls else None,
            "folder": str(self._folder) if stalls else None,
            "resumed_from_step": resumed_from or None,
            "weights": self._weights_folder(),
        }
