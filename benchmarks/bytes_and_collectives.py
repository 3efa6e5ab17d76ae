"""Counts bytes of model states and elements sent per step for every row of the plan, next to the formulas.

`python benchmarks/bytes_and_collectives.py [--world N]`; prints the table that benchmarks/results keeps.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.gpt import Gpt, GptSize, loss_of  # noqa: E402
from zero_runtime import state_bytes as memory_model  # noqa: E402
from zero_runtime.accounting import predicted_state_bytes, unit_sizes  # noqa: E402
from zero_runtime.census import take_census  # noqa: E402
from zero_runtime.optim.configs import AdamWConfig  # noqa: E402
from zero_runtime.plan import ZeroPlan  # noqa: E402
from zero_runtime.precision import MixedPrecision  # noqa: E402
from zero_runtime.predict import messages  # noqa: E402
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime  # noqa: E402
from zero_runtime.world import join_world, leave_world  # noqa: E402

SIZE = GptSize(layers=4, width=128, heads=4, vocab=512, seq=64, micro=2)
PRECISIONS = {
    "fp32": MixedPrecision(),
    "bf16": MixedPrecision("bf16"),
    "bf16, reduced in bf16": MixedPrecision("bf16", reduce="bf16"),
    "pure bf16": MixedPrecision("bf16", reduce="bf16", accumulate="bf16", master="bf16"),
}
MICRO_BATCHES = (1, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=2)
    world = parser.parse_args().world
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (world, folder), nprocs=world)
        rows = json.loads(Path(folder, "rows.json").read_text())
    numel = rows[0]["numel"]
    print(f"Ψ = {numel:,} parameters, N = {world} ranks; bytes a rank between the last backward and the step (padding")
    print("taken off); elements that one rank sends in a steady step, as a multiple of Ψ(N-1)/N (padding taken off).\n")
    print("| precision | stage | micro-batches | bytes | counted / Ψ | of the formula | elements sent | counted |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        shares = f"{row['counted'] / numel:.3f} | {row['counted'] / row['exact']:.4f}"
        cells = f"{row['precision']} | {row['stage']} | {row['micro_batches']} | {row['formula']}"
        print(f"| {cells} | {shares} | {row['factor']} | {row['sent']:.4f} |")


def rank_main(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    join_world(f"file://{folder}/rendezvous", rank, world, torch.device("cpu"))
    rows = [
        count(name, precision, stage, micro_batches)
        for name, precision in PRECISIONS.items()
        for micro_batches in MICRO_BATCHES
        for stage in (0, 1, 2, 3)
    ]
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    leave_world()


def count(name: str, precision: MixedPrecision, stage: int, micro_batches: int) -> dict[str, object]:
    """One row of the table: runs two steps and counts in the second."""
    plan = ZeroPlan.from_stage(stage)
    settings = RuntimeSettings(micro_batches=micro_batches)
    torch.manual_seed(0)
    runtime = ZeroRuntime(Gpt(SIZE), plan, precision, AdamWConfig(), settings, torch.device("cpu"))
    ids = torch.randint(SIZE.vocab, (SIZE.micro, SIZE.seq + 1))
    for _ in range(2):
        runtime.reset_ledger()
        for _ in range(micro_batches):
            runtime.backward(loss_of(runtime.model, ids[:, :-1], ids[:, 1:]) / 1e3)
        census = take_census(runtime)
        runtime.step(1e-3)
    world, shard_count = runtime.collectives.world, runtime.collectives.shard_count
    sizes = unit_sizes(runtime)
    numel, padded = sum(unit.numel for unit in sizes), sum(unit.padded_numel for unit in sizes)
    counts = messages.CollectiveCounts.of(plan, micro_batches)

    def elements(of: int) -> int:
        return messages.collective_elements(counts, of, world=world, shard_count=shard_count)

    padding = elements(padded) - elements(numel)
    predicted = predicted_state_bytes(runtime)
    row = {
        "precision": name,
        "stage": stage,
        "micro_batches": micro_batches,
        "numel": numel,
        "formula": memory_model.formula(plan, precision, micro_batches=micro_batches),
        "counted": census.states - predicted.padding,
        "exact": predicted.total - predicted.padding,
        "factor": messages.collective_formula(counts, world=world, shard_count=shard_count),
        "sent": (runtime.reset_ledger().data_elements - padding) * world / (world - 1) / numel,
    }
    runtime.close()
    return row


if __name__ == "__main__":
    main()
