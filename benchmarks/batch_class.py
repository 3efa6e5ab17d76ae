"""What Linux's batch class gains and costs CPU ranks: `python benchmarks/batch_class.py [--ranks 2] [--busy 4]`.

The same ranks take turns in the normal and in the batch class, alone and next to processes that compute all the time.
All threads of the ranks change their class, at nothing but the beginning of a turn, so the two kinds of steps have the
same model, groups and memory. Printed: the median step of each kind, and the median of the ratios of neighbouring
turns, batch to normal: below 1 the class is faster.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import zero_runtime  # noqa: E402
from benchmarks.stages_report import cpu_name  # noqa: E402

TURN_S = 0.5
CLASSES = {"normal": os.SCHED_OTHER, "batch": os.SCHED_BATCH}
Turns = dict[str, list[float]]  # by class, the milliseconds of a step in each turn


def enter(policy: int) -> None:
    """Give all threads of this process the class."""
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):  # a thread that has ended
            os.sched_setscheduler(int(task), policy, os.sched_param(0))


def rank(own: int, ranks: int, place: str, turns: int, width: int, answer: multiprocessing.Queue[Turns]) -> None:
    """Train a small model at stage 3 in turns of the two classes, and answer with the times of rank 0's steps."""
    torch.set_num_threads(1)
    zero_runtime.init_distributed(init_method=f"file://{place}", rank=own, world_size=ranks)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(8)))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    engine, *_ = zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)
    batch, found = torch.randn(4, width), {name: list[float]() for name in CLASSES}

    def steps(until: float) -> float:
        """Milliseconds of a step; rank 0 decides when a turn ends."""
        count, began = 0, time.perf_counter()
        goes_on = torch.ones(())
        while goes_on:
            engine.backward(engine(batch).square().mean())
            engine.step()
            count += 1
            goes_on.fill_(float(time.perf_counter() < until))
            dist.broadcast(goes_on, 0)
        return 1e3 * (time.perf_counter() - began) / count

    steps(time.perf_counter() + TURN_S)
    for turn in range(turns):
        for name in CLASSES if turn % 2 == 0 else reversed(CLASSES):
            enter(CLASSES[name])
            found[name].append(steps(time.perf_counter() + TURN_S))
    if own == 0:
        answer.put(found)
    dist.barrier()


def compute() -> None:
    while True:
        pass


def wake_often() -> None:
    """Half a core, in pieces of a millisecond."""
    while True:
        until = time.perf_counter() + 1e-3
        while time.perf_counter() < until:
            pass
        time.sleep(1e-3)


def measured(ranks: int, busy: int, work: Callable[[], None], turns: int, width: int) -> Turns:
    """The turns of `ranks` ranks next to `busy` processes that do `work`."""
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    others: list[BaseProcess] = [context.Process(target=work, daemon=True) for _ in range(busy)]
    with tempfile.TemporaryDirectory() as folder:
        place = str(Path(folder, "rendezvous"))
        own: list[BaseProcess] = [
            context.Process(target=rank, args=(one, ranks, place, turns, width, answer), daemon=True)
            for one in range(ranks)
        ]
        for process in own + others:
            process.start()
        found: Turns = answer.get()
        for process in own:
            process.join()
    for process in others:
        process.kill()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--busy", type=int, default=4)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--width", type=int, default=128)
    asked = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    load = f"load of others {os.getloadavg()[0]:.1f}"
    print(f"{cpu_name()}, {cores} cores, {load}, Linux {os.uname().release}, torch {torch.__version__}")
    for busy, work, told in (
        (0, compute, "alone"),
        (asked.busy, compute, f"next to {asked.busy} that compute"),
        (asked.busy, wake_often, f"next to {asked.busy} that compute and sleep, 1 ms each"),
    ):
        found = measured(asked.ranks, busy, work, asked.turns, asked.width)
        ratios = sorted(batch / normal for normal, batch in zip(found["normal"], found["batch"], strict=True))
        quarter = len(ratios) // 4
        medians = ", ".join(f"{name} {statistics.median(times):.1f} ms" for name, times in found.items())
        middle = f"{ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f} in the middle half of {asked.turns} turns"
        print(f"{told}: {medians}; ratio {statistics.median(ratios):.2f} ({middle})", flush=True)


if __name__ == "__main__":
    main()
