"""One rank of an evaluation: forwards over held-out data with a runtime that holds weights alone."""

from __future__ import annotations

import math
from typing import Any

import torch

from orchestrator.config.schema import RunConfig
from orchestrator.launch.rank import RankInfo
from orchestrator.records.record_file import write_json_atomic
from orchestrator.records.run_record import AttemptPaths
from orchestrator.worker import measure
from orchestrator.worker.machine_load import LoadMeter, Used, others_share
from orchestrator.worker.result import combined
from orchestrator.worker.result_writer import ResultWriter
from orchestrator.worker.setup import TrainingSetup, build_data, build_runtime, prepare_process, with_memory, world_of
from orchestrator.workloads.models import IGNORED_LABEL, token_losses
from zero_runtime.census import take_census
from zero_runtime.step_report import StepReport


def run_rank(attempt: AttemptPaths, config: RunConfig, rank: RankInfo) -> None:
    """Evaluates the configuration as one of its ranks. Rank 0 writes result.json on success."""
    device = prepare_process(config, rank.local_rank)
    with world_of(attempt, config, rank, device) as watch:
        built = build_runtime(config, device, watch, trains=False)
        built.runtime.model.eval()
        with with_memory(built.accounts, watch, rank.rank):
            Evaluation(attempt, config, rank, built).run()


class Evaluation:
    """The forwards of one rank and their measurements."""

    def __init__(self, attempt: AttemptPaths, config: RunConfig, rank: RankInfo, built: TrainingSetup) -> None:
        self._attempt, self._config, self._rank, self._runtime = attempt, config, rank, built.runtime
        self._data = build_data(config)
        self._batches = self._found_batches()
        steps = config.measure.warmup_steps + self._batches
        self._writer = ResultWriter(attempt, config, rank, built, self._data, steps)
        self._readings = measure.Readings()
        self._losses = torch.zeros((), dtype=torch.float64, device=built.runtime.device)
        self._tokens = 0

    def run(self) -> None:
        runtime, warmup = self._runtime, self._config.measure.warmup_steps
        self._writer.tell_ready()
        runtime.collectives.journal.end_start()
        load = LoadMeter()
        with torch.no_grad():
            for step in range(warmup):
                self._forward(step % self._batches, counted=False, step=step)
            load.begin()
            for step in range(self._batches):
                self._forward(step, counted=True, step=warmup + step)
        tokens = int(runtime.sum_over_ranks(self._tokens))
        loss = float(runtime.collectives.sum_over_data_(self._losses)) / max(tokens, 1)
        self._write(self._result(loss, tokens, load.end()))

    def _found_batches(self) -> int:
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
        self._writer.tell_step(step + 1, StepReport(mean, math.nan), None, seconds, warmup=not counted)

    def _result(self, loss: float, tokens: int, used: Used) -> dict[str, Any]:
        readings, runtime, facts = self._readings, self._runtime, self._writer.facts
        memory = self._writer.memory(readings)
        share = others_share(runtime.collectives.gather_objects(used))
        return combined(facts, readings, memory, share, self._config.measure.warmup_steps) | {
            "communication": facts.accounts.communication(readings.ledger),
            "loss": {
                "first": loss,
                "last": loss,
                "validation": loss,
                "perplexity": perplexity(loss),
                "tokens": tokens,
                "missing_steps": None,
            },
        }

    def _write(self, result: dict[str, Any]) -> None:
        if self._rank.rank == 0:
            self._writer.tell("validation", step=result["steps"], loss=result["loss"]["last"])
            write_json_atomic(self._attempt.result, result)


def perplexity(loss: float) -> float | None:
    """exp of the mean loss of a token in nats; None if it is too large for a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return None
