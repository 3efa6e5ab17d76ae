"""One rank of one run: builds the model, trains and measures. Rank 0 writes the events and the result."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from orchestrator.config.schema import MeasureKind, RunConfig, from_dict
from orchestrator.launch.rank import RankInfo, RankRecord, Stopped
from orchestrator.machine.energy import EnergyMeter
from orchestrator.plan.tensor_messages import TensorMessages, messages_in, words
from orchestrator.records.record_file import require_json, write_json_atomic
from orchestrator.records.run_record import AttemptPaths
from orchestrator.worker import evaluate, measure, predicted, profile
from orchestrator.worker.core_speed import ReferenceWork, compares_cores
from orchestrator.worker.event_writer import EventWriter
from orchestrator.worker.faults import Faults
from orchestrator.worker.held_out import HeldOut, examples_of
from orchestrator.worker.micro_batches import MicroBatches
from orchestrator.worker.result import RunFacts, combined, full_numel
from orchestrator.worker.rounds import MeasuredRounds
from orchestrator.worker.saving import Progress, Saving
from orchestrator.worker.setup import (
    asked_dtypes,
    build_data,
    build_runtime,
    energy_counters,
    prepare_process,
    refuse_different_data,
)
from orchestrator.worker.stopping import StopSignals
from orchestrator.workloads.data import TokenData
from zero_runtime.accounting import saving_trouble
from zero_runtime.activations.recompute import Recomputation
from zero_runtime.errors import NonFiniteError
from zero_runtime.memory.census import ActivationCensus, take_census
from zero_runtime.memory.dtype_audit import DTypeAudit
from zero_runtime.phase_clock import Lap
from zero_runtime.runtime import ZeroRuntime
from zero_runtime.step_report import StepReport
from zero_runtime.watch.watch import WatchSettings
from zero_runtime.world import WorldSettings, join_world, leave_world


def run_rank(attempt: AttemptPaths, rank: RankInfo) -> Stopped | None:
    """Trains the attempt's configuration as one of its ranks. Rank 0 writes result.json on success."""
    config = from_dict(require_json(attempt.config))
    if config.measure.kind is MeasureKind.eval:
        evaluate.run_rank(attempt, config, rank)
        return None
    device = prepare_process(config, rank.local_rank)
    signals = StopSignals.of(config)
    settings = WorldSettings(
        watch=WatchSettings(stuck_s=config.resources.stuck_s),
        on_end=RankRecord(attempt, rank.rank).write_error,
    )
    with join_world(rank.meeting, rank.rank, rank.world, device, settings) as watch:
        built = build_runtime(config, device, watch, signals.asked if signals else None)
        with evaluate.with_memory(built.runtime, watch, rank.rank):
            stopped = RankRun(attempt, config, rank, *built).run()
    leave_world()  # a rank that failed must not: it could wait here forever and never record its error
    return stopped


