"""One training step of each ZeRO stage, against the machine's own limits and, with --peers, FSDP2 and DeepSpeed.

A row should take (forward + backward alone) + (its collectives alone) + (its optimizer alone). All are measured in the
same processes, stepped in turn, so that a drifting host moves all alike. --memory starts each variant in processes of
its own and measures the peak memory and the page faults of its steady steps.
`python benchmarks/stages.py [--precision fp32|bf16] [--rounds N] [--peers] [--memory] [--layers ..]`; writes results/.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from gpt import Gpt, GptSize, loss_of  # noqa: E402
from peers import LR, WEIGHT_DECAY, Batch, peer_step, peers_here  # noqa: E402
from stages_report import report_lines, write_report  # noqa: E402
from stages_task import LIMIT, ROWS, SETTLED, STEADY, WARMUP, Task  # noqa: E402

from zero_runtime.collectives import Collectives, WorldSettings, join_world, leave_world  # noqa: E402
from zero_runtime.optimizers import AdamWConfig  # noqa: E402
from zero_runtime.plan import ZeroPlan  # noqa: E402
from zero_runtime.precision import MixedPrecision  # noqa: E402
from zero_runtime.rank_watch import RankWatch  # noqa: E402
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime  # noqa: E402

MiB = 2**20
GLIBC = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=8589934592"  # freed blocks stay: no page faults


def main() -> None:
    args = arguments()
    world = args.world or (torch.cuda.device_count() or 2)
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // world, 1)))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    size = GptSize(args.layers, args.width, args.heads, args.vocab, args.seq, args.micro)
    peers = tuple(peers_here()) if args.peers else ()
    with tempfile.TemporaryDirectory() as folder:
        task = Task(folder, world, size, args.precision, args.rounds, peers)
        memory = {name: on_ranks(measure_memory, task, name) for name in (LIMIT, *ROWS, *peers) if args.memory}
        seconds = on_ranks(measure_time, task, "time")
    write_report(
        report_lines(task, seconds, memory), {"seconds": seconds, "memory": memory, "task": asdict(task)}, args
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--world", type=int, default=None)
    parser.add_argument("--peers", action="store_true", help="FSDP2 and, where installed, DeepSpeed beside the rows")
    parser.add_argument("--memory", action="store_true", help="peak memory and page faults of each row")
    for name, value in asdict(GptSize()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


# ---- on the ranks ----------------------------------------------------------------------------------------------------


def on_ranks(measure: Callable[..., Any], task: Task, what: str) -> Any:
    """`measure(task, what, ...)` on fresh ranks; what rank 0 returned."""
    print(f"measuring {what} ...", flush=True)
    # The allocator as our launcher sets it; a peer whose memory is measured has the defaults that its users have.
    os.environ["GLIBC_TUNABLES"] = "" if what in task.peers else GLIBC
    mp.spawn(rank_main, (measure, task, what), nprocs=task.world)
    return json.loads(Path(task.folder, "found.json").read_text())


def rank_main(rank: int, measure: Callable[..., Any], task: Task, what: str) -> None:
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if what.startswith("deepspeed") or task.peers:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(task.world)}
    with join_world(f"file://{task.folder}/{what}", rank, task.world, device, WorldSettings()) as watch:
        found = measure(task, what, device, watch)
        if rank == 0:
            Path(task.folder, "found.json").write_text(json.dumps(found))
        dist.barrier()
    leave_world()


def batch_of(task: Task, device: torch.device) -> Batch:
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(task.size.vocab, (task.size.micro, task.size.seq + 1), generator=generator).to(device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def build(name: str, task: Task, device: torch.device, watch: RankWatch) -> Callable[[], float]:
    """A whole step of one variant, which returns this rank's share of the loss."""
    batch = batch_of(task, device)
    tokens = batch[1].numel() * task.world
    if name == LIMIT:
        torch.manual_seed(0)
        return limit_step(Gpt(task.size).to(device, half_or_not(task.precision)), batch, tokens)
    if name in ROWS:
        return row_step(make_runtime(ROWS[name], task, device, watch), batch, tokens)
    return peer_step(name, task.size, task.precision, device, batch)


def half_or_not(precision: str) -> torch.dtype:
    return torch.bfloat16 if precision == "bf16" else torch.float32


def limit_step(model: Gpt, batch: Batch, tokens: int) -> Callable[[], float]:
    def step() -> float:
        loss = loss_of(model, *batch) / tokens
        loss.backward()
        model.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def make_runtime(stage: int, task: Task, device: torch.device, watch: RankWatch) -> ZeroRuntime:
    torch.manual_seed(0)
    return ZeroRuntime(
        Gpt(task.size),
        ZeroPlan.from_stage(stage),
        MixedPrecision(task.precision),
        AdamWConfig(weight_decay=WEIGHT_DECAY, no_decay=False),
        RuntimeSettings(watch=watch),
        device,
    )


