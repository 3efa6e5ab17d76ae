"""Compares a training step whose optimizer is offloaded to host memory or to a file with the same step without.

`python benchmarks/host_offload.py [--rounds N] [--accumulation N] [--folder DRIVE] [sizes]`; writes
benchmarks/results/. One GPU, AdamW, bf16 with fp32 masters. compute: a step without offload less its update. work:
the update and the copies of gradients and new parameters, each run alone with nothing else running; with a file, also
its reads and writes. exposed: by how much a row's step takes longer than compute; hidden: the share of work that is
not exposed. If parameters are offloaded too, their copies to the device for each gather count as exposed but not as
work. The files of rows that use one are in --folder. Rows are stepped in turn. `--device cpu` moves shards between two
places of one memory: it only tries the command out, and its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.gpt import Gpt, GptSize  # noqa: E402
from benchmarks.stages_report import cpu_name  # noqa: E402
from zero_runtime.accounting import host_tensors, predicted_state_bytes  # noqa: E402
from zero_runtime.initial_values import parameters_on_meta  # noqa: E402
from zero_runtime.offload.copy_streams import Copies, copies_for  # noqa: E402
from zero_runtime.offload_plan import (  # noqa: E402
    OffloadPlan,
    ScratchSettings,
    Tier,
)
from zero_runtime.optim.configs import AdamWConfig  # noqa: E402
from zero_runtime.plan import ZeroPlan  # noqa: E402
from zero_runtime.precision import MixedPrecision  # noqa: E402
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime  # noqa: E402
from zero_runtime.world import join_alone, leave_world  # noqa: E402

LR = 1e-4
STEPS = 3  # consecutive steps for one reading: the end of a step's work overlaps the next forward
PRECISION = MixedPrecision("bf16", reduce="bf16", accumulate="bf16", master="fp32")
NEVER_CLIPPED = 1e9  # but the norm is waited for


@dataclass
class Row:
    """One run, and its readings in seconds, one per round."""

    name: str
    runtime: ZeroRuntime
    step_s: list[float] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)  # the update alone, with the parameters that it sends back
    leave_s: list[float] = field(default_factory=list)  # the copies of gradients to the host alone
    device_bytes: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    for name, value in vars(GptSize(24, 1024, 16, 50304, 1024, 8)).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("host_offload.py: expected a CUDA device, found none; nothing was run")
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    join_alone(device)
    size = GptSize(args.layers, args.width, args.heads, args.vocab, args.seq, args.micro)
    ids = torch.randint(0, size.vocab, (size.micro, size.seq), device=device)
    rows = build_rows(size, device, args.accumulation, args.folder)
    for round_index in range(args.rounds + 1):  # the first warms up
        for row in rows:
            measure(row, ids, keep=round_index > 0)
    parameters = sum(unit.layout.numel for unit in rows[0].runtime.units)
    for row in rows:
        row.runtime.close()
    leave_world()
    report(rows, args, parameters)


def build_rows(size: GptSize, device: torch.device, accumulation: int, folder: Path) -> list[Row]:
    copies = Copies if device.type == "cpu" else None
    optimizer = OffloadPlan(optimizer=Tier.HOST, copies=copies)
    in_file = OffloadPlan(optimizer=Tier.NVME, scratch=ScratchSettings(folder), copies=copies)
    plans = {
        "none": (2, OffloadPlan()),
        "optimizer_cpu": (2, optimizer),
        "optimizer_param_cpu": (3, replace(optimizer, params=Tier.HOST)),
        "optimizer_nvme": (2, in_file),
        "optimizer_param_nvme": (3, replace(in_file, params=Tier.NVME)),
    }
    return [Row(name, build(size, device, accumulation, *plan)) for name, plan in plans.items()]


def build(size: GptSize, device: torch.device, accumulation: int, stage: int, offload: OffloadPlan) -> ZeroRuntime:
    with parameters_on_meta():
        model = Gpt(size)
    settings = RuntimeSettings(micro_batches=accumulation, clip_norm=NEVER_CLIPPED, offload=offload)
    return ZeroRuntime(model, ZeroPlan.from_stage(stage), PRECISION, AdamWConfig(), settings, device)


def measure(row: Row, ids: torch.Tensor, *, keep: bool) -> None:
    """Takes one reading of complete steps, and of the parts of one step, each alone."""
    settle(row.runtime)
    start = time.perf_counter()
    for _ in range(STEPS):
        backwards(row.runtime, ids)
        row.runtime.step(LR)
    settle(row.runtime)
    step_s = (time.perf_counter() - start) / STEPS
    leave_s = leaving(row.runtime)
    backwards(row.runtime, ids)
    settle(row.runtime)
    start = time.perf_counter()
    row.runtime.step(LR)
    settle(row.runtime)
    update_s = time.perf_counter() - start
    if keep:
        row.step_s.append(step_s)
        row.update_s.append(update_s)
        row.leave_s.append(leave_s)
        row.device_bytes = predicted_state_bytes(row.runtime).total


def backwards(runtime: ZeroRuntime, ids: torch.Tensor) -> None:
    """The micro-batches of one step."""
    for _ in range(runtime.settings.micro_batches):
        logits = runtime(ids).float()
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        runtime.backward(loss / runtime.settings.micro_batches)


def leaving(runtime: ZeroRuntime) -> float:
    """Seconds of copying each unit's gradient to the host, one after another; 0 if none is copied."""
    grads = host_tensors(runtime).get("grads", [])
    if not grads:
        return 0.0
    sources = [torch.zeros_like(grad, device=runtime.device) for grad in grads]
    copies: Copies = copies_for(runtime.device) or Copies(runtime.device)
    settle(runtime)
    start = time.perf_counter()
    for mark in [copies.to_host(grad, source) for grad, source in zip(grads, sources, strict=True)]:
        mark.wait()
    return time.perf_counter() - start


