"""Compares the optimizer's step over a scratch file with raw direct reads and writes of as many bytes in that file.

`python benchmarks/nvme.py [--rounds N] [--folder PATH] [--block-mib N] [--requests N] [--ahead N] [--threads N]`
prints the table of docs/offload.md and writes benchmarks/results/. One rank, 50 M parameters in bf16 with fp32 masters
and moments stored in the file: each step reads and writes 12 bytes per parameter.

The seconds of `runtime.step` (norm, reads, checksums, update, writes) are compared with those of raw, which reads every
block of the same file into memory and writes it back from there, with the block size of the step, as many concurrent
requests of each kind, and as many bytes of buffers, in the same kind of memory. raw has no checksums, no arithmetic and
no units: a block is written as soon as it has been read. Both bypass this machine's page cache (O_DIRECT; a folder
without it is refused); the storage behind a virtual disk has its own caches, which serve both equally.

A disk's speed drifts, so the two take turns: each round has one raw test directly before or directly after each step,
alternating by round, and a share is the quotient of two such neighbours. verified by zlib: with the checksum that is
used without a compiler. in memory: the same step without offload.
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
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from queue import SimpleQueue
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.stages_report import cpu_name  # noqa: E402
from zero_runtime.accounting import scratch_bytes  # noqa: E402
from zero_runtime.initial_values import parameters_on_meta  # noqa: E402
from zero_runtime.kernels.checksum import zlib_crc32  # noqa: E402
from zero_runtime.offload import scratch_file  # noqa: E402
from zero_runtime.offload.nvme import NvmeTier  # noqa: E402
from zero_runtime.offload.scratch_file import aligned_buffer  # noqa: E402
from zero_runtime.offload_plan import (  # noqa: E402
    OffloadPlan,
    ScratchSettings,
    Tier,
)
from zero_runtime.optim.configs import AdamWConfig  # noqa: E402
from zero_runtime.plan import ZeroPlan  # noqa: E402
from zero_runtime.precision import MixedPrecision  # noqa: E402
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime  # noqa: E402

WIDTH, BLOCKS = 2048, 12  # 50.3 M parameters in blocks of 4.2 M
STATE_BYTES = 12  # per parameter: master and moments
AIM = 0.85


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
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
        runtimes = {"verified": build(scratch)}
        # A scratch file keeps the checksum function that it was created with.
        with mock.patch.object(scratch_file, "checksum_function", return_value=zlib_crc32):
            runtimes["verified by zlib"] = build(scratch)
        runtimes |= {"not verified": build(replace(scratch, verify=False)), "in memory": build(None)}
        raws = {name: Raw(runtime, scratch) for name, runtime in runtimes.items() if scratch_bytes(runtime)}
        measured = Measured({name: [] for name in runtimes}, {name: [] for name in raws})
        for index in range(args.rounds + 1):
            for name, runtime in runtimes.items():
                measured.add(name, *neighbours(runtime, raws.get(name), raw_first=index % 2 == 0))
            if index == 0:  # warms up
                measured.clear()
        nbytes = scratch_bytes(runtimes["verified"])
        for runtime in runtimes.values():
            runtime.close()
    report(measured, args, nbytes)


@dataclass
class Measured:
    """Seconds by row, one per round: of the step, and of the raw test next to it if there is one."""

    steps: dict[str, list[float]]
    raws: dict[str, list[float]]

    def add(self, name: str, step: float, raw: float | None) -> None:
        self.steps[name].append(step)
        if raw is not None:
            self.raws[name].append(raw)

    def clear(self) -> None:
        for seconds in (*self.steps.values(), *self.raws.values()):
            seconds.clear()

    def shares(self, name: str) -> list[float]:
        return [raw / step for raw, step in zip(self.raws[name], self.steps[name], strict=True)]


def neighbours(runtime: ZeroRuntime, raw: Raw | None, *, raw_first: bool) -> tuple[float, float | None]:
    """Seconds of a step and of the raw test next to it; forward and backward, of one row of input, run before both."""
    runtime.backward(runtime(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float().square().mean())
    before = raw.run() if raw and raw_first else None
    start = time.perf_counter()
    runtime.step(1e-4)
    seconds = time.perf_counter() - start
    return seconds, raw.run() if raw and not raw_first else before


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


class Raw:
    """Direct reads and writes of every block of a runtime's scratch file; each block is written back unchanged."""

    def __init__(self, runtime: ZeroRuntime, settings: ScratchSettings) -> None:
        assert isinstance(runtime.tier, NvmeTier)
        file = runtime.tier._file
        if not file.direct:
            raise SystemExit(f"{settings.folder}: expected direct I/O, found none; give --folder on another drive")
        self._fd, self._size, self._block = file._fd, scratch_bytes(runtime), settings.block_bytes
        self._readers = ThreadPoolExecutor(settings.requests)
        self._writers = ThreadPoolExecutor(settings.requests)
        slots = (2 * settings.ahead + 1) * max(unit.layout.shard_numel for unit in runtime.units) * STATE_BYTES
        buffer = aligned_buffer(slots // self._block * self._block).zero_()
        self._free: SimpleQueue[torch.Tensor] = SimpleQueue()
        for block in buffer.split(self._block):
            self._free.put(block)

    def run(self) -> float:
        """Reads and writes all blocks, and returns the seconds."""
        start = time.perf_counter()
        for reading in [self._readers.submit(self._read, place) for place in range(0, self._size, self._block)]:
            reading.result().result()
        return time.perf_counter() - start

    def _read(self, place: int) -> Future[None]:
        block = self._free.get()
        part = memoryview(block.numpy().data)[: self._size - place]
        moved = os.preadv(self._fd, [part], place)
        assert moved == len(part), (moved, len(part))
        return self._writers.submit(self._write, place, part, block)

    def _write(self, place: int, part: memoryview, block: torch.Tensor) -> None:
        moved = os.pwritev(self._fd, [part], place)
        assert moved == len(part), (moved, len(part))
        self._free.put(block)


def report(measured: Measured, args: argparse.Namespace, nbytes: int) -> None:
    given = ["DRIVE" if word == args.folder else word for word in sys.argv[1:]]
    lines = [
        f"# The optimizer's step over a scratch file, {date.today()}",
        "",
        f"One rank on {cpu_name()} ({os.cpu_count()} cores), {args.threads} thread(s); torch {torch.__version__}, "
        f"Python {platform.python_version()}; {nbytes // STATE_BYTES:,} parameters in bf16, AdamW with fp32 masters "
        f"and moments, {nbytes / 2**20:.0f} MiB read and written each; blocks of {args.block_mib} MiB, {args.requests} "
        f"requests of each kind, {args.ahead} unit(s) ahead; {args.rounds} rounds after 1; load "
        f"{os.getloadavg()[0]:.1f}, of which this process is 1 to 2.",
        "",
        f"Command: `{' '.join(['python benchmarks/nvme.py', *given])}`",
        "",
        "Medians with least and most in brackets. share: of raw's speed, of each step and the raw test beside it.",
        "",
        "| step | s | raw beside it, s | share, median | quartiles | least and most | rounds with 85 % or more |",
        "|---|---|---|---|---|---|---|",
        *(row(name, measured) for name in measured.steps),
    ]
    stem = ROOT / "benchmarks" / "results" / f"nvme_cpu_{date.today()}"
    stem.parent.mkdir(exist_ok=True)
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    stem.with_suffix(".json").write_text(json.dumps({"times": measured.steps, "raw": measured.raws}))
    print("\n".join(lines))
    print(f"\nwritten: {stem.relative_to(ROOT)}.md")


def row(name: str, measured: Measured) -> str:
    seconds = spread(measured.steps[name])
    if name not in measured.raws:
        return f"| {name} | {seconds} | - | - | - | - | - |"
    shares = measured.shares(name)
    low, middle, high = statistics.quantiles(shares, n=4) if len(shares) > 1 else shares * 3
    enough = sum(share >= AIM for share in shares)
    return (
        f"| {name} | {seconds} | {spread(measured.raws[name])} | {middle:.0%} | {low:.0%} to {high:.0%} | "
        f"{min(shares):.0%} to {max(shares):.0%} | {enough} of {len(shares)} |"
    )


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    main()
