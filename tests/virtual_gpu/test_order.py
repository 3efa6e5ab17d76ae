"""On a virtual GPU every row keeps the rules of harness/virtual_gpu/checks.py: order, current device, host waits.

Rows are run for three steps as one rank of a world, with fake tensors on device 3; see tests/harness/virtual_gpu.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness.attack_counts import Tally
from harness.virtual_gpu.checks import troubles
from harness.virtual_gpu.faults import FAULTS
from harness.virtual_gpu.pairs import covering_rows
from harness.virtual_gpu.process import Job, VirtualGpu
from harness.virtual_gpu.row import Row

from zero_runtime.plan import OuterSharding

KINDS: tuple[OuterSharding, ...] = ("optim",)
STAGES = [Row(stage=stage) for stage in (0, 1, 2, 3)]
OFFLOADED = [
    *(Row(stage=stage, offload="optimizer") for stage in (0, 1, 2, 3)),
    Row(offload="params"),
    Row(offload="both"),
    *(Row(offload="both", prefetch=prefetch) for prefetch in (0, 3)),
    Row(offload="both", micro_batches=3),
    Row(offload="optimizer", precision="fp32"),
    Row(offload="both", precision="fp32"),
    *(Row(stage=2, offload="optimizer", optimizer=name) for name in ("sgd", "lion", "adamw8bit")),
    Row(offload="both", shard_ranks=4),
    Row(offload="both", frozen=True),
    Row(offload="both", micro_batches=3, no_sync=True),
    Row(offload="both", precision="fp16", skips=True, steps=5),
    Row(stage=2, offload="optimizer", precision="fp16", skips=True, steps=5),
    Row(offload="both nvme", precision="fp16", skips=True, steps=5),
    *(Row(stage=stage, offload="optimizer nvme") for stage in (0, 2, 3)),
    Row(offload="both nvme"),
    Row(offload="both nvme", prefetch=3),
    Row(offload="params cpu optimizer nvme"),
]
RECOMPUTED = [
    *(
        Row(recompute=kind, offload=offload)
        for kind in ("none", "full", "every_nth", "by_operation")
        for offload in ("none", "activations")
        if (kind, offload) != ("none", "none")
    ),
    Row(stage=2, recompute="full", offload="activations", micro_batches=2),
]
OUTER = [
    *(Row(shard_ranks=shards, outer_sharding=kind) for shards in (1, 4, 8) for kind in KINDS),
    *(Row(shard_ranks=2, outer_sharding=kind, micro_batches=2, recompute="full") for kind in KINDS),
    *(Row(shard_ranks=4, outer_sharding=kind, offload="optimizer") for kind in KINDS),
    Row(shard_ranks=4, outer_sharding="optim", offload="optimizer nvme"),
    Row(shard_ranks=4, outer_sharding="optim", frozen=True, tied=True),
    Row(shard_ranks=4, outer_sharding="optim", precision="fp32"),
    Row(shard_ranks=4, outer_sharding="optim", precision="fp16", skips=True, steps=5),
    Row(shard_ranks=8, outer_sharding="optim", world=64, rank=37),
]
OTHERS = [
    *(Row(stage=stage, micro_batches=3) for stage in (0, 1, 2, 3)),
    *(Row(stage=stage, micro_batches=3, no_sync=True) for stage in (2, 3)),
    *(Row(stage=stage, precision="fp16", skips=True, steps=5) for stage in (2, 3)),
    *(Row(prefetch=prefetch) for prefetch in (0, 3)),
    *(Row(stage=stage, shard_ranks=shards) for stage in (1, 2, 3) for shards in (1, 2, 4)),
    Row(shard_ranks=2, micro_batches=2),
    *OUTER,
    *(Row(stage=stage, optimizer="lamb") for stage in (0, 2, 3)),
    *(Row(optimizer=name) for name in ("adamw8bit", "lion", "sgd", "torch")),
    Row(precision="fp32"),
    Row(tied=True),
    Row(frozen=True),
    Row(embedding_last=True),
    Row(world=1, rank=0),
    Row(stage=2, world=1, rank=0, offload="optimizer"),
    Row(world=1, rank=0, offload="both"),
]
WIDE = [
    replace(row, world=64, rank=37)
    for row in (*STAGES, Row(offload="both"), Row(shard_ranks=8), Row(stage=2, shard_ranks=8), Row(optimizer="lamb"))
]
ROWS = [*STAGES, *OFFLOADED, *RECOMPUTED, *OTHERS, *WIDE]
# Helper threads run as early and as late as possible, where there are any.
LATE = [replace(row, late=True) for row in ROWS if row.offload not in ("none", "activations")]
SHORT = {
    Row(stage=2),
    Row(shard_ranks=4),
    Row(shard_ranks=4, outer_sharding="optim"),
    Row(offload="both", late=True),
    Row(stage=2, offload="optimizer"),
    Row(recompute="by_operation", offload="activations"),
}


def rows() -> list[object]:
    every = list(dict.fromkeys([*ROWS, *LATE, *covering_rows()]))
    assert set(every) >= SHORT
    return [pytest.param(row, id=str(row), marks=[] if row in SHORT else pytest.mark.full) for row in every]


@pytest.mark.parametrize("row", rows())
def test_a_row_keeps_every_rule(row: Row, virtual_gpu: VirtualGpu, checked: Tally) -> None:
    found = virtual_gpu.result(Job(row))
    broken = troubles(row, found)
    checked(
        "rows on the virtual GPU",
        run=1,
        operations=found["operations"],
        pairs_of_accesses=found["checked"],
        unordered=len(found["disorders"]),
        broken_rules=len(broken),
    )
    assert not broken, "\n".join(f"{rule}:\n  " + "\n  ".join(lines) for rule, lines in broken.items())
    gathers = sum(kind == "all_gather" for _, kind, *_ in found["issued"])
    sends = row.shard_ranks != 1 or row.outer_sharding is not None
    assert bool(gathers) == (row.stage > 0 and row.world > 1 and sends), "no collective was recorded"


def test_the_rules_can_fail(virtual_gpu: VirtualGpu) -> None:
    """One of the faults of test_faults.py, in the short form too."""
    fault = FAULTS["nobody_sets_the_device"]
    assert fault.rule in troubles(fault.row, virtual_gpu.result(Job(fault.row, ("nobody_sets_the_device",))))
