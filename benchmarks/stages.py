"""One training step of each ZeRO stage against forward and backward alone, all stepped in turn in the same processes.

`python benchmarks/stages.py [--precision fp32|bf16] [--rounds N] [--layers ..]`; writes benchmarks/results/.
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
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from gpt import Gpt, GptSize, loss_of  # noqa: E402

from zero_runtime.collectives import join_world, leave_world  # noqa: E402
from zero_runtime.optimizers import AdamWConfig  # noqa: E402
from zero_runtime.plan import ZeroPlan  # noqa: E402
from zero_runtime.precision import MixedPrecision  # noqa: E402
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime  # noqa: E402

STAGES = (0, 1, 2, 3)
LIMIT = "forward+backward"
WARMUP_ROUNDS = 2
GLIBC = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=8589934592"  # freed blocks stay: no page faults


def main() -> None:
    args = arguments()
    world = args.world or (torch.cuda.device_count() or 2)
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // world, 1)))
    os.environ.setdefault("GLIBC_TUNABLES", GLIBC)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    size = GptSize(args.layers, args.width, args.heads, args.vocab, args.seq, args.micro)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (world, folder, size, args.precision, args.rounds), nprocs=world)
        measured = json.loads(Path(folder, "measured.json").read_text())
    write_report(measured, size, args, world)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--world", type=int, default=None)
    for name, value in asdict(GptSize()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


def rank_main(rank: int, world: int, folder: str, size: GptSize, precision: str, rounds: int) -> None:
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    join_world(f"file://{folder}/rendezvous", rank, world, device)
    variants = build_variants(size, precision, device, rank)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for round_index in range(WARMUP_ROUNDS + rounds):
        for name, step in variants.items():
            seconds = timed(step, device)
            if round_index >= WARMUP_ROUNDS:
                times[name].append(seconds)
    everyone: list[dict[str, list[float]]] = [{} for _ in range(world)]
    dist.all_gather_object(everyone, times)
    if rank == 0:
        slowest = {name: [max(one) for one in zip(*(rank[name] for rank in everyone))] for name in times}  # noqa: B905
        Path(folder, "measured.json").write_text(json.dumps(slowest))
    leave_world()


def build_variants(size: GptSize, precision: str, device: torch.device, rank: int) -> dict[str, Callable[[], None]]:
    """The limit (no communication, no optimizer) and a step of each stage, on the same batch."""
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(size.vocab, (size.micro, size.seq + 1), generator=generator).to(device)
    inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    tokens = labels.numel() * dist.get_world_size()

    torch.manual_seed(0)
    plain = Gpt(size).to(device, torch.bfloat16 if precision == "bf16" else torch.float32)

    def limit() -> None:
        (loss_of(plain, inputs, labels) / tokens).backward()
        plain.zero_grad(set_to_none=True)

    variants: dict[str, Callable[[], None]] = {LIMIT: limit}
    for stage in STAGES:
        runtime = ZeroRuntime(
            Gpt(size),
            ZeroPlan.from_stage(stage),
            MixedPrecision(precision),
            AdamWConfig(),
            RuntimeSettings(),
            device,
        )
        variants[f"stage{stage}"] = stepper(runtime, inputs, labels, tokens)
    return variants


def stepper(runtime: ZeroRuntime, inputs: torch.Tensor, labels: torch.Tensor, tokens: int) -> Callable[[], None]:
    def step() -> None:
        runtime.backward(loss_of(runtime.model, inputs, labels) / tokens)
        runtime.step(1e-4)

    return step


def timed(step: Callable[[], None], device: torch.device) -> float:
    """Seconds from a common start until this rank's device has done the step."""
    dist.barrier()
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def write_report(measured: dict[str, list[float]], size: GptSize, args: argparse.Namespace, world: int) -> None:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    limit = statistics.median(measured[LIMIT])
    lines = [
        f"# A step of each stage, {date.today()}",
        "",
        f"{world} x {device}; torch {torch.__version__}, Python {platform.python_version()}; "
        f"{args.precision}, {asdict(size)}; {args.rounds} rounds after {WARMUP_ROUNDS}.",
        "",
        f"Command: `python benchmarks/stages.py {' '.join(sys.argv[1:])}`".rstrip(),
        "",
        "ms is the slower rank's; the share is the limit's median over the row's.",
        "",
        "| row | ms median | min | max | share of the limit |",
        "|---|---|---|---|---|",
    ]
    for name, seconds in measured.items():
        ms = [1e3 * one for one in seconds]
        share = 100 * limit / statistics.median(seconds)
        lines.append(f"| {name} | {statistics.median(ms):.1f} | {min(ms):.1f} | {max(ms):.1f} | {share:.0f} % |")
    results = ROOT / "benchmarks" / "results"
    results.mkdir(exist_ok=True)
    stem = results / f"stages_{kind}_{args.precision}_{date.today()}"
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    stem.with_suffix(".json").write_text(json.dumps({"seconds": measured, "size": asdict(size), "device": device}))
    print("\n".join(lines))
    print(f"\nwritten: {stem.relative_to(ROOT)}.md")


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
