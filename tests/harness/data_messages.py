"""What ZeRO sends over the ranks of the data axis in a step, in closed form, and what a runtime has sent."""

from __future__ import annotations

from zero_runtime.plan import Partition, ZeroPlan
from zero_runtime.predict.messages import CollectiveCounts
from zero_runtime.runtime import ZeroRuntime

FP32_BYTES = 4
Sent = dict[str, tuple[int, int]]  # (calls, bytes) by kind of message


def data_messages(stage: int, world: int, micro_batches: int, units: int, padded: int) -> Sent:
    """Those of ZeRO over `world` ranks: each gather and reduce-scatter sends (N-1)/N of a rank's elements, and an
    all-reduce twice that; every unit has a message of its own. padded: elements of all units of a rank."""
    plan = ZeroPlan.from_stage(stage)
    counts = CollectiveCounts.of(plan, micro_batches)
    one = padded * (world - 1) // world * FP32_BYTES
    if plan.optimizer is Partition.REPLICATED:
        return {"all_reduce": (units, 2 * one)}
    return {
        "all_gather": (counts.gathers * units, counts.gathers * one),
        "reduce_scatter": (counts.reductions * units, counts.reductions * one),
    }


def outer_messages(plan: ZeroPlan, world: int, micro_batches: int, units: int, padded: int) -> Sent:
    """Those of a plan with outer sharding: inside a group two gathers and a reduce-scatter in a micro-batch; across the
    groups a reduce-scatter in a micro-batch, and a gather in each step."""
    group = plan.group_ranks(world)
    groups = world // group
    inside = padded * (group - 1) // group * FP32_BYTES
    across = padded * (groups - 1) // world * FP32_BYTES
    sent = {
        "all_gather": (2 * micro_batches * units, 2 * micro_batches * inside),
        "reduce_scatter": (micro_batches * units, micro_batches * inside),
        "outer_all_gather": (units, across),
        "outer_reduce_scatter": (micro_batches * units, micro_batches * across),
    }
    return {kind: one for kind, one in sent.items() if one[1]}  # a group of one rank sends nothing inside


def counted(runtime: ZeroRuntime) -> tuple[Sent, int, int]:
    """What was sent since the last call, the number of units, and their elements."""
    sent = {kind: (one.calls, one.bytes) for kind, one in runtime.reset_ledger().data.items()}
    return sent, len(runtime.units), sum(unit.layout.padded_numel for unit in runtime.units)
