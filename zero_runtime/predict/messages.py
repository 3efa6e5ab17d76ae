"""What the collectives of a step send: elements, bytes and closed forms, from the plan and the layouts.

The ledger of a run (ledger.py) counts the same elements as they are sent; the tests hold both against each other. See
[Note: quantised collectives] in wire.py. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from zero_runtime.plan import Partition, ZeroPlan
from zero_runtime.wire import BITS, BLOCK_NUMEL, Wire

SCALE_BYTES = 4
# What a conversion between values and codes holds while it runs, as in kernels/wire_format.py: a few tensors of fp32
# for each of the elements that are converted at a time.
CONVERTED_NUMEL = {"cpu": 1 << 16, "cuda": 1 << 22}
CONVERTED_BYTES = 17  # values in fp32, their padded copy, quotients and codes in fp32, and a mask
# The same while stored weights are read back, as in kernels/weight_codes.py: the scales in bf16 and fp32, or codes of 4
# bits in a byte each beside their halves.
READ_BACK_NUMEL = {"cpu": 1 << 16, "cuda": 1 << 24}
READ_BACK_BYTES = {"int8": (2 + 4) / 64, "int4": 1 + 1}
SIGNS_BYTES = 8  # of an element of the unit whose signs are averaged: two tensors of fp32


@dataclass(frozen=True)
class CollectiveCounts:
    """How many times each trainable element is gathered and reduced in one steady training step."""

    gathers: int
    reductions: int
    exchanges: int | None = None  # gathers across the shard groups, of a plan with outer sharding

    @classmethod
    def of(cls, plan: ZeroPlan, micro_batches: int = 1, *, reduces_at_boundary: bool = False) -> CollectiveCounts:
        """Counts as in arXiv 1910.02054, section 7. Gathers: one per step if parameters are replicated and the
        optimizer is not, two per micro-batch if parameters are sharded. Reductions: one per step, or one per
        micro-batch if gradients are sharded and are not kept unsharded until the last micro-batch (`no_sync`)."""
        gathers = 2 * micro_batches if plan.params is Partition.SHARDED else int(plan.optimizer is Partition.SHARDED)
        every = plan.reduces_every_backward and not reduces_at_boundary
        return cls(gathers, micro_batches if every else 1, None if plan.outer_sharding is None else 1)

    @property
    def across(self) -> int:
        """How often an element is sent across the shard groups: an all-reduce sends it twice, as a reduce-scatter and
        an all-gather do."""
        return 2 * self.reductions if self.exchanges is None else self.reductions + self.exchanges


def collective_elements(counts: CollectiveCounts, numel: int, *, world: int, shard_count: int) -> int:
    """Elements that one rank sends in one steady step for `numel` trainable elements.

    With groups of G = shard_count ranks and N/G replicas of each shard: a gather or reduce-scatter of P elements sends
    (G-1)/G P, and the all-reduce of a shard over its replicas sends 2 (N/G - 1)/(N/G) P/G. For G = N that is (N-1)/N P
    per collective; for G = 1 only the all-reduce remains, 2 (N-1)/N P. With outer sharding, half of that all-reduce is
    sent in each reduction (a reduce-scatter), and as much in each exchange. Exact if numel is a multiple of `world`,
    otherwise rounded down.
    """
    replicas = world // shard_count
    within = (counts.gathers + counts.reductions) * numel * (shard_count - 1) // shard_count
    return within + counts.across * numel * (replicas - 1) // world


def collective_formula(counts: CollectiveCounts, *, world: int, shard_count: int) -> str:
    """The closed form of `collective_elements`, in Ψ, N (ranks) and G (ranks of a shard group, if fewer)."""
    if shard_count == 1:
        return f"{counts.across}Ψ·(N-1)/N"
    within = counts.gathers + counts.reductions
    if shard_count == world:
        return f"{within}Ψ·(N-1)/N"
    return f"{within}Ψ·(G-1)/G + {counts.across}Ψ/G·(N/G-1)/(N/G)"


def read_back_bytes(numel: int, weights: str, device: str) -> float:
    """Bytes that reading so many stored weights back takes beside what is read and written."""
    return min(numel, READ_BACK_NUMEL[device]) * READ_BACK_BYTES[weights]


def packed_bytes(numel: int, dtype: str) -> int:
    """Bytes of `numel` quantised elements with their scales; `numel` is a multiple of 8, as every shard's is."""
    assert numel % 8 == 0
    return numel * BITS[dtype] // 8 + SCALE_BYTES * -(-numel // BLOCK_NUMEL)


@dataclass(frozen=True)
class Sent:
    """What one rank sends of one unit in a step: `elements` as the ledger counts them, where a quantised element counts
    as its bytes, and `nbytes`."""

    elements: int
    nbytes: int

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.elements + other.elements, self.nbytes + other.nbytes)


def gathered(
    wire: Wire, plan: ZeroPlan, shard_numel: int, shard_count: int, itemsize: float, *, trainable: bool
) -> Sent:
    """One gather: this rank's shard to every other rank of its group, in total (G - 1) shards."""
    others = shard_count - 1
    if wire.gather is not None and wire.gathers(plan, trainable=trainable):
        packed = others * packed_bytes(shard_numel, wire.gather)
        return Sent(packed, packed)
    nbytes = others * int(shard_numel * itemsize)
    return Sent(others * shard_numel if itemsize % 1 == 0 else nbytes, nbytes)  # weights in codes are sent as bytes


def reduced(
    wire: Wire, shard_numel: int, shard_count: int, replicas: int, itemsize: int, *, stays_split: bool = False
) -> Sent:
    """One reduction: to every other rank of the group its shard, then an all-reduce of the shard over its replicas, or
    a reduce-scatter if the sum `stays_split` between them (outer sharding)."""
    others, across = shard_count - 1, (2 - stays_split) * shard_numel * (replicas - 1) // replicas
    exact = Sent(across, across * itemsize)
    if wire.reduce is not None:
        packed = others * packed_bytes(shard_numel, wire.reduce)
        return Sent(packed, packed) + exact
    return Sent(others * shard_numel, others * shard_numel * itemsize) + exact


def exchanged(held_numel: int, groups: int, itemsize: float) -> Sent:
    """One exchange of parameters between shard groups with outer sharding: this rank's part of the `held_numel`
    elements that it holds for its group, to the other ranks at its position."""
    sent = held_numel * (groups - 1) // groups
    return Sent(sent, int(sent * itemsize))


def signs_bytes(padded_numel: int, world: int) -> int:
    """Bytes that a rank sends to average a unit's signs (optim/onebit.py): its part of them to each other rank, and its
    part of the average, each with one scale."""
    return 2 * (world - 1) * (padded_numel // world // 8 + SCALE_BYTES)
