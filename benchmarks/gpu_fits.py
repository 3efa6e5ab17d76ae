"""Runs rows of `fit` on a GPU of this machine and compares their memory with what `fit` said of them.

`python benchmarks/gpu_fits.py [--hardware NAME] [--most-percent N]`; writes benchmarks/results/gpu_fits_DATE.md. Each
row trains 4 steps after 3 others on one GPU: a 0.5B model with a micro-batch of 4, then with the largest that `fit`
names for the GPU, then adapters beside a 7B model in 4 bits. `--hardware`: what `fit` is asked of, which should be the
GPU that is here. Every row must end, and its peak of allocated bytes may differ from the predicted one by N %. It
needs the program's own packages with the extra `lora`. Exit codes: 0 all of it holds, 1 some does not, 2 no CUDA
device or a missing package.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.gpu_engines import lacks_packages  # noqa: E402
from benchmarks.gpu_facts import facts  # noqa: E402

GIB = 2**30
# cuBLAS takes its two workspaces from torch's allocator; `fit` counts them beside the tensors of the step.
WORKSPACES = 64 * 2**20
COMMON = ("batch.seq=1024", "precision=bf16", "zero=stage0", "resources.ranks=1")
RUN = (
    "data=synthetic",
    "tracking=none",
    "resources.device=cuda",
    "measure.steps=4",
    "measure.warmup_steps=3",
    "measure.validation_batches=0",
    "output=outputs/gpu_fits",
)
SMALL, LARGE = "model=qwen2_5_0_5b", "model=qwen2_5_7b"
ADAPTERS = ("adapter=lora", "precision.weights=int4")
# The words for `fit`, and the rows of it that run.
ASKED = (
    ((SMALL, "batch.micro=4"), ("stage0", "stage0-tiled", "stage0-full-tiled", "stage0-optimizer_cpu-full")),
    ((SMALL,), ("stage0", "stage0-full-tiled")),
    ((LARGE, *ADAPTERS, "batch.micro=1"), ("stage0",)),
)
HEAD = (
    "| model | row | micro | peak predicted, GiB | measured | difference | reserved predicted | measured | tokens/s |",
    "|---|---|---|---|---|---|---|---|---|",
)


@dataclass(frozen=True)
class Row:
    """A row that `fit` calls fitting: its settings and bytes, and what its run took. `failure`: why it did not end."""

    label: str
    words: tuple[str, ...]
    micro: int
    peak: int
    reserved: int
    failure: str = ""
    measured_peak: int = 0
    measured_reserved: int = 0
    tokens_per_second: float = 0.0

    @property
    def error(self) -> float:
        """predicted / measured - 1, of the peak of allocated bytes."""
        return (self.peak + WORKSPACES) / self.measured_peak - 1

    def holds(self, most: float) -> bool:
        return not self.failure and abs(self.error) <= most

    def line(self) -> str:
        model = self.words[0].removeprefix("model=")
        named = f"| {model} | {self.label} | {self.micro} | {(self.peak + WORKSPACES) / GIB:.2f} |"
        if self.failure:
            return f"{named} {self.failure.splitlines()[0]} | | {self.reserved / GIB:.2f} | | |"
        reserved = f"{self.reserved / GIB:.2f} | {self.measured_reserved / GIB:.2f}"
        return (
            f"{named} {self.measured_peak / GIB:.2f} | {self.error:+.1%} | {reserved} | {self.tokens_per_second:,.0f} |"
        )


def program(*words: str) -> Any:
    """The JSON that a command of run.py prints."""
    done = subprocess.run([sys.executable, "run.py", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if not done.stdout:
        raise SystemExit(f"gpu_fits.py: expected JSON of run.py {' '.join(words)}, found none")
    return json.loads(done.stdout)


def fitting(words: Sequence[str], labels: Sequence[str]) -> Iterator[Row]:
    """The rows of `fit` with these labels that fit, each with the micro-batch of the words or with its largest.

    A tight row is one of them: it must run, with memory that the allocator gives back and takes again.
    """
    for row in program("fit", "--json", *words, *COMMON)["rows"]:
        if row["label"] not in labels or not row["micro"]:
            continue
        micro = f"batch.micro={row['micro']}"
        if "reserved_bytes" not in row:  # reserved bytes are predicted at a micro-batch that is asked for
            yield from fitting((*words, micro), [row["label"]])
        elif row["fits"] in ("yes", "tight"):
            own = [word for word in row["overrides"] if not word.startswith(("hardware=", "batch.micro="))]
            label = row["label"] if row["fits"] == "yes" else f"{row['label']}, tight"
            yield Row(label, (*own, micro), row["micro"], row["peak_bytes"], row["reserved_bytes"])


def with_run(row: Row) -> Row:
    """The row with what its run on this GPU took."""
    point = program(*row.words, *RUN, "--json")
    if point["state"] not in ("ok", "tight"):
        return replace(row, failure=point["message"] or point["state"])
    memory, throughput = point["result"]["memory"], point["result"]["throughput"]
    return replace(
        row,
        measured_peak=memory["peak_allocated_bytes"],
        measured_reserved=memory["peak_reserved_bytes"],
        tokens_per_second=throughput["tokens_per_second"]["median"],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hardware", default="h100_80gb", help="the hardware that `fit` is asked of")
    parser.add_argument("--most-percent", type=float, default=3.0, help="the largest difference of a peak")
    args = parser.parse_args()
    if lacks_packages("lora", "peft"):
        return 2
    if not torch.cuda.is_available():
        print("gpu_fits.py: expected a CUDA device, found none; nothing was run", file=sys.stderr)
        return 2
    print("\n".join(HEAD))
    rows = []
    for words, labels in ASKED:
        for row in fitting((*words, f"hardware={args.hardware}"), labels):
            rows.append(with_run(row))
            print(rows[-1].line(), flush=True)
    expected = sum(len(labels) for _, labels in ASKED)
    held = sum(row.holds(args.most_percent / 100) for row in rows)
    verdict = f"{held} of {expected} rows fit, with peaks that differ by at most {args.most_percent:g} %"
    print(verdict)
    report = ["# What `fit` calls fitting, run", "", json.dumps(facts()), "", *HEAD, *(row.line() for row in rows)]
    path = ROOT / f"benchmarks/results/gpu_fits_{date.today()}.md"
    path.write_text("\n".join([*report, "", f"{verdict}. Command: `{' '.join(['python', *sys.argv])}`.", ""]))
    return 0 if held == expected else 1


if __name__ == "__main__":
    sys.exit(main())
