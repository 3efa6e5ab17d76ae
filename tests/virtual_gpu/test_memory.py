"""On a virtual GPU the peak of a step is the predicted one to the byte, but for a few numbers, in every row.

The allocator is as in harness/virtual_gpu/allocator.py: blocks that other streams use come back when the host has
waited for these, and the host is infinitely fast. That it needs no more than the tensors is a rule of every row.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness.attack_counts import Tally
from harness.virtual_gpu.checks import NUMBERS, troubles, unpredicted_bytes
from harness.virtual_gpu.process import Job, VirtualGpu
from harness.virtual_gpu.row import Row

ROWS = [
    *(Row(stage=stage) for stage in (0, 1, 2, 3)),
    *(Row(stage=stage, embedding_last=True) for stage in (0, 1, 2, 3)),
    *(Row(stage=stage, micro_batches=3) for stage in (0, 1, 2, 3)),
    *(Row(stage=stage, micro_batches=3, no_sync=True) for stage in (2, 3)),
    Row(micro_batches=2, no_sync=True, precision="bf16"),
    *(Row(prefetch=prefetch) for prefetch in (0, 3)),
    *(Row(stage=stage, shard_ranks=2) for stage in (1, 2, 3)),
    *(Row(shard_ranks=2, outer_sharding="optim", micro_batches=micro) for micro in (1, 3)),
    Row(shard_ranks=2, outer_sharding="optim", offload="optimizer"),
    *(Row(stage=stage, offload="optimizer") for stage in (0, 1, 2, 3)),
    *(Row(offload=offload, prefetch=prefetch) for offload in ("params", "both", "both nvme") for prefetch in (1, 3)),
    *(
        Row(recompute=kind, offload=offload)
        for kind in ("none", "full", "every_nth", "by_operation")
        for offload in ("none", "activations")
        if (kind, offload) != ("none", "none")
    ),
    *(Row(optimizer=name) for name in ("adamw8bit", "lion", "sgd", "torch", "lamb")),
    Row(precision="fp32"),
    Row(tied=True),
    Row(frozen=True),
    Row(offload="both", frozen=True),
    Row(world=64, rank=37),
    Row(world=64, rank=37, offload="both"),
    Row(world=64, rank=37, shard_ranks=8),
]


SHORT = Row(stage=2, offload="optimizer")  # gradients are held while they are copied


@pytest.mark.parametrize(
    "row", [row if row == SHORT else pytest.param(row, marks=pytest.mark.full) for row in ROWS], ids=str
)
def test_the_peak_on_the_device_is_the_predicted_one(row: Row, virtual_gpu: VirtualGpu, checked: Tally) -> None:
    large = replace(row, width=128, vocab=512, blocks=8, tokens=16, traced=True)
    found = virtual_gpu.result(Job(large))
    differs = not 0 <= unpredicted_bytes(large, found) <= NUMBERS * 8
    checked("memory of the virtual GPU", rows=1, other_than_predicted=int(differs))
    assert not troubles(large, found)
