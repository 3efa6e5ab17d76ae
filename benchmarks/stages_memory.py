"""Measures peak memory and page faults of one row's training, in separate processes."""

from __future__ import annotations

import resource
import statistics
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpt import Gpt
from benchmarks.stages_contestants import batch_of, whole_step
from benchmarks.stages_task import SETTLED, STEADY, Task
from zero_runtime.watch.watch import RankWatch

MiB = 2**20


def measure_memory(task: Task, what: str, device: torch.device, watch: RankWatch) -> dict[str, float]:
    """Measures the memory of one row and its losses.

    Of the worse rank: peak MiB above the memory after the imports, in the complete run and in steady steps, and page
    faults of a step in percent of the unsharded fp32 parameters. Of all ranks: the loss of the first and the last step.
    """
    base = memory(device)
    step = whole_step(what, task, device, watch)
    losses = [step(batch_of(task, index, device)) for index in range(SETTLED)]
    whole = peak(device)
    forget_peak(device)
    faults = [page_faults()]
    for index in range(SETTLED, SETTLED + STEADY):
        losses.append(step(batch_of(task, index, device)))
        faults.append(page_faults())
    steady = peak(device)
    unsharded = 4 * sum(param.numel() for param in Gpt(task.size).parameters())
    share = 100 * resource.getpagesize() / unsharded
    of_step = [share * (after - before) for before, after in pairwise(faults)]
    found = {
        "whole": (max(whole, steady) - base) / MiB,
        "steady": (steady - base) / MiB,
        "faulted": statistics.median(of_step),
        "faulted_most": max(of_step),
        "base": base / MiB,
    }
    everyone: list[tuple[dict[str, float], list[float]]] = [({}, [])] * task.world
    dist.all_gather_object(everyone, (found, losses))
    worst = {name: max(rank[name] for rank, _ in everyone) for name in found}
    first, last = (sum(of_rank[index] for _, of_rank in everyone) for index in (0, -1))
    return worst | {"first_loss": first, "last_loss": last}


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
