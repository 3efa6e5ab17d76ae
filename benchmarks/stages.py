"""Compares a training step of each ZeRO stage with the machine's limits. sweeps/engines.yaml compares engines.

A row should take (forward + backward alone) + (each of its parts alone), see PARTS. All are measured in the
same processes and from equal states (stages_contestants.py), stepped in turn, so that a drifting host affects them
equally. --memory runs each row in separate processes and measures the peak memory and the page faults of its steady
steps.

`python benchmarks/stages.py [--precision fp32|bf16] [--comm shm|gloo] [--rounds N] [--memory] [--layers ..]`; writes
results/,
unless a row's first loss differs from the loss that the untrained model must have.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.gpt import GptSize, starting_loss_trouble  # noqa: E402
from benchmarks.stages_contestants import Batch, batch_of, parts_alone, whole_step  # noqa: E402
from benchmarks.stages_memory import measure_memory  # noqa: E402
from benchmarks.stages_report import machine_now, write_report  # noqa: E402
from benchmarks.stages_task import LIMIT, ROWS, WARMUP, Task  # noqa: E402
from zero_runtime.watch.watch import RankWatch  # noqa: E402
from zero_runtime.world import WorldSettings, join_world, leave_world  # noqa: E402

# Those of our launcher (orchestrator/launch/environment.py, which a machine with torch alone cannot import).
GLIBC = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=8589934592:glibc.malloc.hugetlb=1"


def main() -> None:
    args = arguments()
    world = args.world or (torch.cuda.device_count() or 2)
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // world, 1)))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    size = GptSize(args.layers, args.width, args.heads, args.vocab, args.seq, args.micro)
    found: dict[str, Any] = {"command": " ".join(["python benchmarks/stages.py", *sys.argv[1:]]), **machine_now()}
    with tempfile.TemporaryDirectory() as folder:
        task = Task(folder, world, size, args.precision, args.rounds, args.comm)
        found |= {"task": {**asdict(task), "warmup": WARMUP}, "memory": {}}
        del found["task"]["folder"]
        for name in (LIMIT, *ROWS) if args.memory else ():
            found["memory"][name] = on_ranks(measure_memory, task, name)
            refuse_wrong_start(task, {name: found["memory"][name]["first_loss"]})
        found |= on_ranks(measure_time, task, "time")
    refuse_wrong_start(task, {name: losses[0] for name, losses in found["losses"].items()})
    write_report(found, ROOT / "benchmarks" / "results")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--world", type=int, default=None)
    parser.add_argument("--comm", choices=["auto", "shm", "gloo"], default="auto", help="over what CPU ranks talk")
    parser.add_argument("--memory", action="store_true", help="peak memory and page faults of each row")
    for name, value in asdict(GptSize()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


def refuse_wrong_start(task: Task, losses: dict[str, float]) -> None:
    trouble = starting_loss_trouble(task.size, task.tokens, losses)
    if trouble:
        sys.exit(f"stages.py: {trouble}")


# ---- on the ranks ----------------------------------------------------------------------------------------------------


def on_ranks(measure: Callable[..., Any], task: Task, what: str) -> Any:
    """Runs `measure(task, what, ...)` on fresh ranks, and returns the result of rank 0."""
    print(f"measuring {what} ...", flush=True)
    os.environ["GLIBC_TUNABLES"] = GLIBC
    mp.spawn(rank_main, (measure, task, what), nprocs=task.world)
    return json.loads(Path(task.folder, "found.json").read_text())


def rank_main(rank: int, measure: Callable[..., Any], task: Task, what: str) -> None:
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with join_world(f"file://{task.folder}/{what}", rank, task.world, device, WorldSettings(comm=task.comm)) as watch:
        found = measure(task, what, device, watch)
        if rank == 0:
            Path(task.folder, "found.json").write_text(json.dumps(found))
        dist.barrier()
    leave_world()


def measure_time(task: Task, _what: str, device: torch.device, watch: RankWatch) -> dict[str, Any]:
    """Per row, one per round: seconds of the slower rank after the warm-up, and losses from the first step on.

    `seconds` also has an entry for each part of a row, named `<row> <part>` with one of PARTS.
    """
    whole = {name: whole_step(name, task, device, watch) for name in (LIMIT, *ROWS)}
    parts = {
        f"{name} {part}": step
        for name, stage in ROWS.items()
        for part, step in parts_alone(stage, task, device, watch).items()
    }
    contestants: dict[str, Callable[[Batch], Any]] = {**whole, **parts}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    losses: dict[str, list[float]] = {name: [] for name in whole}
    gc.collect()
    gc.disable()  # one contestant's garbage must not be collected while another is timed
    for index in range(WARMUP + task.rounds):
        batch = batch_of(task, index, device)
        for name in in_turn(list(contestants), index):
            seconds, loss = timed(contestants[name], batch, device)
            times[name].append(seconds)
            if name in losses:
                losses[name].append(loss)
        gc.collect()
    everyone: list[tuple[dict[str, list[float]], dict[str, list[float]]]] = [({}, {})] * task.world
    dist.all_gather_object(everyone, (times, losses))
    return {
        "seconds": {
            name: [max(one) for one in zip(*(of_rank[name] for of_rank, _ in everyone), strict=True)][WARMUP:]
            for name in times
        },
        "losses": {
            name: [sum(one) for one in zip(*(of_rank[name] for _, of_rank in everyone), strict=True)] for name in losses
        },
    }


def in_turn(names: list[str], index: int) -> list[str]:
    """The order of a round, the same on every rank; random, so that no contestant always inherits the same caches."""
    return random.Random(index).sample(names, len(names))


def timed(step: Callable[[Batch], Any], batch: Batch, device: torch.device) -> tuple[float, Any]:
    """Seconds from a common start until this rank's device has finished the step, and the result of the step."""
    dist.barrier()
    start = time.perf_counter()
    loss = step(batch)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, loss


if __name__ == "__main__":
    main()
