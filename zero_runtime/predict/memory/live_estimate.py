"""What a model's states would take on each rank, by offload, for a model that is in memory or on the meta device.

The functions that print have the names of DeepSpeed's estimators; the numbers are those of this runtime, by the
arithmetic that it allocates by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from zero_runtime.flat_layout import LayoutRules
from zero_runtime.offload.memory import Moves, host_bytes
from zero_runtime.plan import Partition, ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.memory.activation_count import Mark, Trace
from zero_runtime.predict.memory.counted_unit import CountRules
from zero_runtime.predict.memory.step_memory import replay_states
from zero_runtime.runtime import RuntimeSettings
from zero_runtime.state_bytes import ADAM_BYTES, UnitSize
from zero_runtime.unit_planner import UnitRules, plan_units

_PRECISION = MixedPrecision("bf16")
_WITHOUT_PARAMS = ZeroPlan(Partition.REPLICATED, Partition.SHARDED, Partition.SHARDED)
_ALL = ZeroPlan(Partition.SHARDED, Partition.SHARDED, Partition.SHARDED)


@dataclass(frozen=True)
class NeededBytes:
    """gpu: the most bytes of a rank on its GPU in a step, without activations. node: host memory of all ranks of a node
    for offloaded states."""

    gpu: int
    node: int


def needed_bytes(
    model: nn.Module,
    plan: ZeroPlan,
    ranks_per_node: int,
    nodes: int = 1,
    *,
    params_on_host: bool = False,
    optimizer_on_host: bool = False,
) -> NeededBytes:
    """Bytes to train the model in bf16 with Adam, with fp32 masters and gradients; parameters need no values."""
    world, prefetch = ranks_per_node * nodes, RuntimeSettings().prefetch
    units, layouts = [], LayoutRules(plan.shard_count(world), world)
    for spec in plan_units(model, UnitRules(_PRECISION)):
        size = UnitSize.of(
            layouts.layout(spec.shapes, trainable=spec.trainable),
            trainable=spec.trainable,
            is_root=model in spec.modules,
            params_offloaded=params_on_host,
            optimizer_offloaded=optimizer_on_host,
            separate_memory=params_on_host or optimizer_on_host,
        )
        units.append((size, spec.precision))
    shards = plan.shard_count(world)
    rules = CountRules(plan, shards, world // shards, 1, ADAM_BYTES, by_messages=False)
    replay = replay_states(_in_order([size for size, _ in units]), units, rules, prefetch=prefetch)
    gpu = max(replay.between_steps, *(level.highest for level in (replay.start, *replay.marks, replay.step)))
    return NeededBytes(gpu, host_bytes(units, Moves(shards, prefetch)).host * ranks_per_node)


def _in_order(sizes: Sequence[UnitSize]) -> Trace:
    """A step without activations that uses the units in the order of registration, and the root's around all others."""
    places = [place for place, size in enumerate(sizes) if not size.is_root]
    roots = [place for place, size in enumerate(sizes) if size.is_root]
    trace = Trace()
    for root in roots:
        trace.mark(Mark.BEFORE_FORWARD, root)
    for place in places:
        trace.mark(Mark.BEFORE_FORWARD, place)
        trace.mark(Mark.AFTER_FORWARD, place)
    for root in roots:
        trace.mark(Mark.AFTER_FORWARD, root)
    for place in (*roots, *reversed(places)):
        trace.mark(Mark.BEFORE_BACKWARD, place)
        if place in places:
            _end_backward(trace, place, sizes[place])
    for root in roots:
        _end_backward(trace, root, sizes[root])
    return trace


def _end_backward(trace: Trace, place: int, size: UnitSize) -> None:
    if size.trainable:
        trace.mark(Mark.GRADIENT, place)
    trace.mark(Mark.AFTER_BACKWARD, place)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the bytes with sharded gradients and optimizer states. additional_buffer_factor has no effect."""
    _print_rows(model, _WITHOUT_PARAMS, num_gpus_per_node, num_nodes, [(False, True), (False, False)])


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the bytes with sharded parameters too. additional_buffer_factor has no effect."""
    _print_rows(model, _ALL, num_gpus_per_node, num_nodes, [(True, True), (False, True), (False, False)])


def _print_rows(model: nn.Module, plan: ZeroPlan, per_node: int, nodes: int, rows: list[tuple[bool, bool]]) -> None:
    numel = sum(param.numel() for param in model.parameters())
    print(f"{numel:,} parameters, {per_node * nodes} ranks on {nodes} nodes; bf16, Adam; without activations")
    print(f"{'GPU of a rank':>14}  {'host of a node':>14}  offload")
    for params, optimizer in rows:
        needed = needed_bytes(model, plan, per_node, nodes, params_on_host=params, optimizer_on_host=optimizer)
        places = f"offload_param={'cpu' if params else 'none'}, offload_optimizer={'cpu' if optimizer else 'none'}"
        print(f"{needed.gpu / 2**30:>10.2f} GiB  {needed.node / 2**30:>10.2f} GiB  {places}")
