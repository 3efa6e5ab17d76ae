"""What Linux's batch class gains and costs CPU ranks: `python benchmarks/batch_class.py [--ranks 2] [--busy 4]`.

The same ranks take turns in the normal and in the batch class, alone and next to processes that compute all the time.
All threads of the ranks change their class at the beginning of a turn, so the two kinds of steps have the same model,
groups and memory. A short job (joining, making an engine, five steps) is timed in new ranks of each class, by turns.
Printed: the median of each kind, and the median of the ratios of neighbouring turns, batch to normal: below 1 the class
is faster.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # a first step would import it in each rank
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import zero_runtime  # noqa: E402
import zero_runtime.deepspeed.entry  # noqa: E402  # here, not in each rank
from benchmarks.stages_report import cpu_name  # noqa: E402
from zero_runtime import world  # noqa: E402

TURN_S = 0.5
CLASSES = {"normal": os.SCHED_OTHER, "batch": os.SCHED_BATCH}
CONTEXT = multiprocessing.get_context("fork")
Turns = dict[str, list[float]]  # by class, the milliseconds in each turn
Answer = Any  # a queue of one Turns


def enter(policy: int) -> None:
    """Give all threads of this process the class."""
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):  # a thread that has ended
            os.sched_setscheduler(int(task), policy, os.sched_param(0))


def engine_of(own: int, ranks: int, place: str, width: int) -> Callable[[], None]:
    """Joins, and makes an engine of stage 3; the function is one step of it."""
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
    batch = torch.randn(4, width)

    def step() -> None:
        engine.backward(engine(batch).square().mean())
        engine.step()

    return step


def rank_with_turns(own: int, ranks: int, place: str, width: int, turns: int, answer: Answer) -> None:
    """Train in turns of the two classes; rank 0 answers with the milliseconds of a step in each."""
    step, found = engine_of(own, ranks, place, width), {name: list[float]() for name in CLASSES}

    def steps() -> float:
        """Milliseconds of a step; rank 0 decides when a turn ends."""
        count, began = 0, time.perf_counter()
        goes_on = torch.ones(())
        while goes_on:
            step()
            count += 1
            goes_on.fill_(float(time.perf_counter() < began + TURN_S))
            dist.broadcast(goes_on, 0)
        return 1e3 * (time.perf_counter() - began) / count

    steps()
    for turn in range(turns):
        for name in CLASSES if turn % 2 == 0 else reversed(CLASSES):
            enter(CLASSES[name])
            found[name].append(steps())
    _answer(answer, own, found)


def rank_with_job(own: int, ranks: int, place: str, width: int, name: str, answer: Answer) -> None:
    """A short job in one class; rank 0 answers with its milliseconds."""
    if name == "normal":
        world._let_senders_finish = lambda: None
    began = time.perf_counter()
    step = engine_of(own, ranks, place, width)
    for _ in range(5):
        step()
    assert os.sched_getscheduler(0) == CLASSES[name]
    _answer(answer, own, {name: [1e3 * (time.perf_counter() - began)]})


def _answer(answer: Answer, own: int, found: Turns) -> None:
    dist.barrier()
    if own == 0:
        answer.put(found)
    time.sleep(60)  # until it is killed: nothing of a rank's end is measured


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


def answer_of(function: Callable[..., None], ranks: int, width: int, more: object) -> Turns:
    """What rank 0 of new ranks answers."""
    answer: Answer = CONTEXT.Queue()
    with (
        tempfile.TemporaryDirectory() as folder,
        started(function, [(own, ranks, f"{folder}/rendezvous", width, more, answer) for own in range(ranks)]),
    ):
        return answer.get()


@contextmanager
def started(function: Callable[..., None], arguments: Sequence[tuple[object, ...]]) -> Iterator[None]:
    """A forked process with each of the arguments, until the end of the block."""
    processes = [CONTEXT.Process(target=function, args=each, daemon=True) for each in arguments]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def jobs(ranks: int, width: int, turns: int) -> Turns:
    """The milliseconds of short jobs of each class, by turns."""
    found: Turns = {name: [] for name in CLASSES}
    for turn in range(turns):
        for name in CLASSES if turn % 2 == 0 else reversed(CLASSES):
            found[name] += answer_of(rank_with_job, ranks, width, name)[name]
    return found


def line(what: str, found: Turns) -> str:
    ratios = sorted(batch / normal for normal, batch in zip(found["normal"], found["batch"], strict=True))
    quarter = len(ratios) // 4
    medians = ", ".join(f"{name} {statistics.median(times):.1f} ms" for name, times in found.items())
    middle = f"{ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f}"
    return f"{what}: {medians}; ratio {statistics.median(ratios):.2f} ({middle})"


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
    print(f"{asked.ranks} ranks, medians of {asked.turns} turns; ratio: batch to normal, with its middle half")
    for busy, work, told in (
        (0, compute, "alone"),
        (asked.busy, compute, f"next to {asked.busy} that compute"),
        (asked.busy, wake_often, f"next to {asked.busy} that compute and sleep, 1 ms each"),
    ):
        with started(work, [()] * busy):
            steps = answer_of(rank_with_turns, asked.ranks, asked.width, asked.turns)
            print(line(f"{told}, a step", steps), flush=True)
            print(line(f"{told}, a short job", jobs(asked.ranks, asked.width, asked.turns)), flush=True)


if __name__ == "__main__":
    main()
