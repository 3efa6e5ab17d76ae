"""One rank of one run: builds the model, trains and measures. Rank 0 writes the events and the result."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial

from orchestrator import wings
from orchestrator.config.schema import MeasureKind, RunConfig, from_dict
from orchestrator.launch.rank import RankInfo, Stopped
from orchestrator.records.record_file import require_json
from orchestrator.records.run_record import AttemptPaths
from orchestrator.worker.listeners import Listener, RankRun, listeners_of
from orchestrator.worker.loop import Loop
from orchestrator.worker.measurement import Measurement
from orchestrator.worker.result_writer import ResultWriter
from orchestrator.worker.saving import Saving
from orchestrator.worker.setup import TrainingSetup, build_data, build_engine, prepare_process, with_memory, world_of
from orchestrator.worker.stopping import StopSignals


def run_rank(attempt: AttemptPaths, rank: RankInfo) -> Stopped | None:
    """Trains the attempt's configuration as one of its ranks. Rank 0 writes result.json on success."""
    config = from_dict(require_json(attempt.config))
    if config.measure.kind is MeasureKind.eval:
        wings.load(wings.EVALUATION)(attempt, config, rank)
        return None
    device = prepare_process(config, rank.local_rank)
    signals = StopSignals.of(config)
    with world_of(attempt, config, rank, device) as watch:
        built = build_engine(config, device, watch, signals.asked if signals else None)
        with with_memory(built.accounts, watch, rank.rank):
            return train_and_record(run_of(attempt, config, rank, built))


def run_of(attempt: AttemptPaths, config: RunConfig, rank: RankInfo, built: TrainingSetup) -> RankRun:
    """The parts of a run, before its first step."""
    runtime, data = built.runtime, build_data(config)
    loop = Loop(config, built, data)
    writer = ResultWriter(attempt, config, rank, built, data, loop.steps)
    measurement = Measurement(attempt, config, built, writer.tell)
    saving = Saving(attempt, config, runtime, data.hash, steps=loop.steps, restarted=rank.restarts > 0)
    return RankRun(attempt, config, rank, runtime, data, loop, measurement, writer, saving)


def train_and_record(run: RankRun) -> Stopped | None:
    """Trains to the last step, or to the step after which all ranks know that one of them was asked to stop."""
    try:
        return train(run)
    except BaseException:
        with contextlib.suppress(Exception):  # of a device that failed; the rank's own error is the one to raise
            run.measurement.read_last_step()
        raise


def train(run: RankRun) -> Stopped | None:
    """The run of one rank, from the first step that is left to the result."""
    config, runtime, loop, saving = run.config, run.runtime, run.loop, run.saving
    measurement, writer, listeners = run.measurement, run.writer, listeners_of(run)
    writer.tell_ready(warning=writer.warning())
    loop.progress = saving.resume()
    if saving.earlier_result is not None:  # an earlier run saved its last step, but ended before it wrote the result
        saving.write_weights()
        writer.write(saving.earlier_result, saving, saving.earlier_result["loss"]["validation"])
        return None
    first, loop.first_update = loop.progress.step, saving.first_update
    measurement.readings.losses += saving.curve
    # The model is built, loaded and compiled: from here on resources.stuck_s limits how long a rank may keep the
    # others waiting.
    runtime.collectives.journal.end_start()
    # The end of a point that takes turns may be that of one round.
    end = measurement.begin(first, loop.steps, listeners)
    for step in range(first, end):
        measurement.before_step(step)
        for one in listeners:
            one.before_step(step + 1)
        report, lr = loop.step(measurement, counts=measurement.counts(step))
        loop.advance()
        warms_up = step < first + config.measure.warmup_steps
        measurement.after_step(step, report, partial(writer.tell_step, step + 1, report, lr, warmup=warms_up))
        # A run that resumes takes its curve from the record, so no checkpoint may be ahead of it.
        if saving.is_due(loop.progress):
            measurement.read_last_step()
        for one in listeners:
            one.after_step(step + 1)
        saving.after_step(loop.progress)
        if report.stop and step + 1 < loop.steps:
            measurement.read_last_step()
            return Stopped(loop.progress.step, saving.stop(loop.progress))
    runtime.clock.stop()
    measurement.read_last_step()
    if config.trains_to_the_end:
        measurement.keep_peaks()  # those of training: what listeners do next uses memory of its own
    for one in listeners:
        one.at_end()
    if config.trains_to_the_end:
        writer.conclude_training(saving, loop.progress, run.examples)
    # The last checkpoint holds the result, so that a run that ends before it writes the result loses nothing.
    saving.finish(loop.progress, partial(writer.result, measurement, saving, first))
    # Further rounds decide the speed alone. They follow the checkpoint, so that what they train reaches no file.
    measurement.add_rounds(partial(forgotten_step, run, listeners))
    result = writer.result(measurement, saving, first)
    for one in listeners:
        one.add_to(result)
    writer.write(result, saving, measurement.readings.validation_loss)
    return None


def forgotten_step(run: RankRun, listeners: Sequence[Listener]) -> None:
    """A step after the run is over, on the samples that would come next. Nothing of what it trains is kept."""
    for one in listeners:
        one.before_step(run.loop.steps + 1)
    run.loop.step(run.measurement)
