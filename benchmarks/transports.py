"""Collectives of CPU ranks over shm and gloo, beside a memory copy: `python benchmarks/transports.py [--ranks 2]`.

Both transports have a group of the same ranks, and take turns: each round has every collective of every size once over
each. Tensors are fp32 and were written before. Printed and kept in results/: the medians of the slower rank, and that
of copying as many bytes as a rank receives from one tensor to another, on all ranks at once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.stages_report import cpu_name  # noqa: E402
from zero_runtime.gloo import messages_over  # noqa: E402
from zero_runtime.world import cpu_backend  # noqa: E402

MIB = (0, 1, 12, 64)  # of the larger tensor; 0: one element a rank
TRANSPORTS = ("shm", "gloo")
COPY = "memory copy"
WARMUP = 2
Key = tuple[str, int, str]  # collective, MiB, transport


def calls(group: dist.ProcessGroup, nbytes: int) -> dict[str, Callable[[], object]]:
    """The collectives of one group over tensors of so many bytes, each blocking."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    full = torch.ones(max(ranks, nbytes // 4 // ranks * ranks))
    shard, total = torch.ones(full.numel() // ranks), torch.ones(full.numel() // ranks)
    messages, summed = messages_over(group), torch.ones_like(full)
    assert full.chunk(ranks)[rank].numel() == shard.numel()
    return {
        "all_gather": lambda: messages.all_gather(full, shard)(),
        "reduce_scatter": lambda: messages.reduce_scatter(total, full)(),
        "all_reduce": lambda: messages.all_reduce(summed)(),
        "torch's all_reduce": partial(dist.all_reduce, summed, group=group),
    }


def measure(rank: int, ranks: int, rounds: int, folder: str) -> None:
    """On each rank; rank 0 writes the milliseconds of the slower rank by collective, size and transport."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    contestants: dict[Key, Callable[[], object]] = {}
    for mib in MIB:
        for name in TRANSPORTS:
            group = dist.new_group(backend=cpu_backend(name, ranks))
            assert group is not None
            contestants |= {(what, mib, name): call for what, call in calls(group, mib * 2**20).items()}
        received = torch.ones(max(1, mib * 2**18 // ranks * (ranks - 1)))
        source = torch.ones_like(received)
        contestants["all_gather", mib, COPY] = partial(received.copy_, source)
    found: dict[Key, list[float]] = {key: [] for key in contestants}
    for _ in range(WARMUP + rounds):
        for key, call in contestants.items():
            dist.barrier()
            began = time.perf_counter()
            call()
            found[key].append((time.perf_counter() - began) * 1e3)
    of_ranks: list[dict[Key, list[float]]] = [{}] * ranks
    dist.all_gather_object(of_ranks, found)
    if rank == 0:
        slower = {
            key: statistics.median(
                max(both) for both in list(zip(*(one[key] for one in of_ranks), strict=True))[WARMUP:]
            )
            for key in found
        }
        Path(folder, "table.md").write_text("\n".join(table(slower)) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def table(found: dict[Key, float]) -> list[str]:
    """A row for each size and collective, in milliseconds."""
    lines = [f"| MiB | collective | {' | '.join(TRANSPORTS)} | gloo / shm | {COPY} |", "|---:|---|---:|---:|---:|---:|"]
    for what, mib, transport in found:
        if transport == TRANSPORTS[0]:
            shm, gloo = (found[what, mib, one] for one in TRANSPORTS)
            copy = found.get((what, mib, COPY))
            size = "one element" if mib == 0 else str(mib)
            told = "" if copy is None else f"{copy:.2f}"
            lines.append(f"| {size} | {what} | {shm:.2f} | {gloo:.2f} | {gloo / shm:.1f} | {told} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    asked = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (asked.ranks, asked.rounds, folder), nprocs=asked.ranks)
        lines = Path(folder, "table.md").read_text()
    command = " ".join(["python benchmarks/transports.py", *sys.argv[1:]])
    machine = f"{asked.ranks} ranks on {cpu_name()} ({os.cpu_count()} cores), torch {torch.__version__}"
    what = f"Medians of {asked.rounds} rounds in milliseconds; the first three collectives as the runtime calls them."
    head = f"# Collectives of CPU ranks\n\n`{command}`: {machine}. {what}\n\n"
    kept = ROOT / "benchmarks" / "results" / f"transports_cpu_{date.today()}.md"
    kept.write_text(head + lines)
    print(f"{head}{lines}\nwritten: {kept}")


if __name__ == "__main__":
    main()