class RankRun:
    """The training loop of one rank and its measurements."""

    def __init__(
        self,
        attempt: AttemptPaths,
        config: RunConfig,
        rank: RankInfo,
        runtime: ZeroRuntime,
        recomputation: Recomputation,
        tensor: TensorMessages,
    ) -> None:
        self._attempt = attempt
        self._config = config
        self._device = runtime.device
        self._on_cuda = runtime.device.type == "cuda"
        self._events = EventWriter(attempt.metrics, in_background=self._on_cuda)
        self._rank = rank
        self._faults = Faults.from_env()
        self._data: TokenData = build_data(config)
        self._runtime = runtime
        self._batches, self._tensor = MicroBatches(config, runtime, self._data), tensor
        self._kept = recomputation.memory
        steps = config.steps(self._data.train_samples)
        assert steps is not None  # the rules' end of training
        self._steps = steps
        self._schedule = config.scheduler.curve.build(config.optimizer.lr, self._steps)
        self._readings = measure.Readings()
        self._audit = DTypeAudit(runtime, asked_dtypes(config, runtime))
        self._rounds = MeasuredRounds(
            attempt,
            config.measure,
            self._readings.step_s,
            runtime.collectives.gather_objects,
            self._tell,
            self._show_waiting,
            EnergyMeter(energy_counters(self._device)),
            ReferenceWork(uses_cores=compares_cores(config)).timed_ms,
        )
        self._saving = Saving(attempt, config, runtime, self._data.hash, steps=steps, restarted=rank.restarts > 0)
        self._held_out = HeldOut(config, runtime, self._data, self._batches)
        self._training: dict[str, Any] | None = None
        self._unread: Callable[[], None] | None = None
        self._first = self._census_step = 0
        self._progress = Progress()

    def run(self) -> Stopped | None:
        """Trains to the last step, or to the step after which all ranks know that one of them was asked to stop."""
        try:
            return self._run()
        except BaseException:
            with contextlib.suppress(Exception):  # of a device that failed; the rank's own error is the one to raise
                self._read_last_step()
            raise
        finally:
            self._events.end()

    def _run(self) -> Stopped | None:
        self._tell_ready()
        self._progress = self._saving.resume()
        if self._saving.earlier_result is not None:
            self._tell_earlier(self._saving.earlier_result)
            return None
        self._first = self._progress.step
        self._readings.losses += self._saving.curve
        # The census walks all of Python's objects, so it is taken in a step that is not counted, if there is one, and
        # preferably not in the first one, in which nothing has been gathered yet.
        self._census_step = min(self._first + max(self._config.measure.warmup_steps - 1, 0), self._steps - 1)
        # The model is built, loaded and compiled: from here on resources.stuck_s limits how long a rank may keep the
        # others waiting.
        self._runtime.collectives.journal.end_start()
        end = self._rounds.divide(self._first + self._warmup_steps, self._steps)
        for step in range(self._first, end):
            if self._rounds.begins(step):
                self._begin_round()
            self._before_step()
            self._faults.at_step(step + 1, self._rank.rank)
            report, lr = self._train_step(step)
            self._note_step(step, report, lr)
            if (number := self._rounds.ends(step)) is not None:
                self._end_round(number)
            if step == self._census_step:  # before anything is saved that a later run could go on from
                self._readings.dtypes = self._audit.conclude(self._readings.ledger)
            if self._held_out.is_due(step + 1, self._steps):
                self._validate(step + 1)
            self._saving.after_step(self._progress)
            if report.stop and step + 1 < self._steps:
                self._tell_all()
                return Stopped(self._progress.step, self._saving.stop(self._progress))
        self._runtime.clock.stop()
        self._tell_all()
        if end == self._steps:
            self._validate(end)
        if self._config.trains_to_the_end:
            self._conclude_training()
        self._saving.finish(self._progress, self._result)
        self._add_rounds()
        result = self._result()
        if self._config.measure.profile and self._rounds.is_last_attempt:
            result |= self._profiled(result)
        self._write(result)
        return None

    def _conclude_training(self) -> None:
        """Generates the examples, and says how far training came. Peaks are read before: they are those of training."""
        self._readings.peaks = measure.peaks(self._device)
        examples = examples_of(self._runtime, self._config, self._data) if self._config.train.examples else []
        self._runtime.reset_ledger()
        for one in examples if self._rank.rank == 0 else ():
            self._tell("example", **one)
            prompt, answer = (
                part["ids"] if part["text"] is None else part["text"] for part in (one["prompt"], one["answer"])
            )
            print(f"example: {prompt!r} -> {answer!r}", flush=True)
        samples = self._progress.samples
        self._training = {
            "epochs": samples / self._data.train_samples,
            "tokens": samples * self._config.batch.seq,
            "learned_tokens": self._data.learned_tokens(samples),
            "validations": len(self._saving.validations),
            "best": self._saving.best_facts(),
            "last_checkpoint": self._saving.folder_of(self._progress.step),
            "examples": examples,
        }

    def _begin_round(self) -> None:
        self._read_last_step()  # also waits for a GPU to reach the end of the step
        self._rounds.begin()

    def _before_step(self) -> None:
        self._rounds.before_step()
        self._runtime.clock.start()  # keeps the time of that, of saving and of waiting for a turn out of the step's

    def _end_round(self, number: int) -> None:
        self._read_last_step()
        self._rounds.end(number)

    def _add_rounds(self) -> None:
        """Measures further rounds, and rounds again that were next to a notable load. The run is over: what it
        learned and saved is that of its own steps, and these steps are timed and forgotten."""
        if further := self._rounds.further():
            self._tell("extending", rounds=[number for number, _ in further])
            self._time_rounds(further)
        while repeated := self._rounds.to_repeat():
            self._tell("repeating", rounds=[number for number, _ in repeated])
            self._time_rounds(repeated)
        self._rounds.leave_out_loaded()

    def _time_rounds(self, rounds: Sequence[tuple[int, int]]) -> None:
        """Measures rounds with these numbers and steps."""
        for number, steps in rounds:
            self._rounds.begin()
            for _ in range(steps):
                self._before_step()
                self._faults.at_step(self._steps + 1, self._rank.rank)
                self._train_step(self._steps)
                self._readings.add_step(self._runtime.clock.end().seconds())
                self._runtime.reset_ledger()
            self._rounds.end(number)

    def _profiled(self, result: dict[str, Any]) -> dict[str, Any]:
        """The profile of further steps, which are forgotten as those of `_add_rounds` are."""
        self._read_last_step()
        self._tell("profiling")

        def step() -> None:
            self._runtime.clock.start()
            self._train_step(self._steps)
            self._runtime.clock.end().forget()
            self._runtime.reset_ledger()

        return profile.profiled(self._config, self._runtime, self._attempt, self._rank, step, result)

    def _show_waiting(self) -> None:
        """Shows the other ranks that this one is alive while it waits for its turn."""
        self._runtime.collectives.journal.begin("forward")

    @property
    def _warmup_steps(self) -> int:
        """The warm-up steps of this run. A resumed run may have fewer steps left than the configured number."""
        return min(self._config.measure.warmup_steps, self._steps - self._first - 1)

    # ---- one step ----------------------------------------------------------------------------------------------

    def _train_step(self, step: int) -> tuple[StepReport, float]:
        runtime, clock = self._runtime, self._runtime.clock
        with clock.phase("data"):
            batches, count = self._batches.of_step(self._progress.samples)
            tokens = runtime.sum_over_ranks(count).clamp(min=1)
        # The schedule does not count skipped steps, nor the updates that another library made before this run.
        rates = self._schedule.rates(runtime.updates - self._saving.first_update)
        # Speculative optimizer steps run during the last backward, so they need the rate before it.
        runtime.expect_rate(rates)
        counts = step == self._census_step
        with self._audit if counts else contextlib.nullcontext():
            self._backwards(batches, tokens, counting=counts)
        self._read_last_step()
        if counts:
            self._readings.census = take_census(runtime)
        assert isinstance(rates.lr, float)
        try:
            with clock.phase("optimizer"):
                report = runtime.step(rates)
        except NonFiniteError as error:
            # Nothing was updated, so the repeated backward passes give the same numbers and show where they arise.
            verdict = runtime.find_non_finite(lambda: self._backwards(batches, tokens, counting=False))
            raise NonFiniteError(f"{error}\n{verdict}") from None
        if not self._on_cuda:  # there the next step is issued at once, and its clock is read in the stream
            for unit in runtime.units:  # see [Note: between two steps] in core_speed.py
                unit.wait_renewed()
        return report, rates.lr

    def _backwards(
        self, batches: list[tuple[torch.Tensor, torch.Tensor]], tokens: torch.Tensor, *, counting: bool
    ) -> None:
        """Forward and backward of every micro-batch. With `counting`, also counts the activations of each forward."""
        runtime, clock = self._runtime, self._runtime.clock
        for index, (ids, labels) in enumerate(batches):
            activations = ActivationCensus(runtime) if counting else None
            with clock.phase("forward"), activations or contextlib.nullcontext():
                loss = self._batches.losses(ids, labels) / tokens
            if activations is not None:
                self._readings.activations_bytes = max(self._readings.activations_bytes, activations.bytes)
            keeps = self._config.zero.reduce_at_boundary and index < len(batches) - 1
            with clock.phase("backward"), runtime.no_sync() if keeps else contextlib.nullcontext():
                runtime.backward(loss)
            del loss

    def _note_step(self, step: int, report: StepReport, lr: float) -> None:
        self._progress = Progress(step + 1, self._progress.samples + self._config.batch.global_size)
        self._readings.losses.append(report.loss)
        self._readings.skipped += report.skipped
        self._readings.ledger = self._runtime.reset_ledger()
        self._unread = partial(self._read_step, step, report, lr, self._runtime.clock.end())
        if not self._on_cuda:
            self._read_last_step()
        if self._saving.is_due(self._progress):
            self._tell_all()

    def _read_last_step(self) -> None:
        """Reads the clock of the last step, if it was not read.

        A GPU is still at the step's last kernels when the host has read its loss. Instead of waiting for them, the host
        issues the next step first, and reads when they have run.
        """
        if self._unread is not None:
            self._unread()
            self._unread = None

    def _tell_all(self) -> None:
        """Returns when all steps are in the record, as a checkpoint of the last one assumes."""
        self._read_last_step()
        self._events.flush()

    def _read_step(self, step: int, report: StepReport, lr: float, lap: Lap) -> None:
        phases = lap.seconds()
        seconds = self._readings.add_step(phases)
        if self._rank.rank != 0:
            return
        kind, mib = measure.memory_now(self._device)
        self._tell(
            "step",
            step=step + 1,
            warmup=step < self._first + self._config.measure.warmup_steps,
            **({"of": self._steps} if self._config.trains_to_the_end else {}),
            loss=report.loss,
            grad_norm=report.grad_norm if math.isfinite(report.grad_norm) else None,
            skipped=report.skipped,
            loss_scale=report.loss_scale,
            lr=lr,
            step_ms=seconds * 1e3,
            tokens_per_second=self._tokens_per_step() / seconds,
            memory_mib=mib,
            memory_kind=kind,
        )

    def _tokens_per_step(self) -> int:
        return self._config.batch.global_size * self._config.batch.seq

    # ---- before and after --------------------------------------------------------------------------------------

    def _validate(self, step: int) -> None:
        """Validates after a step, and records the loss."""
        self._tell_all()  # the events of all steps come before; also waits for a GPU to reach the end of the step
        loss = self._held_out.loss()
        self._runtime.reset_ledger()  # the communication of a step is that of training
        if loss is None:
            return
        self._readings.validation_loss = loss
        is_best = self._saving.validated(step, loss)
        self._tell_validation(step, loss, **({"best": is_best} if self._config.trains_to_the_end else {}))

    def _tell_validation(self, step: int, loss: float, **more: bool) -> None:
        if step not in self._saving.validations:  # else the record has it from an earlier attempt
            self._saving.validations[step] = loss
            self._tell("validation", step=step, loss=loss, **more)
            self._events.flush()

    def _tell_ready(self) -> None:
        refuse_different_data(self._runtime.collectives, self._data.hash)
        self._tell(
            "ready",
            parameters=full_numel(self._runtime),
            data_hash=self._data.hash,
            predicted=measure.model_states(self._runtime, {}) | self._planned(),
            warning=self._warning(),
        )

    def _warning(self) -> str | None:
        return "; ".join(filter(None, (saving_trouble(self._runtime), *self._data.notes))) or None

    def _planned(self) -> dict[str, Any]:
        return predicted.planned(self._config) if self._rank.rank == 0 else {}

    def _tell(self, event: str, **values: Any) -> None:
        if self._rank.rank == 0:
            self._events.write(event, **values)

    def _tell_earlier(self, result: dict[str, Any]) -> None:
        """Writes the result of an earlier run that saved its last step but ended before it wrote the result."""
        self._readings.validation_loss = result["loss"]["validation"]
        self._saving.write_weights()
        self._write(result)

    def _write(self, result: dict[str, Any]) -> None:
        if self._rank.rank != 0:
            return
        if self._readings.validation_loss is not None:  # of an earlier attempt that ended before it recorded it
            self._tell_validation(self._steps, self._readings.validation_loss)
        write_json_atomic(self._attempt.result, result)
        # Only after the peaks are measured: they would include the memory that counting takes.
        result["memory"] |= predicted.known(self._config)
        write_json_atomic(self._attempt.result, result)
        self._tell("finish")
        self._events.flush()

    def _result(self) -> dict[str, Any]:
        """Everything measured so far. Rank 0 combines the readings of all ranks; other ranks get an empty dict."""
        readings = self._readings
        assert readings.census is not None
        local = {
            **asdict(readings.census),
            "activations_bytes": readings.activations_bytes,
            "activations_host_bytes": 0 if self._kept is None else self._kept.nbytes,
            **(readings.peaks or measure.peaks(self._device)),
        }
        memory = measure.worst_of(self._runtime.collectives.gather_objects(local))
        readings.rounds = self._rounds.found
        return self._combined(memory, self._rounds.others_share()) if self._rank.rank == 0 else {}

    def _combined(self, memory: dict[str, Any], others: float | None) -> dict[str, Any]:
        readings, runtime = self._readings, self._runtime
        tensor = messages_in(self._config, self._tensor)
        finite = [loss for loss in readings.losses if math.isfinite(loss)]
        missing = self._saving.missing_steps
        facts = RunFacts(self._config, runtime, self._data, self._rank.world, self._steps)
        return (
            combined(facts, readings, memory, others, self._warmup_steps)
            | self._rounds.to_dict()
            | {
                "communication": measure.communication(
                    runtime,
                    readings.ledger,
                    reduces_at_boundary=self._config.zero.reduce_at_boundary,
                    tensor=tensor,
                    tensor_words=words(self._config, tensor),
                ),
                "loss": {
                    "first": None if missing and missing[0][0] == 1 else finite[0],
                    "last": finite[-1],
                    "validation": readings.validation_loss,
                    "missing_steps": missing,
                },
                "checkpoints": self._saving.facts(self._first),
            }
            | ({} if self._training is None else {"training": self._training})
        )
