"""DeepSpeed's two estimators of the memory of model states, as closed forms. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EstimatedBytes:
    """What DeepSpeed's estimators print, in bytes: host memory of one node, memory of one GPU."""

    host: int
    gpu: int


def deepspeed_zero2_estimate(
    numel: int, gpus_per_node: int, nodes: int = 1, *, optimizer_on_host: bool, buffer_factor: float = 1.5
) -> EstimatedBytes:
    """`estimate_zero2_model_states_mem_needs` of DeepSpeed 0.19.6 (18 = 2 gradients + 16 fp32 states and gradients).

    The documentation's printed examples are of the older 4P + 16P/N (changed in pull request 5099).
    """
    gpus = gpus_per_node * nodes
    if optimizer_on_host:
        return EstimatedBytes(int(numel * max(4 * gpus, 16) * buffer_factor), 2 * numel)
    return EstimatedBytes(int(numel * 4 * gpus_per_node * buffer_factor), 2 * numel + int(18 * numel / gpus))


def deepspeed_zero3_estimate(
    numel: int,
    largest_layer: int,
    gpus_per_node: int,
    nodes: int = 1,
    *,
    params_on_host: bool,
    optimizer_on_host: bool,
    built_sharded: bool,
    buffer_factor: float = 1.5,
) -> EstimatedBytes:
    """`estimate_zero3_model_states_mem_needs` of DeepSpeed 0.19.6; `built_sharded` is its `zero_init`.

    largest_layer: elements of the module with the most parameters of its own.
    """
    gpus, share = gpus_per_node * nodes, 1 / nodes
    gathered = 4 * largest_layer
    if not optimizer_on_host:
        host = (largest_layer if built_sharded else numel) * 4 * gpus_per_node * buffer_factor
        return EstimatedBytes(int(host), gathered + int(18 * numel / gpus))
    per_param = 18 if params_on_host else 16
    per_node = per_param * share if built_sharded else max(4 * gpus_per_node, per_param * share)
    return EstimatedBytes(
        int(numel * per_node * buffer_factor), gathered + (0 if params_on_host else int(2 * numel / gpus))
    )
