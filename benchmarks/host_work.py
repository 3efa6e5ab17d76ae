"""Counts and times what the host does for one training step: the Python of the runtime, without any device's work.

`python benchmarks/host_work.py [--units N] [--rounds N]`; writes benchmarks/results/. A Llama-like model of width 8
trains on CPU tensors as rank 0 of 8, over a process group that sends nothing, so nearly all its CPU time is the host's.
A GPU is busy only if the host issues a step in less time than the GPU needs for it. The same model without the runtime
runs in turn with each row; the runtime's share is the difference.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections import Counter
from datetime import date
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.stages_report import cpu_name  # noqa: E402
from zero_runtime.optim.configs import AdamWConfig  # noqa: E402
from zero_runtime.plan import ZeroPlan  # noqa: E402
from zero_runtime.precision import MixedPrecision  # noqa: E402
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime  # noqa: E402

RUNTIME, KERNELS = f"{ROOT}/zero_runtime/", f"{ROOT}/zero_runtime/kernels/"
WORLD, WIDTH, TOKENS = 8, 8, 4
STAGES = (0, 1, 2, 3)
PHASES = ("forward", "backward", "step")
PLAIN = "plain torch"
WARM_UP = 5


class Layer(nn.Module):
    """A block with the parameters of Llama's: seven matrices and two norms."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("query", "key", "value", "project", "gate", "up", "down"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=False))
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        x = x + self.project(self.query(normed) + self.key(normed) + self.value(normed))
        normed = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Dispatched(TorchDispatchMode):
    """Counts the operations that start work on a device, by kind; not views, and not those that only allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = {"zero_lab": "zero_lab", "c10d": "collectives"}.get(func.namespace, "aten")
        if not (func.is_view or func.overloadpacket.__name__ in WITHOUT_WORK):
            self.counts[kind] += 1
        return func(*args, **(kwargs or {}))


class PythonCalls:
    """Counts the calls of the runtime's Python functions in this thread, without the kernels', which differ by device.

    A comprehension is a call before Python 3.12, and so is each item of a generator.
    """

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> PythonCalls:
        self._before = sys.getprofile()
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)

    def _see(self, frame: FrameType, event: str, _argument: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(RUNTIME) and not file.startswith(KERNELS):
            self.count += 1


WITHOUT_WORK = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "_unsafe_view")
KINDS = ("aten", "zero_lab", "collectives")


class Contestant:
    """Steps of one row, in three phases."""

    def __init__(self, layers: int, stage: int | None) -> None:
        self.model = Model(layers)
        self.ids = torch.zeros((1, TOKENS), dtype=torch.int64)
        self.loss = torch.zeros(())
        self.runtime: ZeroRuntime | None = None
        if stage is not None:
            settings = RuntimeSettings(clip_norm=1.0, read_host=lambda numbers: [1.0] * numbers.numel())
            plan, device = ZeroPlan.from_stage(stage), torch.device("cpu")
            self.runtime = ZeroRuntime(self.model, plan, MixedPrecision(), AdamWConfig(), settings, device)

    def forward(self) -> None:
        self.loss = (self.runtime or self.model)(self.ids).sum()

    def backward(self) -> None:
        if self.runtime is None:
            self.loss.backward()
        else:
            self.runtime.backward(self.loss)

    def step(self) -> None:
        """Without the runtime nothing is updated: torch's own optimizers are not what is compared."""
        if self.runtime is None:
            for param in self.model.parameters():
                param.grad = None
        else:
            self.runtime.step(1e-3)

    def seconds(self) -> list[float]:
        """CPU seconds of each phase of one step: the wall's contain what other processes do on a busy machine."""
        found = []
        for phase in PHASES:
            start = time.process_time()
            getattr(self, phase)()
            found.append(time.process_time() - start)
        return found

    def counts(self) -> dict[str, Counter[str]]:
        """Of each phase of one step."""
        found = {}
        for phase in PHASES:
            with Dispatched() as dispatched:
                getattr(self, phase)()
            found[phase] = dispatched.counts
        return found

    def calls(self) -> dict[str, int]:
        """Of the runtime's Python functions, in each phase of one step."""
        found = {}
        for phase in PHASES:
            with PythonCalls() as calls:
                getattr(self, phase)()
            found[phase] = calls.count
        return found


