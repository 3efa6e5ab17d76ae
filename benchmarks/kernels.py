"""Compares the AdamW step on a CPU with a bare loop over the same streams, torch's fused step and the reference.

All contestants take turns. LAMB and AdamW on 8-bit moments are compared with a copy of as many bytes.

`python benchmarks/kernels.py [--numel N] [--rounds N]`; writes benchmarks/results/. One round runs every contestant
once and each round starts with another one, so that a drifting host affects all of them equally; a ratio is the median
over the rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.stages_report import cpu_name  # noqa: E402
from zero_runtime.kernels import ops, reference  # noqa: E402
from zero_runtime.kernels.block_formats import blocks_of  # noqa: E402
from zero_runtime.kernels.cpu import build, operations  # noqa: E402
from zero_runtime.kernels.settings import AdamW, Lamb  # noqa: E402

THREADS = (1, 2)
REFERENCE_ROUNDS = 2  # it takes seconds if the cores are busy
LIMIT = "bare loop"
# Bytes read and written per element: 2 + 12 and 12 + 2 (mixed), 16 and 12 (fp32), 2 + 6 and 6 + 2 (with codes), and
# LAMB's three parts (mixed).
BYTES = {"mixed": 28, "fp32": 28, "adamw8bit": 16, "lamb": 18 + 12 + 18}
SETTINGS = AdamW(1e-3, 0.9, 0.999, 1e-8, 0.01, 10)
Step = Callable[[int], object]


class Streams:
    """The tensors that the contestants step over."""

    def __init__(self, numel: int) -> None:
        self.master = torch.randn(numel)
        self.grad = torch.randn(numel) * 1e-3
        self.grad16 = self.grad.to(torch.bfloat16)
        self.first, self.second = torch.full((numel,), 1e-4), torch.full((numel,), 1e-6)
        self.param16 = self.master.to(torch.bfloat16)
        self.scale = torch.ones(())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, default=50_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    compile_s = seconds_to_compile()
    ops.prepare(torch.device("cpu"))
    load_before = os.getloadavg()[0]
    times = {kind: measure(kind, Streams(args.numel), args.rounds) for kind in BYTES}
    report(times, args.numel, args.rounds, compile_s, load_before)


def seconds_to_compile() -> float:
    """Seconds to compile the library, as on first use."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        build.compile_library(build.find_compiler(), Path(folder, "kernels.so"))
        return time.perf_counter() - start


def bare_library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "bare.so")
        source = ROOT / "benchmarks" / "bare_streams.cpp"
        subprocess.run([build.find_compiler(), *build.flags(), str(source), "-o", str(path)], check=True)
        return ctypes.CDLL(str(path))


def contestants(kind: str, s: Streams) -> dict[str, Step]:
    """One step per contestant, a function of the number of threads that torch is set to."""
    if kind in ("adamw8bit", "lamb"):
        return beside_a_copy(kind, s)
    bare = bare_library()
    numel = ctypes.c_int64(s.master.numel())
    own = Streams(s.master.numel())  # its sums are not moments: roots of negative ones would turn masters into NaN
    mixed = kind == "mixed"
    grad, out = (s.grad16, s.param16) if mixed else (s.grad, None)

    def limit(threads: int) -> None:
        own_grad = own.grad16 if mixed else own.grad
        tensors = (own.master, own_grad, own.first, own.second, *([own.param16] if mixed else []))
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
        getattr(bare, f"bare_{kind}")(*pointers, numel, ctypes.c_int64(threads))

    steps: dict[str, Step] = {
        LIMIT: limit,
        "ours": lambda _: ops.adamw_(s.master, grad, s.first, s.second, s.scale, SETTINGS, out),
        "torch fused" + " + casts" * mixed: torch_fused(s, grad, out),
        "reference": lambda _: reference.adamw_(s.master, grad, s.first, s.second, s.scale, SETTINGS.numbers, out),
    }
    if importlib.util.find_spec("deepspeed") is not None:
        steps["DeepSpeed's CPU Adam" + " + casts" * mixed] = deepspeeds(s, grad, out)
    return steps


