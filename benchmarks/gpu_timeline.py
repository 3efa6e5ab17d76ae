"""Where a step's time would go on GPUs: this runtime's schedule and FSDP2's, on the virtual GPU and with stated costs.

`python benchmarks/gpu_timeline.py [--cut] [--json]` writes benchmarks/results/; no GPU is needed. `--cut` runs the 7B
rows with 4 of their 32 layers and writes nothing. The costs and their limits: tests/harness/virtual_gpu/timeline.py.
Both contestants run their own code on fake tensors of the full size; what differs is the order of their kernels,
collectives and waits. Compare rows of one table; do not read a row as a measured time.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

RESULTS = ROOT / "benchmarks" / "results"
SEQUENCE = 4096


@dataclass(frozen=True)
class Size:
    """A Llama by its shapes. recompute: "full" where activations would not fit."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int = 32_000
    recompute: str = "none"

    @property
    def config(self) -> dict[str, Any]:
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": SEQUENCE,
        }


SIZES = {
    "1B": Size(2048, 5632, 22, 32, 4),
    "7B": Size(4096, 11008, 32, 32, 32),
    "70B": Size(8192, 28672, 80, 64, 8, recompute="full"),
}


@dataclass(frozen=True)
class Row:
    """One step of one rank, with a micro-batch of 1 x 4,096 tokens. engine: "ours" or "FSDP2"; shard_ranks: of hybrid
    sharding."""

    size: str
    world: int
    stage: int = 3
    shard_ranks: int | None = None
    engine: str = "ours"
    layers: int | None = None  # None: all of them
    prefetch: int = 1

    def __str__(self) -> str:
        machine = "8 GPUs" if self.world == 8 else f"{self.world // 8} nodes x 8"
        sharding = "hybrid 8" if self.shard_ranks else f"stage {self.stage}"
        return f"{self.size}, {machine}, {sharding}{'' if self.prefetch else ', no prefetch'}, {self.engine}"


ROWS = [Row(size, 8, stage) for size in ("1B", "7B") for stage in (2, 3)]
ROWS += [Row(size, 32, shard_ranks=shard_ranks) for size in ("1B", "7B") for shard_ranks in (None, 8)]
ROWS += [Row("70B", 32)]
ROWS += [replace(row, engine="FSDP2") for row in ROWS if row.stage == 3]
ROWS += [Row("7B", 8, prefetch=0)]
CUT = [replace(row, layers=4) for row in ROWS if row.size == "7B"]
# The most exposed communication, in percent of forward and backward; tests/virtual_gpu/test_timeline.py holds them.
CEILINGS = {Row("7B", 8): 2.0, Row("7B", 32, shard_ranks=8): 5.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cut", action="store_true", help="7B with 4 layers; writes no results")
    parser.add_argument("--ceilings", action="store_true", help="only the rows that have a ceiling; writes no results")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    arguments = parser.parse_args()
    guard = loaded_guard()
    found = []
    for row in CUT if arguments.cut else CEILINGS if arguments.ceilings else ROWS:
        began = time.monotonic()
        found.append(in_a_fork(guard, row))
        print(f"{row}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    print(json.dumps(found) if arguments.json else table(found))
    if not (arguments.cut or arguments.ceilings):
        path = RESULTS / f"gpu_timeline_{date.today()}.md"
        path.write_text(table(found) + "\n", encoding="utf-8")
        path.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}", file=sys.stderr)


def loaded_guard() -> ctypes.CDLL:
    """The virtual GPU's library, loaded before torch, and then all that a row needs, so that its fork need not."""
    from harness.virtual_gpu.build import build_guard, load_guard

    os.environ["ZLAB_KERNELS"] = "reference"
    guard = load_guard(build_guard())
    from harness.virtual_gpu import timed_rows  # noqa: F401

    import orchestrator.workloads.models  # noqa: F401

    return guard


def in_a_fork(guard: ctypes.CDLL, row: Row) -> dict[str, Any]:
    """The row's result. A row replaces parts of torch, so it has a process of its own."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(target=run, args=(guard, row, writer))
    child.start()
    writer.close()
    try:
        found: dict[str, Any] = reader.recv()
    except EOFError:
        raise SystemExit(f"{row}: failed, as printed above") from None
    finally:
        child.join()
    return found


def run(guard: ctypes.CDLL, row: Row, writer: Connection) -> None:
    from harness.virtual_gpu import timed_rows

    writer.send({**asdict(row), "name": str(row), **timed_rows.run_llama(guard, row, SIZES[row.size], SEQUENCE)})


def table(found: list[dict[str, Any]]) -> str:
    lines = [
        "| row | forward and backward, ms | kernels ms | exposed communication | the device waits for the host |",
        "|---|---|---|---|---|",
    ]
    for row in found:
        exposed = 100 * row["exposed_ms"] / row["time_ms"]
        waits = 100 * row["host_ms"] / row["time_ms"]
        lines.append(
            f"| {row['name']} | {row['time_ms']:.1f} | {row['kernels_ms']:.1f} | {row['exposed_ms']:.1f} ms, "
            f"{exposed:.1f} % | {row['host_ms']:.1f} ms, {waits:.1f} % |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
