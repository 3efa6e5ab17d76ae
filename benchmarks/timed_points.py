"""The ranks of predicted_speed.py: they measure the parts of a step, and the steps of all points by turns."""

from __future__ import annotations

import gc
import math
import os
import pickle
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from orchestrator.config.schema import RunConfig
from orchestrator.launch.environment import GLIBC, TUNABLES
from orchestrator.plan.speed import TimingJob
from orchestrator.worker.calibrate import Calibration, SegmentTurns
from orchestrator.worker.setup import build_data, build_runtime, prepare_process
from orchestrator.workloads.data import slice_for_rank
from orchestrator.workloads.models import token_losses
from zero_runtime.timing.machine_timer import Repeated
from zero_runtime.watch.watch import RankWatch, WatchSettings
from zero_runtime.world import WorldSettings, join_world, leave_world

WARM_UP = 3  # steps of each point before the first turn
TURNS_S = 40.0  # time of the turns of a round
LEAST, MOST = 6, 24  # turns of a round
LR = 1e-4


class Round(NamedTuple):
    """One round of a space: the answers of its jobs by key, and for each turn the seconds of each point's step."""

    answers: dict[str, Any]
    turns: list[list[float]]


class TimedPoint:
    """A point that is trained on one rank."""

    def __init__(self, config: RunConfig, device: torch.device, watch: RankWatch, rank: int, world: int) -> None:
        self._config, self._rank, self._world = config, rank, world
        self.runtime = build_runtime(config, device, watch).runtime
        self._data, self._index = build_data(config), 0

    def turn(self) -> float:
        """The seconds of a step that follows another of the same point, as in training.

        Afterwards no gather is under way that would run beside another point's step.
        """
        self.step()
        begin = time.perf_counter()
        self.step()
        seconds = time.perf_counter() - begin
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
    rank: int, world: int, folder: str, jobs: Sequence[TimingJob], configs: Sequence[RunConfig], rounds: int
) -> None:
    """All rounds on this rank. All points are alive during all of them. Rank 0 writes what it has measured."""
    device = prepare_process(configs[0], rank)
    with join_world(Path(folder, "store"), rank, world, device, WorldSettings(watch=WatchSettings(300))) as watch:
        watch.journal.begin("start")
        points = [TimedPoint(config, device, watch, rank, world) for config in configs]
        for point in points:
            for _ in range(WARM_UP):
                point.step()
        repeated = Repeated(points[0].runtime.collectives, device)
        beside = {job.key: SegmentTurns(job.config, repeated, device, watch) for job in jobs if job.kind == "segments"}
        others = [job.plain() for job in jobs if job.key not in beside]
        found = []
        for _ in range(rounds):
            answers = Calibration(device, watch, lambda _job: None).answers(others, math.inf)
            turns = _turns(points, list(beside.values()), repeated)
            found.append(Round(answers | {key: one.answer() for key, one in beside.items()}, turns))
        for one in (*beside.values(), *(point.runtime for point in points)):
            one.close()
    if rank == 0:
        Path(folder, "found").write_bytes(pickle.dumps(found))
    leave_world()


def _turns(points: Sequence[TimedPoint], beside: Sequence[SegmentTurns], repeated: Repeated) -> list[list[float]]:
    """By turn the seconds of each point's step. Each turn begins with another point, and segments are timed in it."""
    gc.collect()
    gc.disable()  # one point's garbage must not be collected while another is timed
    began, found = time.perf_counter(), []
    count = LEAST
    while len(found) < count:
        seconds = [math.nan] * len(points)
        for place in range(len(points)):
            which = (place + len(found)) % len(points)
            repeated.mean(0.0)  # ranks begin together
            seconds[which] = points[which].turn()
        for one in beside:
            one.turn()
        found.append(seconds)
        if len(found) == 2:
            each_s = repeated.mean(time.perf_counter() - began) / len(found)
            count = min(max(int(TURNS_S / each_s), LEAST), MOST)
    gc.enable()
    return found


def measured(jobs: Sequence[TimingJob], configs: Sequence[RunConfig], rounds: int) -> list[Round]:
    """The rounds, by processes that are started for them."""
    world = configs[0].resources.ranks or 1
    os.environ |= {TUNABLES: GLIBC, "OMP_NUM_THREADS": str(configs[0].resources.threads)}
    with tempfile.TemporaryDirectory() as folder:
        args = (world, folder, jobs, configs, rounds)
        torch.multiprocessing.start_processes(rank_main, args, nprocs=world, start_method="spawn")
        found: list[Round] = pickle.loads(Path(folder, "found").read_bytes())
    return found