def beside_a_copy(kind: str, s: Streams) -> dict[str, Step]:
    """Contestants that move fewer or more bytes than AdamW: the limit is a copy of as many bytes."""
    numel = s.master.numel()
    source = torch.ones(BYTES[kind] * numel // 2, dtype=torch.uint8)
    target = torch.zeros_like(source)
    codes = [torch.zeros(numel, dtype=torch.uint8) for _ in range(2)]
    scales = [torch.zeros(blocks_of(numel)) for _ in range(2)]
    settings = Lamb(1e-3, 0.9, 0.999, 1e-6, 0.01, 10)

    def adamw8bit(which: Any) -> None:
        states = (codes[0], scales[0], codes[1], scales[1])
        which.adamw8bit_(s.master, s.grad16, *states, s.scale, SETTINGS.numbers, s.param16)

    def lamb(which: Any) -> None:
        which.lamb_moments_(s.grad16, s.first, s.second, s.scale, settings.numbers)
        ratio = reference.trust_ratios(which.lamb_squares(s.master, s.first, s.second, settings.lamb_numbers)[None])[0]
        which.lamb_(s.master, s.first, s.second, ratio, settings.lamb_numbers, s.param16)

    step = {"adamw8bit": adamw8bit, "lamb": lamb}[kind]
    steps = {"ours": lambda _: step(operations), "reference": lambda _: step(reference)}
    return {LIMIT: lambda _: target.copy_(source), **steps}


def torch_fused(s: Streams, grad: torch.Tensor, out: torch.Tensor | None) -> Step:
    wide = torch.empty_like(s.master)
    count = torch.tensor(10.0)

    def step(_: int) -> None:
        grads = grad if out is None else wide.copy_(grad)
        betas = {"beta1": SETTINGS.beta1, "beta2": SETTINGS.beta2, "eps": SETTINGS.eps, "lr": SETTINGS.lr}
        switches = {"weight_decay": SETTINGS.weight_decay, "amsgrad": False, "maximize": False}
        torch._fused_adamw_([s.master], [grads], [s.first], [s.second], [], [count], **betas, **switches)
        if out is not None:
            out.copy_(s.master)

    return step


def deepspeeds(s: Streams, grad: torch.Tensor, out: torch.Tensor | None) -> Step:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    param = torch.nn.Parameter(s.master)
    optimizer = DeepSpeedCPUAdam([param], lr=SETTINGS.lr, weight_decay=SETTINGS.weight_decay, adamw_mode=True)
    wide = torch.empty_like(s.master)

    def step(_: int) -> None:
        param.grad = grad if out is None else wide.copy_(grad)
        optimizer.step()
        if out is not None:
            out.copy_(param.data)

    return step


def measure(kind: str, streams: Streams, rounds: int) -> dict[str, list[float]]:
    """Seconds by `contestant/threads`, one reading per round."""
    steps = {(name, threads): step for name, step in contestants(kind, streams).items() for threads in THREADS}
    order = list(steps)
    times: dict[str, list[float]] = {f"{name}/{threads}": [] for name, threads in order}
    for index in range(-1, rounds):  # the first warms up
        turn = index % len(order)
        for name, threads in order[turn:] + order[:turn]:
            if name == "reference" and index > REFERENCE_ROUNDS:
                continue
            torch.set_num_threads(threads)
            start = time.perf_counter()
            steps[name, threads](threads)
            if index >= 0:
                times[f"{name}/{threads}"].append(time.perf_counter() - start)
        streams.first.fill_(1e-4)  # every round starts from moments typical of training
        streams.second.fill_(1e-6)
    refuse_unusual_numbers(kind, streams)
    return times


def refuse_unusual_numbers(kind: str, streams: Streams) -> None:
    """Exits, so that nothing is written, if the contestants stepped over numbers that do not occur in training."""
    wrong = [name for name, values in vars(streams).items() if not bool(torch.isfinite(values).all())]
    if wrong:
        sys.exit(f"kernels.py, {kind}: expected finite numbers after the rounds, found others in {', '.join(wrong)}")


def report(
    times: dict[str, dict[str, list[float]]], numel: int, rounds: int, compile_s: float, load_before: float
) -> None:
    lines = [
        f"# The AdamW step on a CPU, {date.today()}",
        "",
        f"{cpu_name()}, {os.cpu_count()} cores; torch {torch.__version__}, Python {platform.python_version()}; "
        f"{numel} parameters, {rounds} rounds after 1 (the reference {REFERENCE_ROUNDS + 1}), all contestants in turn "
        f"in one process. Other work ran on the "
        f"machine: load {load_before:.1f} before, {os.getloadavg()[0]:.1f} after, of which this process is 1 to 2. "
        f"Compiling the kernels took {compile_s:.1f} s.",
        "",
        f"Command: `python benchmarks/kernels.py {' '.join(sys.argv[1:])}`".rstrip(),
        "",
        "mixed: fp32 master and moments, bf16 gradient in, bf16 parameter out; adamw8bit and lamb likewise, but their",
        "bare loop is a copy of as many bytes. ms, median (least to most); share: the median over the rounds of the",
        "bare loop's time in the same round over the row's, with its quartiles in",
        "brackets; least: the same of the least times of both.",
    ]
    for kind, of_kind in times.items():
        lines += [
            "",
            "| " + kind + " | threads | ms | GB/s | share of the bare loop's speed | least |",
            "|---|---|---|---|---|---|",
        ]
        for threads in THREADS:
            limit = of_kind[f"{LIMIT}/{threads}"]
            for name in (key.rsplit("/", 1)[0] for key in of_kind if key.endswith(f"/{threads}")):
                own = of_kind[f"{name}/{threads}"]
                low, middle, high = statistics.quantiles([a / b for a, b in zip(limit, own, strict=False)], n=4)
                speed = BYTES[kind] * numel / statistics.median(own) / 1e9
                lines.append(
                    f"| {name} | {threads} | {spread(own)} | {speed:.0f} | {100 * middle:.0f} % ({100 * low:.0f} to "
                    f"{100 * high:.0f}) | {100 * min(limit) / min(own):.0f} % |"
                )
    stem = ROOT / "benchmarks" / "results" / f"kernels_cpu_{date.today()}"
    stem.parent.mkdir(exist_ok=True)
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    stem.with_suffix(".json").write_text(json.dumps({"times": times, "compile_s": compile_s}))
    print("\n".join(lines))
    print(f"\nwritten: {stem.relative_to(ROOT)}.md")


def spread(values: list[float]) -> str:
    return f"{1e3 * statistics.median(values):.1f} ({1e3 * min(values):.1f} to {1e3 * max(values):.1f})"


if __name__ == "__main__":
    main()
