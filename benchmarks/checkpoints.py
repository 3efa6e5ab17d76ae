"""Compares saving and loading a checkpoint with raw writes and reads of as many bytes on the same disk, in turn.

`python benchmarks/checkpoints.py [--rounds N] [--folder PATH] [--layers ..]`; writes benchmarks/results/. raw write:
every rank writes its share from one buffer in 8 MiB blocks and syncs it. raw read: reads the same bytes back, after
dropping them from the page cache. stall: how long a save in the background blocks training, compared with one copy of
its tensors.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.gpt import Gpt, GptSize, loss_of  # noqa: E402
from benchmarks.stages_report import cpu_name  # noqa: E402
from zero_runtime.checkpoint.background import BackgroundSaver  # noqa: E402
from zero_runtime.checkpoint.load import load_checkpoint, shards_of  # noqa: E402
from zero_runtime.checkpoint.retention import open_together  # noqa: E402
from zero_runtime.checkpoint.save import save_checkpoint  # noqa: E402
from zero_runtime.optim.configs import AdamWConfig  # noqa: E402
from zero_runtime.plan import ZeroPlan  # noqa: E402
from zero_runtime.precision import MixedPrecision  # noqa: E402
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime  # noqa: E402
from zero_runtime.world import join_world, leave_world  # noqa: E402

WORLD = 2
BLOCK = 8 << 20
SIZE = GptSize(layers=12, width=768, heads=12, vocab=16384, seq=64, micro=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="on the disk to measure; default: the system's temporary folder")
    for name, value in asdict(SIZE).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    size = GptSize(args.layers, args.width, args.heads, args.vocab, args.seq, args.micro)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        mp.spawn(rank_main, (folder, size, args.rounds), nprocs=WORLD)
        found = json.loads(Path(folder, "found.json").read_text())
    report(found, size, args.rounds)


def rank_main(rank: int, folder: str, size: GptSize, rounds: int) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    with join_world(f"file://{folder}/rendezvous", rank, WORLD, device):
        torch.manual_seed(0)
        plan = ZeroPlan.from_stage(2)
        runtime = ZeroRuntime(Gpt(size), plan, MixedPrecision(), AdamWConfig(), RuntimeSettings(), device)
        ids = torch.randint(size.vocab, (size.micro, size.seq + 1))
        runtime.backward(loss_of(runtime.model, ids[:, :-1], ids[:, 1:]) / size.seq)
        runtime.step(1e-4)
        times, share = measure(runtime, Path(folder), rounds)
        if rank == 0:
            Path(folder, "found.json").write_text(json.dumps({"times": times, "bytes": share * WORLD}))
        dist.barrier()
    leave_world()


def measure(runtime: ZeroRuntime, folder: Path, rounds: int) -> tuple[dict[str, list[float]], int]:
    """Seconds of the slower rank by operation, and the bytes of one rank."""
    rank = dist.get_rank()
    shards = [shard for unit in runtime.units for shard in shards_of(runtime, unit).values()]
    share = sum(shard.nbytes for shard in shards)
    buffer = torch.zeros(BLOCK, dtype=torch.uint8).random_()
    raw, root = folder / f"raw{rank}", folder / "checkpoints"
    saver = BackgroundSaver(folder / "background")
    copies = [torch.empty_like(shard) for shard in shards]
    saver.save(runtime, step=0, trainer={})  # allocates its memory, which it keeps
    saver.wait(runtime)

    def load() -> None:
        load_checkpoint(runtime, open_together(runtime.collectives, root / "step-00000001"))

    def copy() -> None:
        for target, shard in zip(copies, shards, strict=True):
            target.copy_(shard)

    parts: dict[str, Callable[[], object]] = {
        "raw write": lambda: write_raw(raw, buffer, share),
        "save": lambda: save_checkpoint(runtime, root, step=1, trainer={}),
        "raw read": lambda: read_raw(raw, buffer),
        "load": load,
        "memory copy": copy,
        "stall": lambda: saver.save(runtime, step=1, trainer={}),
    }
    times: dict[str, list[float]] = {name: [] for name in parts}
    for round_index in range(rounds + 1):  # the first warms up
        for name, part in parts.items():
            drop_caches(folder)
            seconds = slower_rank(part)
            if round_index:
                times[name].append(seconds)
        saver.wait(runtime)
    return times, share


def slower_rank(part: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    part()
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def write_raw(path: Path, buffer: torch.Tensor, size: int) -> None:
    view = memoryview(buffer.numpy())  # type: ignore[arg-type]
    with path.open("wb", buffering=0) as file:
        for start in range(0, size, BLOCK):
            file.write(view[: min(BLOCK, size - start)])
        os.fsync(file.fileno())


def read_raw(path: Path, buffer: torch.Tensor) -> None:
    view = memoryview(buffer.numpy())  # type: ignore[arg-type]
    with path.open("rb", buffering=0) as file:
        while file.readinto(view):
            pass


def drop_caches(folder: Path) -> None:
    """Drops every file's pages from the page cache, so that reads come from the disk."""
    dist.barrier()
    if dist.get_rank() == 0:
        for path in folder.rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
    dist.barrier()


def report(found: dict, size: GptSize, rounds: int) -> None:
    times, total = found["times"], found["bytes"]
    rows = [("save", "raw write"), ("load", "raw read"), ("stall", "memory copy")]
    lines = [
        f"# Checkpoints, {date.today()}",
        "",
        f"{WORLD} ranks on {cpu_name()}; torch {torch.__version__}, Python {platform.python_version()}; "
        f"{asdict(size)}, fp32, AdamW, stage 2: {total / 2**30:.2f} GiB; {rounds} rounds after 1; file system of "
        f"{shutil.disk_usage(tempfile.gettempdir()).total / 2**30:.0f} GiB.",
        "",
        f"Command: `python benchmarks/checkpoints.py {' '.join(sys.argv[1:])}`".rstrip(),
        "",
        "Seconds of the slower rank, median (least to most). The share is the median over the rounds of the limit's",
        "time in the same round over the row's.",
        "",
        "| row | s | limit | s | share of the limit's speed |",
        "|---|---|---|---|---|",
    ]
    for name, limit in rows:
        share = statistics.median(a / b for a, b in zip(times[limit], times[name], strict=True))
        lines.append(f"| {name} | {spread(times[name])} | {limit} | {spread(times[limit])} | {100 * share:.0f} % |")
    stem = ROOT / "benchmarks" / "results" / f"checkpoints_cpu_{date.today()}"
    stem.parent.mkdir(exist_ok=True)
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    stem.with_suffix(".json").write_text(json.dumps(found))
    print("\n".join(lines))
    print(f"\nwritten: {stem.relative_to(ROOT)}.md")


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