def measured(layers: int, rounds: int) -> dict[str, dict[str, Any]]:
    """By row: the operations and calls of a step by phase, and the seconds of each phase in each round."""
    rows = {PLAIN: Contestant(layers, None)} | {f"stage {stage}": Contestant(layers, stage) for stage in STAGES}
    found: dict[str, dict[str, Any]] = {}
    for name, row in rows.items():
        for _ in range(WARM_UP):
            row.seconds()
        found[name] = {"counts": row.counts(), "calls": row.calls(), "seconds": []}
    for turn in range(rounds):
        names = list(rows)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:  # each round starts with another row
            found[name]["seconds"].append(rows[name].seconds())
    for row in rows.values():
        if row.runtime is not None:
            row.runtime.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--units", type=int, default=24, help="blocks; the embedding and the head are two more units")
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    load_before = os.getloadavg()[0]
    found = measured(args.units, args.rounds)
    lines = [
        f"# The host's work in a training step, {date.today()}",
        "",
        f"{cpu_name()}, {os.cpu_count()} cores, one used; torch {torch.__version__}, Python "
        f"{platform.python_version()}; {args.units} blocks, AdamW, fp32, clipping, rank 0 of {WORLD}; {args.rounds} "
        f"rounds after {WARM_UP}. Other work ran on the machine: load {load_before:.1f} before, "
        f"{os.getloadavg()[0]:.1f} after, of which this process is 1.",
        "",
        f"Command: `{' '.join(['python benchmarks/host_work.py', *sys.argv[1:]])}`",
        "",
        *count_table(found, args.units),
        "",
        *call_table(found, args.units),
        "",
        *time_table(found, args.units),
    ]
    stem = ROOT / "benchmarks" / "results" / f"host_work_cpu_{date.today()}"
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    stem.with_suffix(".json").write_text(json.dumps(found))
    print("\n".join(lines))
    print(f"\nwritten: {stem.relative_to(ROOT)}.md")


def count_table(found: dict[str, dict[str, Any]], layers: int) -> list[str]:
    """What the runtime adds to plain torch, by block; torch's own operations include the kernels' stand-ins."""
    lines = [
        "Operations that start work on a device, of a step and (in brackets) for each block. aten: torch's; ours: the",
        "kernels of `zero_lab`; sent: collectives. Rows of the runtime: in addition to plain torch.",
        "",
        "| row | " + " | ".join(f"{phase}: aten | ours | sent" for phase in PHASES) + " |",
        "|---|" + "---|" * (len(KINDS) * len(PHASES)),
    ]
    plain = found[PLAIN]["counts"]
    for name, row in found.items():
        cells = []
        for phase in PHASES:
            for kind in KINDS:
                added = row["counts"][phase][kind] - (0 if name == PLAIN else plain[phase][kind])
                cells.append(f"{added} ({added / layers:.1f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def call_table(found: dict[str, dict[str, Any]], layers: int) -> list[str]:
    lines = [
        "Calls of the runtime's Python functions in a step and (in brackets) for each block.",
        "",
        "| row | " + " | ".join(PHASES) + " |",
        "|---|" + "---|" * len(PHASES),
    ]
    for name, row in found.items():
        if name != PLAIN:
            cells = [f"{row['calls'][phase]} ({row['calls'][phase] / layers:.1f})" for phase in PHASES]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def time_table(found: dict[str, dict[str, Any]], layers: int) -> list[str]:
    lines = [
        "CPU ms of a step: median (quartiles). In the last columns us for each block in addition to plain torch: the",
        "difference in the same round, median.",
        "",
        "| row | " + " | ".join(PHASES) + " | " + " | ".join(f"{phase}, us a block" for phase in PHASES) + " |",
        "|---|" + "---|" * (2 * len(PHASES)),
    ]
    for name, row in found.items():
        cells = []
        for index in range(len(PHASES)):
            low, middle, high = statistics.quantiles([1e3 * one[index] for one in row["seconds"]], n=4)
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        for index in range(len(PHASES)):
            pairs = zip(row["seconds"], found[PLAIN]["seconds"], strict=True)
            added = statistics.median(own[index] - plain[index] for own, plain in pairs)
            cells.append("-" if name == PLAIN else f"{1e6 * added / layers:.0f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
