"""The optimizer's step over a scratch file, beside raw direct reads and writes of as many bytes in the same file.

`python benchmarks/nvme.py [--rounds N] [--folder PATH] [--block-mib N] [--requests N] [--ahead N]`; writes
benchmarks/results/. One rank, 50 M parameters in bf16 with fp32 masters and moments at rest in the file: each step
reads and writes 12 bytes a parameter. raw: the same file, block size and number of requests, each block read and
written back, without checksums or arithmetic. in memory: the same step without offload.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from stages_report import cpu_name  # noqa: E402

from zero_runtime.birth import parameters_on_meta  # noqa: E402
from zero_runtime.offload import OffloadPlan, Tier  # noqa: E402
from zero_runtime.optimizers import AdamWConfig  # noqa: E402
from zero_runtime.plan import ZeroPlan  # noqa: E402
from zero_runtime.precision import MixedPrecision  # noqa: E402
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime  # noqa: E402
from zero_runtime.tiers.scratch import ScratchSettings, aligned_buffer  # noqa: E402

WIDTH, BLOCKS = 2048, 12  # 50.3 M parameters in blocks of 4.2 M


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the drive to measure")
    parser.add_argument("--block-mib", type=int, default=4)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--ahead", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        scratch = ScratchSettings(Path(folder), args.block_mib << 20, args.requests, args.ahead)
        rows = {
            "step, verified": build(replace(scratch, verify=True)),
            "step, not verified": build(replace(scratch, verify=False)),
            "step in memory": build(None),
        }
        parameters = sum(unit.layout.numel for unit in rows["step in memory"].units)
        raws = {name: Raw(runtime, scratch) for name, runtime in rows.items() if runtime.scratch_bytes}
        times: dict[str, list[float]] = {name: [] for name in rows}
        limits: dict[str, list[float]] = {name: [] for name in raws}
        for round_index in range(args.rounds + 1):  # the first warms up
            for name, runtime in rows.items():
                limit = raws[name].run() if name in raws else 0.0
                seconds = step(runtime)
                if round_index:
                    times[name].append(seconds)
                    limits.get(name, []).append(limit)
        nbytes = rows["step, verified"].scratch_bytes
        for runtime in rows.values():
            runtime.close()
    report(times, limits, args, parameters, nbytes)


def build(scratch: ScratchSettings | None) -> ZeroRuntime:
    with parameters_on_meta():
        model = Net()
    return ZeroRuntime(
        model,
        ZeroPlan.from_stage(2),
        MixedPrecision(param="bf16", reduce="bf16", accumulate="bf16", master="fp32"),
        AdamWConfig(),
        RuntimeSettings(offload=OffloadPlan(optimizer=Tier.NVME, scratch=scratch) if scratch else OffloadPlan()),
        torch.device("cpu"),
    )


def step(runtime: ZeroRuntime) -> float:
    """Seconds of the update alone: forward and backward are of one row of input."""
    runtime.backward(runtime(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float().square().mean())
    start = time.perf_counter()
    runtime.step(1e-4)
    return time.perf_counter() - start


class Raw:
    """Direct reads and writes of every block of a runtime's own file, each written back as it was read."""

    def __init__(self, runtime: ZeroRuntime, settings: ScratchSettings) -> None:
        assert runtime._tier is not None
        self._fd = runtime._tier._file._fd
        self._settings = settings
        self._buffers = [aligned_buffer(settings.block_bytes) for _ in range(settings.requests)]
        self._places = range(0, runtime.scratch_bytes, settings.block_bytes)
        self._size = runtime.scratch_bytes

    def run(self) -> float:
        start = time.perf_counter()
        with ThreadPoolExecutor(self._settings.requests) as pool:
            for move in [pool.submit(self._move, place) for place in self._places]:
                move.result()
        return time.perf_counter() - start

    def _move(self, place: int) -> None:
        buffer = self._buffers.pop()
        view = memoryview(buffer.numpy().data)[: self._size - place]
        for move in (os.preadv, os.pwritev):
            moved = move(self._fd, [view], place)
            assert moved == len(view), (moved, len(view))
        self._buffers.append(buffer)


def report(
    times: dict[str, list[float]],
    limits: dict[str, list[float]],
    args: argparse.Namespace,
    parameters: int,
    nbytes: int,
) -> None:
    lines = [
        f"# The optimizer's step over a scratch file, {date.today()}",
        "",
        f"One rank on {cpu_name()}, {args.threads} thread(s); torch {torch.__version__}, Python "
        f"{platform.python_version()}; {parameters:,} parameters in bf16, AdamW with fp32 masters and moments, "
        f"{nbytes / 2**20:.0f} MiB read and written each; blocks of {args.block_mib} MiB, {args.requests} requests, "
        f"{args.ahead} unit(s) ahead; {args.rounds} rounds after 1, all rows in turn; load {os.getloadavg()[0]:.1f}.",
        "",
        f"Command: `python benchmarks/nvme.py {' '.join(sys.argv[1:])}`".rstrip(),
        "",
        "Seconds, median (least to most); the share is the median over the rounds of raw's time over the row's.",
        "",
        "| row | s | raw, same file, s | share of raw |",
        "|---|---|---|---|",
    ]
    for name, values in times.items():
        raw = limits.get(name)
        share = statistics.median(raw / own for raw, own in zip(raw, values, strict=True)) if raw else None
        lines.append(
            f"| {name} | {spread(values)} | {spread(raw) if raw else '-'} | {f'{share:.0%}' if share else '-'} |"
        )
    stem = ROOT / "benchmarks" / "results" / f"nvme_cpu_{date.today()}"
    stem.parent.mkdir(exist_ok=True)
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    stem.with_suffix(".json").write_text(json.dumps({"times": times, "raw": limits}))
    print("\n".join(lines))
    print(f"\nwritten: {stem.relative_to(ROOT)}.md")


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    main()
