"""One rank of an evaluation: forwards over held-out data with a runtime that holds weights alone."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from orchestrator.config.schema import RunConfig
from orchestrator.launch.rank import RankInfo, RankRecord
from orchestrator.records.record_file import write_json_atomic
from orchestrator.records.run_record import AttemptPaths
from orchestrator.worker import measure
from orchestrator.worker.event_writer import EventWriter
from orchestrator.worker.machine_load import LoadMeter, Used, others_share
from orchestrator.worker.result import RunFacts, combined
from orchestrator.worker.setup import build_data, build_runtime, prepare_process, refuse_different_data
from orchestrator.workloads.models import IGNORED_LABEL, token_losses
from zero_runtime.memory.census import take_census
from zero_runtime.runtime import ZeroRuntime
from zero_runtime.watch.failure import is_out_of_memory, memory_error
from zero_runtime.watch.watch import RankWatch, WatchSettings
from zero_runtime.world import WorldSettings, join_world, leave_world


def run_rank(attempt: AttemptPaths, config: RunConfig, rank: RankInfo) -> None:
    """Evaluates the configuration as one of its ranks. Rank 0 writes result.json on success."""
    device = prepare_process(config, rank.local_rank)
    settings = WorldSettings(
        watch=WatchSettings(stuck_s=config.resources.stuck_s),
        on_end=RankRecord(attempt, rank.rank).write_error,
    )
    with join_world(rank.meeting, rank.rank, rank.world, device, settings) as watch:
        runtime = build_runtime(config, device, watch, trains=False).runtime
        runtime.model.eval()
        with with_memory(runtime, watch, rank.rank):
            Evaluation(attempt, config, rank, runtime).run()
    leave_world()


@contextlib.contextmanager
def with_memory(runtime: ZeroRuntime, watch: RankWatch, rank: int) -> Iterator[None]:
    """Adds the memory held at the time to an out of memory error."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        position, _ = watch.journal.read()
        raise memory_error(rank, error, position, asdict(take_census(runtime))) from error


class Evaluation:
    """The forwards of one rank and their measurements."""

    def __init__(self, attempt: AttemptPaths, config: RunConfig, rank: RankInfo, runtime: ZeroRuntime) -> None:
        self._attempt, self._config, self._rank, self._runtime = attempt, config, rank, runtime
        self._data = build_data(config)
        self._events = EventWriter(attempt.metrics, in_background=False)
        self._readings = measure.Readings()
        self._losses = torch.zeros((), dtype=torch.float64, device=runtime.device)
        self._tokens = 0

    def run(self) -> None:
        try:
            self._run()
        finally:
            self._events.end()

    def _run(self) -> None:
        runtime, warmup, batches = self._runtime, self._config.measure.warmup_steps, self._batches()
        refuse_different_data(self._runtime.collectives, self._data.hash)
        self._tell(
            "ready",
            parameters=self._facts(batches).parameters,
            data_hash=self._data.hash,
            predicted=measure.model_states(runtime, {}),
        )
        runtime.collectives.journal.end_start()
        load = LoadMeter()
        with torch.no_grad():
            for step in range(warmup):
                self._forward(step % batches, counted=False, step=step)
            load.begin()
            for step in range(batches):
                self._forward(step, counted=True, step=warmup + step)
        tokens = int(runtime.sum_over_ranks(self._tokens))
        loss = float(runtime.collectives.sum_over_data_(self._losses)) / max(tokens, 1)
        self._write(self._result(loss, tokens, batches, load.end()))

    def _batches(self) -> int:
        """Batches of each rank: as many as asked for, as far as there are held-out samples."""
        own = self._data.validation_samples // (self._config.batch.micro * self._rank.world)
        if own == 0:
            raise ValueError(
                f"measure=eval: expected at least {self._config.batch.micro * self._rank.world} held-out sequences, "
                f"one batch for each rank, found {self._data.validation_samples}; use a larger "
                "data.validation_fraction, more data, or a smaller batch.micro"
            )
        assert self._config.measure.steps is not None  # the schema's rule
        return min(self._config.measure.steps, own)

    def _forward(self, batch: int, *, counted: bool, step: int) -> None:
        """The forward of one batch; the sum of the losses of its tokens stays on the device."""
        runtime, per_rank = self._runtime, self._config.batch.micro
        runtime.clock.start()
        with runtime.clock.phase("data"):
            held = self._data.validation_batch((batch * self._rank.world + self._rank.rank) * per_rank, per_rank)
            ids, labels = (torch.from_numpy(one).to(runtime.device) for one in held)
        with runtime.clock.phase("forward"):
            losses = token_losses(runtime.model, ids, labels, self._config.loss.tile_tokens).double()
        tokens = int((held.labels != IGNORED_LABEL).sum())
        if self._readings.census is None:
            self._readings.census = take_census(runtime)
        mean = float(losses) / max(tokens, 1)  # waits for the device, so that the time below is that of the forward
        seconds = self._readings.add_step(runtime.clock.end().seconds())
        self._readings.ledger = runtime.reset_ledger()
        if counted:
            self._losses += losses
            self._tokens += tokens
        self._tell_step(step, mean, seconds, counted=counted)

    def _tell_step(self, step: int, loss: float, seconds: float, *, counted: bool) -> None:
        kind, mib = measure.memory_now(self._runtime.device)
        self._tell(
            "step",
            step=step + 1,
            warmup=not counted,
            loss=loss,
            grad_norm=None,
            skipped=False,
            loss_scale=1.0,
            lr=None,
            step_ms=seconds * 1e3,
            tokens_per_second=self._facts(0).tokens_per_step / seconds,
            memory_mib=mib,
            memory_kind=kind,
        )

    def _result(self, loss: float, tokens: int, batches: int, used: Used | None) -> dict[str, Any]:
        readings, runtime, warmup = self._readings, self._runtime, self._config.measure.warmup_steps
        assert readings.census is not None
        local = {
            **asdict(readings.census),
            "activations_bytes": 0,
            "activations_host_bytes": 0,
            **measure.peaks(runtime.device),
        }
        memory = measure.worst_of(runtime.collectives.gather_objects(local))
        share = others_share(runtime.collectives.gather_objects(used))
        return combined(self._facts(warmup + batches), readings, memory, share, warmup) | {
            "communication": measure.communication(runtime, readings.ledger, reduces_at_boundary=False),
            "loss": {
                "first": loss,
                "last": loss,
                "validation": loss,
                "perplexity": perplexity(loss),
                "tokens": tokens,
                "weights": self._config.precision.dtypes.weights,
                "missing_steps": None,
            },
        }

    def _facts(self, steps: int) -> RunFacts:
        return RunFacts(self._config, self._runtime, self._data, self._rank.world, steps)

    def _tell(self, event: str, **values: Any) -> None:
        if self._rank.rank == 0:
            self._events.write(event, **values)

    def _write(self, result: dict[str, Any]) -> None:
        if self._rank.rank == 0:
            self._tell("validation", step=result["steps"], loss=result["loss"]["last"])
            write_json_atomic(self._attempt.result, result)


def perplexity(loss: float) -> float | None:
    """exp of the mean loss of a token in nats; None if it is too large for a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return None