def settle(runtime: ZeroRuntime) -> None:
    """Waits until neither the host nor the device has work in progress."""
    for unit in runtime.units:
        unit.settle()
    if runtime.device.type == "cuda":
        torch.cuda.synchronize(runtime.device)


def report(rows: list[Row], args: argparse.Namespace, parameters: int) -> None:
    plain = rows[0]
    compute = statistics.median(one - update for one, update in zip(plain.step_s, plain.update_s, strict=True))
    lines = [
        f"# A step with its optimizer on the host, {args.device}",
        "",
        f"{date.today()}, {device_name(args.device)}, {cpu_name()} with {torch.get_num_threads()} threads, torch "
        f"{torch.__version__}, Python {platform.python_version()}.",
        "",
        f"Command: `python benchmarks/host_offload.py {' '.join(sys.argv[1:])}`".rstrip(),
        "",
        f"{parameters:,} parameters, {args.accumulation} micro-batches of {args.micro} x {args.seq} tokens; medians of "
        f"{args.rounds} rounds. Compute is {compute * 1e3:.1f} ms.",
        "",
        "| row | model states on the device, MiB | step, ms (least to most) | work, ms | exposed, ms | hidden |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        step, work = statistics.median(row.step_s), 0.0
        if row.leave_s[0]:
            work = statistics.median(map(sum, zip(row.update_s, row.leave_s, strict=True)))
        exposed = step - compute
        hidden = f"{1 - exposed / work:.0%}" if work else "-"
        spread = f"{step * 1e3:.1f} ({min(row.step_s) * 1e3:.1f} to {max(row.step_s) * 1e3:.1f})"
        states = f"{row.device_bytes / 2**20:,.0f}"
        lines.append(f"| {row.name} | {states} | {spread} | {work * 1e3:.1f} | {exposed * 1e3:.1f} | {hidden} |")
    text = "\n".join(lines)
    print(text)
    if args.device == "cpu":
        print("\nno result is kept: on a CPU nothing is hidden behind anything")
        return
    path = ROOT / "benchmarks" / "results" / f"host_offload_{args.device}_{date.today()}"
    path.with_suffix(".md").write_text(text + "\n")
    readings = {row.name: {"step_s": row.step_s, "update_s": row.update_s, "leave_s": row.leave_s} for row in rows}
    path.with_suffix(".json").write_text(json.dumps(readings, indent=1) + "\n")


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "no GPU"


if __name__ == "__main__":
    main()
