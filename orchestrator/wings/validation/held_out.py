"""The loss over held-out data, after some steps of a run and after its last one."""

from __future__ import annotations

import numpy as np
import torch

from orchestrator.worker.listeners import Listener, RankRun
from orchestrator.workloads.data import IGNORED_LABEL


class Validation(Listener):
    """The validations of one rank. All ranks must make the same calls."""

    def __init__(self, run: RankRun) -> None:
        super().__init__(run)
        config, self._runtime, self._data, self._mine = run.config, run.runtime, run.data, run.loop.batches
        self._micro = config.batch.micro
        self._every = config.train.eval_every if config.trains_to_the_end else None
        self._rank, self._world = self._runtime.collectives.batch_rank, self._runtime.collectives.batch_world
        available = -(-self._data.validation_samples // (self._micro * self._world))
        asked = config.measure.validation_batches
        self._batches = available if asked is None else min(asked, available)

    def after_step(self, step: int) -> None:
        """Validates if it is due, and always after the last step of the run. Records the loss."""
        is_due = self._every is not None and step % self._every == 0
        if not self._batches or not (is_due or step == self.run.loop.steps):
            return
        run = self.run
        run.measurement.read_last_step()  # its event comes first; also waits for a GPU to reach the end of the step
        loss = self.loss()
        run.runtime.reset_ledger()  # the communication of a step is that of training
        run.measurement.readings.validation_loss = loss
        is_best = run.saving.validated(step, loss)
        run.writer.tell_validation(
            run.saving, step, loss, **({"best": is_best} if run.config.trains_to_the_end else {})
        )

    def loss(self) -> float:
        """Mean loss over the labels that count, of the first held-out samples.

        A batch may go past the last sample: what it repeats does not count, so that the loss over all held-out data is
        that of each sample once, whatever the number of ranks.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._runtime.device)
        tokens = 0
        with torch.no_grad():
            for index in range(self._batches):
                position = (index * self._world + self._rank) * self._micro
                batch = self._data.validation_batch(position, self._micro)
                batch.labels[np.arange(position, position + self._micro) >= self._data.validation_samples] = (
                    IGNORED_LABEL
                )
                total += self._mine.losses(self._mine.on_device(batch.input_ids), self._mine.on_device(batch.labels))
                tokens += self._mine.count(batch.labels)
        counted = self._runtime.sum_over_ranks(tokens).clamp(min=1)
        collectives = self._runtime.collectives
        loss = float(collectives.sum_over_data_(total) / counted)
        # Whether it is the lowest decides about a save, in which all ranks take part: all go by one rank's bits.
        return float(collectives.gather_objects(loss)[0])
