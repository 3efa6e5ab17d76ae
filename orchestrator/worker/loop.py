"""The steps of one rank: data, micro-batches, forward, backward and update. What is measured of them is not here."""

from __future__ import annotations

import contextlib

import torch

from orchestrator.config.schema import RunConfig
from orchestrator.worker.measurement import Measurement
from orchestrator.worker.micro_batches import MicroBatches
from orchestrator.worker.saving import Reached
from orchestrator.worker.setup import TrainingSetup
from orchestrator.workloads.data import TokenData
from zero_runtime.errors import NonFiniteError
from zero_runtime.step_report import StepReport

MicroBatch = tuple[torch.Tensor, torch.Tensor]


class Loop:
    """Makes training steps. All ranks must make the same calls.

    steps: of the whole run. first_update: updates that another library made before the run, which the schedule does
    not count.
    """

    def __init__(self, config: RunConfig, built: TrainingSetup, data: TokenData) -> None:
        steps = config.steps(data.train_samples)
        assert steps is not None  # the rules' end of training
        self.steps, self.first_update = steps, 0
        self.progress = Reached()
        self.batches = MicroBatches(config, built.runtime, data)
        self._runtime, self._accounts = built.runtime, built.accounts
        self._schedule = config.scheduler.curve.build(config.optimizer.lr, steps)
        self._reduces_at_boundary = config.zero.reduce_at_boundary
        assert config.batch.global_size is not None
        self._global_size = config.batch.global_size

    def advance(self) -> None:
        """The step that was made counts: the next one reads the samples after it."""
        self.progress = Reached(self.progress.step + 1, self.progress.samples + self._global_size)

    def step(self, measurement: Measurement, *, counts: bool = False) -> tuple[StepReport, float]:
        """One step from the present position in the data, and its learning rate. counts: `measurement` also counts
        bytes and dtypes, which takes longer than a step."""
        runtime, clock = self._runtime, self._runtime.clock
        with clock.phase("data"):
            batches, count = self.batches.of_step(self.progress.samples)
            tokens = runtime.sum_over_ranks(count).clamp(min=1)
        # The schedule does not count skipped steps, nor the updates that another library made before this run.
        rates = self._schedule.rates(runtime.updates - self.first_update)
        with self._accounts.auditing() if counts else contextlib.nullcontext():
            self._backwards(batches, tokens, measurement if counts else None)
        # The device has work again, so that the host may now wait for the end of the step before.
        measurement.read_last_step()
        if counts:
            measurement.take_census()  # here gradients and parameters are all there, and no activation is
        assert isinstance(rates.lr, float)
        try:
            with clock.phase("optimizer"):
                report = runtime.step(rates)
        except NonFiniteError as error:
            # Nothing was updated, so the repeated backward passes give the same numbers and show where they arise.
            verdict = runtime.find_non_finite(lambda: self._backwards(batches, tokens, None))
            raise NonFiniteError(f"{error}\n{verdict}") from None
        self._accounts.settle()
        return report, rates.lr

    def _backwards(self, batches: list[MicroBatch], tokens: torch.Tensor, counting: Measurement | None) -> None:
        """Forward and backward of every micro-batch. counting: counts the activations of each forward."""
        runtime, clock = self._runtime, self._runtime.clock
        for index, (ids, labels) in enumerate(batches):
            with clock.phase("forward"), counting.activations() if counting else contextlib.nullcontext():
                loss = self.batches.losses(ids, labels) / tokens
            # Gradients are added up on each rank until the last micro-batch, whose backward alone sends them.
            keeps = self._reduces_at_boundary and index < len(batches) - 1
            with clock.phase("backward"), runtime.no_sync() if keeps else contextlib.nullcontext():
                runtime.backward(loss)
            del loss  # else its graph would live during the next forward