def row_step(runtime: ZeroRuntime, batch: Batch, tokens: int) -> Callable[[], float]:
    def step() -> float:
        runtime.backward(loss_of(runtime.model, *batch) / tokens)
        loss = runtime.step(LR).loss / dist.get_world_size()
        runtime.clock.lap()  # as whoever shows phases does each step; its marks would grow without end
        return loss

    return step


def optimizer_alone(runtime: ZeroRuntime, batch: Batch, tokens: int) -> Callable[[], None]:
    """The row's update of its shards, again and again from one gradient."""
    runtime.backward(loss_of(runtime.model, *batch) / tokens)
    unscaled = torch.ones((), device=runtime.device)
    return lambda: runtime.optimizer.step(LR, unscaled)


def collectives_alone(runtime: ZeroRuntime, row: Callable[[], float]) -> Callable[[], None]:
    """What the row's step sends, one after another and nothing beside it, between buffers that are there already."""
    row()
    runtime.reset_ledger()
    row()
    sent = runtime.reset_ledger().data
    gathers = sent["all_gather"].calls // len(runtime.units) if "all_gather" in sent else 0
    alone = Collectives(runtime.plan.shard_count(dist.get_world_size()), runtime.clock)
    buffers = []
    for unit in runtime.units:
        full = torch.zeros(unit.layout.padded_numel, device=runtime.device)
        own = slice(*unit.layout.shard_range(alone.shard_rank))
        param = full.to(half_or_not(runtime.precision.param))
        buffers.append((param, param[own].clone(), full, full[own]))

    def step() -> None:
        for param, shard, grad, summed in buffers:
            for _ in range(gathers):
                alone.all_gather(param, shard).wait()
            alone.reduce(grad, summed).wait()

    return step


def measure_time(task: Task, _what: str, device: torch.device, watch: RankWatch) -> dict[str, list[float]]:
    """Seconds of the slower rank by variant: whole steps, and a row's parts as `<row> collectives` and `optimizer`."""
    batch = batch_of(task, device)
    tokens = batch[1].numel() * task.world
    variants: dict[str, Callable[[], Any]] = {LIMIT: build(LIMIT, task, device, watch)}
    for name, stage in ROWS.items():
        runtime = make_runtime(stage, task, device, watch)
        variants[name] = row_step(runtime, batch, tokens)
        variants[f"{name} collectives"] = collectives_alone(runtime, variants[name])
        variants[f"{name} optimizer"] = optimizer_alone(make_runtime(stage, task, device, watch), batch, tokens)
    variants |= {name: build(name, task, device, watch) for name in task.peers}
    gc.collect()
    gc.disable()  # one variant's garbage must not be collected in another's time
    times: dict[str, list[float]] = {name: [] for name in variants}
    for round_index in range(WARMUP + task.rounds):
        for name, step in variants.items():
            seconds = timed(step, device)
            if round_index >= WARMUP:
                times[name].append(seconds)
        gc.collect()
    everyone: list[dict[str, list[float]]] = [{} for _ in range(task.world)]
    dist.all_gather_object(everyone, times)
    return {name: [max(one) for one in zip(*(rank[name] for rank in everyone), strict=True)] for name in times}


def timed(step: Callable[[], Any], device: torch.device) -> float:
    """Seconds from a common start until this rank's device has done the step."""
    dist.barrier()
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure_memory(task: Task, what: str, device: torch.device, watch: RankWatch) -> dict[str, float]:
    """Of the worse rank: MiB above what the imports took, in the whole run and in steady steps; faults of a step."""
    base = memory(device)
    step = build(what, task, device, watch)
    losses = [step() for _ in range(SETTLED)]
    whole = peak(device)
    forget_peak(device)
    faults = [page_faults()]
    for _ in range(STEADY):
        losses.append(step())
        faults.append(page_faults())
    steady = peak(device)
    unsharded = 4 * sum(param.numel() for param in Gpt(task.size).parameters())
    share = 100 * resource.getpagesize() / unsharded
    of_step = [share * (after - before) for before, after in pairwise(faults)]
    found = [(max(whole, steady) - base) / MiB, (steady - base) / MiB]
    found += [statistics.median(of_step), max(of_step), losses[-1]]
    everyone: list[list[float]] = [[] for _ in range(task.world)]
    dist.all_gather_object(everyone, found)
    *worst, _ = [max(values) for values in zip(*everyone, strict=True)]
    return dict(
        zip(
            ("whole", "steady", "faulted", "faulted_most", "loss"),
            [*worst, sum(one[-1] for one in everyone)],
            strict=True,
        )
    )


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def memory(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else status_bytes("VmRSS")


def peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else status_bytes("VmHWM")


def forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


if __name__ == "__main__":
    main()
