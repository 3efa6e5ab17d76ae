"""Compares each Triton update kernel on a GPU with a copy of as many bytes and with the reference, in turn.

`python benchmarks/kernels_gpu.py [--numel N] [--rounds N] [--least-percent P] [--least-percent-8bit P]`; writes
benchmarks/results/. A share is
the median over the rounds of the copy's time divided by the row's time in the same round. fp32 masters, bf16 gradients
in, bf16 parameters out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import ModuleType

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from zero_runtime.kernels import reference  # noqa: E402
from zero_runtime.kernels.block_formats import blocks_of  # noqa: E402
from zero_runtime.kernels.registration import compiled_for  # noqa: E402
from zero_runtime.kernels.settings import AdamW, Lamb, Lion, Sgd  # noqa: E402

ADAM = (1e-3, 0.9, 0.999, 1e-8, 0.01, 10)
# Bytes read and written per element: master 4 + 4, gradient 2, parameter 2, and the states.
BYTES = {"adamw": 28, "adamw8bit": 16 + 4 * 4 / 256, "sgd": 20, "lion": 20, "lamb": 18 + 12 + 18, "accumulate": 10}
BUSY_CYCLES = 2_000_000  # a millisecond; a launch takes some 0.1 ms of the host
Step = Callable[[], object]


class Streams:
    """The tensors over which all operations step."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.master, self.first = torch.randn(numel, device=device), torch.full((numel,), 1e-4, device=device)
        self.grad = (torch.randn(numel, device=device) * 1e-3).to(torch.bfloat16)
        self.second, self.param = torch.full_like(self.first, 1e-6), torch.empty_like(self.grad)
        self.codes = torch.zeros(2, numel, dtype=torch.uint8, device=device).unbind()
        self.scales = torch.zeros(2, blocks_of(numel), device=device).unbind()
        self.scale = torch.ones((), device=device)


def steps(which: ModuleType, s: Streams) -> dict[str, Step]:
    """One step of each operation."""
    states = (s.codes[0], s.scales[0], s.codes[1], s.scales[1])
    adamw, lion, sgd = AdamW(*ADAM).numbers, Lion(1e-3, 0.9, 0.99, 0.01).numbers, Sgd(1e-3, 0.9, 0, 0, False, 2)

    def lamb() -> None:
        settings = Lamb(*ADAM)
        which.lamb_moments_(s.grad, s.first, s.second, s.scale, settings.numbers)
        squares = which.lamb_squares(s.master, s.first, s.second, settings.lamb_numbers)
        ratio = reference.trust_ratios(squares[None])[0]
        which.lamb_(s.master, s.first, s.second, ratio, settings.lamb_numbers, s.param)

    return {
        "adamw": lambda: which.adamw_(s.master, s.grad, s.first, s.second, s.scale, adamw, s.param),
        "adamw8bit": lambda: which.adamw8bit_(s.master, s.grad, *states, s.scale, adamw, s.param),
        "sgd": lambda: which.sgd_(s.master, s.grad, s.first, s.scale, sgd.numbers, False, False, s.param),
        "lion": lambda: which.lion_(s.master, s.grad, s.first, s.scale, lion, s.param),
        "lamb": lamb,
        "accumulate": lambda: which.accumulate_(s.master, s.grad, 0.5),
    }


def milliseconds(step: Step) -> float:
    """Of the device alone: it is busy while the host launches, as in a training step."""
    torch.cuda._sleep(BUSY_CYCLES)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--least-percent", type=float, default=0, help="of a copy's speed, else exit code 1")
    parser.add_argument("--least-percent-8bit", type=float, default=0, help="the same for 8-bit moments")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("expected a CUDA device, found none; nothing was run", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    ours = compiled_for(device)
    if ours is None:
        print("expected the Triton kernels, found that they are not used here (see the warning)", file=sys.stderr)
        return 1
    times = measure(ours, args.numel, args.rounds, device)
    report(times, args.numel, args.rounds)
    least = dict.fromkeys(times, args.least_percent) | {"adamw8bit": args.least_percent_8bit}
    slow = [name for name, found in times.items() if 100 * share_of(found, "Triton") < least[name]]
    if slow:
        print(f"below its least share of the speed of a copy: {', '.join(slow)}", file=sys.stderr)
    return 1 if slow else 0


def share_of(found: dict[str, list[float]], contestant: str) -> float:
    """The contestant's share of the copy's speed, the median over the rounds."""
    copy = found["copy of as many bytes"]
    return statistics.median(a / b for a, b in zip(copy, found[contestant], strict=True))


def measure(ours: ModuleType, numel: int, rounds: int, device: torch.device) -> dict[str, dict[str, list[float]]]:
    """Milliseconds by operation and contestant, one per round, after a round that compiles and warms up."""
    streams, times = Streams(numel, device), {}
    for name in BYTES:
        half = torch.empty(int(BYTES[name] * numel / 2), dtype=torch.uint8, device=device)
        target = torch.empty_like(half)
        contestants = {
            "copy of as many bytes": lambda target=target, half=half: target.copy_(half),
            "Triton": steps(ours, streams)[name],
            "reference": steps(reference, streams)[name],
        }
        found: dict[str, list[float]] = {contestant: [] for contestant in contestants}
        for index in range(-1, rounds):
            for contestant, step in contestants.items():
                took = milliseconds(step)
                if index >= 0:
                    found[contestant].append(took)
        times[name] = found
    return times


def report(times: dict[str, dict[str, list[float]]], numel: int, rounds: int) -> None:
    lines = [
        f"# The updates on a GPU, {date.today()}",
        "",
        f"{torch.cuda.get_device_name()}; torch {torch.__version__}; {numel} parameters, {rounds} rounds after 1.",
        f"Command: `python benchmarks/kernels_gpu.py {' '.join(sys.argv[1:])}`".rstrip(),
        "",
        "| operation | contestant | ms, median (least to most) | GB/s | share of the copy's speed |",
        "|---|---|---|---|---|",
    ]
    for name, found in times.items():
        for contestant, own in found.items():
            share = share_of(found, contestant)
            middle = statistics.median(own)
            lines.append(
                f"| {name} | {contestant} | {middle:.3f} ({min(own):.3f} to {max(own):.3f}) | "
                f"{BYTES[name] * numel / middle / 1e6:.0f} | {100 * share:.0f} % |"
            )
    stem = ROOT / "benchmarks" / "results" / f"kernels_gpu_{date.today()}"
    stem.parent.mkdir(exist_ok=True)
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    stem.with_suffix(".json").write_text(json.dumps(times))
    print("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
