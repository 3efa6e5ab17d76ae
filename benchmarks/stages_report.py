"""What benchmarks/stages.py found, as a table in markdown and as JSON."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch
from stages_task import LIMIT, ROWS, SETTLED, STEADY, WARMUP, Task

ROOT = Path(__file__).resolve().parents[1]


def report_lines(task: Task, seconds: dict[str, list[float]], memory: dict[str, dict[str, float]]) -> list[str]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    lines = [
        f"# A step of each stage, {date.today()}",
        "",
        f"{task.world} x {device}; torch {torch.__version__}, Python {platform.python_version()}{peer_versions(task)}; "
        f"{task.precision}, {asdict(task.size)}; {task.rounds} rounds after {WARMUP}.",
        "",
        f"Command: `python benchmarks/stages.py {' '.join(sys.argv[1:])}`".rstrip(),
        "",
        "ms of the slower rank. `of the parts`: (forward + backward alone + the row's collectives alone + its",
        "optimizer alone) / row. Shares are medians over the rounds of the ratio within a round.",
        "",
        "| row | ms median | min | max | of forward+backward | collectives alone | optimizer alone | of the parts |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in (LIMIT, *ROWS, *task.peers):
        own = seconds[name]
        cells = [f"{1e3 * value:.0f}" for value in (statistics.median(own), min(own), max(own))]
        cells.append(share(seconds[LIMIT], own))
        if name in ROWS:
            parts = [seconds[f"{name} {part}"] for part in ("collectives", "optimizer")]
            cells += [f"{1e3 * statistics.median(part):.0f}" for part in parts]
            cells.append(share([sum(one) for one in zip(seconds[LIMIT], *parts, strict=True)], own))
        else:
            cells += [""] * 3
        lines.append(f"| {name} | {' | '.join(cells)} |")
    if memory:
        lines += ["", *memory_lines(memory)]
    return lines


def share(parts: list[float], whole: list[float]) -> str:
    return f"{100 * statistics.median(part / one for part, one in zip(parts, whole, strict=True)):.0f} %"


def memory_lines(memory: dict[str, dict[str, float]]) -> list[str]:
    lines = [
        "Peak memory of the worse rank above what the imports took, each variant in processes of its own (the peers",
        "with the allocator's defaults); page faults of a step as a share of the unsharded fp32 parameters, over steps",
        f"{SETTLED + 1} to {SETTLED + STEADY} (a heap that still settles grows now and then); the loss of the last.",
        "",
        "| row | peak MiB, steady | peak MiB, with the start | faulted %, median step | faulted %, most | loss |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in memory.items():
        cells = [f"{found['steady']:.0f}", f"{found['whole']:.0f}", f"{found['faulted']:.2f}"]
        cells += [f"{found['faulted_most']:.2f}", f"{found['loss']:.4f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def write_report(lines: list[str], numbers: dict[str, Any], args: argparse.Namespace) -> None:
    results = ROOT / "benchmarks" / "results"
    results.mkdir(exist_ok=True)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    stem = results / f"stages_{kind}_{args.precision}_{date.today()}"
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    del numbers["task"]["folder"]
    stem.with_suffix(".json").write_text(json.dumps(numbers))
    print("\n".join(lines))
    print(f"\nwritten: {stem.relative_to(ROOT)}.md")


def peer_versions(task: Task) -> str:
    from importlib.metadata import version

    return f", DeepSpeed {version('deepspeed')}" if any(name.startswith("deepspeed") for name in task.peers) else ""


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
