"""Measures how well the reference work of `orchestrator/worker/core_speed.py` tells the speed of a core.

`python benchmarks/core_speed.py [--processes N] [--rounds N] [--write]`. Processes that train the same small model take
turns, as the points of a sweep do. Next to each step they time the reference work, and sums over arrays of several
sizes at the beginning of one huge page. Two things are told of each: whether it is as fast in one process as in
another (the standard deviation of the processes' means, and which one their rounds explain), and how much it slows down
together with the step (the correlation of logarithms of ratios, round by round, of processes that follow each other).
`--write` writes results/core_speed_cpu_DATE.md and .json. Two and a half minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.gpt import Gpt, GptSize  # noqa: E402
from benchmarks.stages_report import cpu_name  # noqa: E402
from orchestrator.worker import core_speed  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
SIZE = GptSize(layers=2, width=128, heads=4, vocab=1024, seq=64, micro=4)
SUM_KIB = (16, 64, 128, 512)  # of one of two arrays
SUMMED_KIB = 10240  # by all sums of a size together
TURN_S = 0.6
Logs = list[list[float]]  # by round, the mean logarithm of each row's milliseconds
NAMES = ("a step", "the reference work", *(f"sums over two arrays of {kib} KiB" for kib in SUM_KIB))


def timed_ms(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - began)


@torch.no_grad()
def summed(whole: torch.Tensor, kib: int) -> None:
    """Sums over the first of two arrays of this size, into the second."""
    values, sums = whole[: 512 * kib].view(2, 256 * kib)
    for _ in range(SUMMED_KIB // kib):
        torch.add(values, 1.0, out=sums)


def process(commander: Connection) -> None:
    """Trains for TURN_S whenever it is told to, and answers with the mean logarithms of the times of NAMES."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Gpt(SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(SIZE.vocab, (SIZE.micro, SIZE.seq + 1))
    reference = core_speed.ReferenceWork(uses_cores=True)
    page = core_speed.huge_page()
    whole = torch.frombuffer(page, dtype=torch.float32)
    whole = whole[-whole.data_ptr() % core_speed.PAGE_BYTES // whole.itemsize :]

    def step() -> None:
        F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    def times() -> list[float]:
        took_ms = [timed_ms(step), reference.timed_ms() or 0.0]
        return took_ms + [timed_ms(lambda kib=kib: summed(whole, kib)) for kib in SUM_KIB]

    for _ in range(10):
        times()
    commander.send([])
    while commander.recv():
        times()  # the caches are as another process left them
        until, taken = time.perf_counter() + TURN_S, list[list[float]]()
        while time.perf_counter() < until:
            taken.append([math.log(one) for one in times()])
        commander.send([statistics.mean(row) for row in zip(*taken, strict=True)])


def measured(processes: int, rounds: int) -> list[Logs]:
    """What each process answered in each round; their order changes from round to round."""
    context = multiprocessing.get_context("spawn")
    ends, started = list[Connection](), list[multiprocessing.process.BaseProcess]()
    for _ in range(processes):
        own, its = context.Pipe()
        ends.append(own)
        started.append(context.Process(target=process, args=(its,), daemon=True))
        started[-1].start()
    for end in ends:
        end.recv()
    found: list[Logs] = [[] for _ in ends]
    for turn in range(rounds):
        order = [(place + turn) % processes for place in range(processes)]
        for one in order if turn % 2 == 0 else reversed(order):
            ends[one].send(True)
            found[one].append(ends[one].recv())
    for end, child in zip(ends, started, strict=True):
        end.send(False)
        child.join()
    return found


def row_of(found: Sequence[Logs], row: int) -> dict[str, float]:
    """What is told of a row of NAMES; spreads are relative standard deviations."""
    rounds = len(found[0])
    values = [[answer[row] for answer in each] for each in found]
    means = [statistics.mean(each[turn] for each in values) for turn in range(rounds)]
    apart = [[value - mean for value, mean in zip(each, means, strict=True)] for each in values]
    pairs = [(found[one - 1], found[one]) for one in range(len(found))]
    return {
        "ms": math.exp(statistics.mean(means)),
        "between": statistics.stdev(map(statistics.mean, apart)),
        "explained": statistics.mean(map(statistics.stdev, apart)) / math.sqrt(rounds),
        "with_step": statistics.mean(
            statistics.correlation(*([b[at] - a[at] for a, b in zip(*pair, strict=True)] for at in (0, row)))
            for pair in pairs
        ),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--processes", type=int, default=8, help="default: 8")
    parser.add_argument("--rounds", type=int, default=24, help="default: 24")
    parser.add_argument("--write", action="store_true", help="write results/core_speed_cpu_DATE.md and .json")
    asked = parser.parse_args()
    found = measured(asked.processes, asked.rounds)
    rows = {name: row_of(found, row) for row, name in enumerate(NAMES)}
    typed = " ".join(["python benchmarks/core_speed.py", *sys.argv[1:]])
    lines = [
        "# Whether the reference work tells the speed of a core",
        "",
        f"`{typed}`, {date.today()}, {cpu_name()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"{asked.processes} processes that took {asked.rounds} turns each",
        "",
        "| work | ms | between processes | explained by their rounds | correlation with the step |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {one['ms']:.2f} | {one['between']:.2%} | {one['explained']:.2%} | {one['with_step']:.2f} |"
            for name, one in rows.items()
        ),
    ]
    print("\n".join(lines))
    if asked.write:
        path = RESULTS / f"core_speed_cpu_{date.today()}.md"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        path.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
