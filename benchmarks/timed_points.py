"""The ranks of predicted_speed.py: they measure the parts of a step, and the steps of all points by turns."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any, NamedTuple

import torch

from orchestrator.config.schema import RunConfig
from orchestrator.launch.environment import GLIBC, TUNABLES
from orchestrator.rounds.order import rotated
from orchestrator.wings.predict.calibrate_rank import Calibration, SegmentTurns
from orchestrator.wings.predict.speed import TimingJob
from orchestrator.worker.setup import build_data, build_runtime, prepare_process
from orchestrator.workloads.data import slice_for_rank
from orchestrator.workloads.models import token_losses
from zero_runtime.predict.timing.machine_timer import Repeated
from zero_runtime.watch.watch import RankWatch, WatchSettings
from zero_runtime.world import WorldSettings, join_world, leave_world

WARM_UP = 3  # steps of each point before the first turn
TURNS_S = 40.0  # time of the turns of a round
LEAST, MOST = 6, 24  # turns of a round
FINAL_STEPS = 4  # timed in a further turn: there are many, and each also makes one that is not timed
POLL_S = 0.5
LR = 1e-4


class Round(NamedTuple):
    """One round of a space: the answers of its jobs by key, and for each turn the seconds of each point's step."""

    answers: dict[str, Any]
    turns: list[list[float]]


class Final(NamedTuple):
    """Further turns: the places of the points that make them, and how many turns."""

    places: list[int]
    turns: int


class TimedPoint:
    """A point that is trained on one rank."""

    def __init__(self, config: RunConfig, device: torch.device, watch: RankWatch, rank: int, world: int) -> None:
        self._config, self._rank, self._world = config, rank, world
        self.runtime = build_runtime(config, device, watch).runtime
        self._data, self._index = build_data(config), 0

    def turn(self, steps: int = 1) -> float:
        """The mean seconds of steps that follow another of the same point, as in training.

        Afterwards no gather is under way that would run beside another point's step.
        """
        self.step()
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        seconds = (time.perf_counter() - begin) / steps
        if self._config.zero.plan.keeps_full_params:
            for unit in self.runtime.units:
                unit.wait_unshard()
        return seconds

    def step(self) -> None:
        """One step of the training loop."""
        config, runtime = self._config, self.runtime
        samples, micro = config.batch.global_size or 1, config.batch.micro
        offset, count = slice_for_rank(samples, self._rank, self._world)
        ids, labels = self._data.train_batch(self._index * samples + offset, count)
        self._index += 1
        tokens = runtime.sum_over_ranks(int((labels != -100).sum()))
        for start in range(0, count, micro):
            part = slice(start, start + micro)
            batch = torch.from_numpy(ids[part]), torch.from_numpy(labels[part])
            loss = token_losses(runtime.model, *batch, config.loss.tile_tokens) / tokens
            if config.zero.reduce_at_boundary and start + micro < count:
                with runtime.no_sync():
                    runtime.backward(loss)
            else:
                runtime.backward(loss)
            del loss
        runtime.step(LR)


def rank_main(
    rank: int,
    folder: str,
    jobs: Sequence[TimingJob],
    configs: Sequence[RunConfig],
    rounds: int,
    found: Connection,
    asked: SimpleQueue[Final],
) -> None:
    """All rounds and the further turns on this rank. All points are alive during all of them. Rank 0 sends the rounds,
    then each rank takes one answer about further turns, and rank 0 sends these: by turn the seconds of each point."""
    device, world = prepare_process(configs[0], rank), configs[0].resources.ranks or 1
    with join_world(Path(folder, "store"), rank, world, device, WorldSettings(watch=WatchSettings(300))) as watch:
        watch.journal.begin("start")
        points = [TimedPoint(config, device, watch, rank, world) for config in configs]
        for point in points:
            for _ in range(WARM_UP):
                point.step()
        repeated = Repeated(points[0].runtime.collectives, device)
        beside = {job.key: SegmentTurns(job.config, repeated, device, watch) for job in jobs if job.kind == "segments"}
        others = [job.plain() for job in jobs if job.key not in beside]
        measured = []
        for _ in range(rounds):
            answers = Calibration(device, watch, lambda _job, _answer: None).answers(others, math.inf)
            turns = _turns(points, list(beside.values()), repeated)
            measured.append(Round(answers | {key: one.answer() for key, one in beside.items()}, turns))
        if rank == 0:
            found.send(measured)
        final = asked.get()
        further = _further_turns([points[place] for place in final.places], final.turns, repeated)
        if rank == 0:
            found.send(further)
        for one in (*beside.values(), *(point.runtime for point in points)):
            one.close()
    leave_world()


def _turns(points: Sequence[TimedPoint], beside: Sequence[SegmentTurns], repeated: Repeated) -> list[list[float]]:
    """By turn the seconds of each point's step. Segments are timed in each turn."""
    gc.collect()
    gc.disable()  # one point's garbage must not be collected while another is timed
    began, found = time.perf_counter(), list[list[float]]()
    count = LEAST
    while len(found) < count:
        found.append(_turn(points, len(found), repeated))
        for one in beside:
            one.turn()
        if len(found) == 2:
            each_s = repeated.mean(time.perf_counter() - began) / len(found)
            count = min(max(int(TURNS_S / each_s), LEAST), MOST)
    gc.enable()
    return found


def _further_turns(points: Sequence[TimedPoint], count: int, repeated: Repeated) -> list[list[float]]:
    """By turn the mean seconds of each point's steps."""
    gc.collect()
    gc.disable()
    found = []
    for number in range(count):
        found.append(_turn(points, number, repeated, FINAL_STEPS))
        gc.collect(0)  # these are many turns; what they leave is in the youngest generation
    gc.enable()
    return found


def _turn(points: Sequence[TimedPoint], number: int, repeated: Repeated, steps: int = 1) -> list[float]:
    """The mean seconds of each point's steps. Each turn begins with another point."""
    seconds = [math.nan] * len(points)
    for which in rotated(range(len(points)), number):
        repeated.mean(0.0)  # ranks begin together
        seconds[which] = points[which].turn(steps)
    return seconds


def measured(
    jobs: Sequence[TimingJob], configs: Sequence[RunConfig], rounds: int, decide: Callable[[list[Round]], Final]
) -> dict[int, list[float]]:
    """Measures the rounds by processes that are started for them, and then the further turns that `decide` asks for.
    Returns the seconds of the latter, by the place of a point.

    Raises torch's ProcessException if a rank fails.
    """
    world = configs[0].resources.ranks or 1
    os.environ |= {TUNABLES: GLIBC, "OMP_NUM_THREADS": str(configs[0].resources.threads)}
    found, sender = multiprocessing.Pipe(duplex=False)
    asked: SimpleQueue[Final] = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        args = (folder, jobs, configs, rounds, sender, asked)
        # Daemons end with this process, also if it fails between the rounds and the answer that they wait for.
        ranks = torch.multiprocessing.start_processes(
            rank_main, args, nprocs=world, join=False, daemon=True, start_method="spawn"
        )
        final = decide(_received(found, ranks))
        for _ in range(world):
            asked.put(final)
        turns = _received(found, ranks)
        while not ranks.join():
            pass
    return {place: [turn[number] for turn in turns] for number, place in enumerate(final.places)}


def _received(found: Connection, ranks: torch.multiprocessing.ProcessContext) -> Any:
    """What rank 0 sends next; raises if a rank has failed."""
    while not found.poll(POLL_S):
        ranks.join(timeout=0)
    return found.recv()
