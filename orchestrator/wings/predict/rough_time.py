"""A rough estimate of the time of a configuration's step on described hardware, from the hardware's data sheet."""

from __future__ import annotations

from dataclasses import astuple, replace

from orchestrator.config.hardware import GpuNode
from orchestrator.config.schema import RunConfig
from orchestrator.wings.predict import memory_cache
from orchestrator.wings.predict.step import ConfigMemory
from zero_runtime.offload_plan import Tier
from zero_runtime.predict.timing.data_sheet import PUBLISHED, Layout, Peaks, Ring, segment_s, step_costs, update_bytes
from zero_runtime.predict.timing.step_time import StepSeconds, step_time

TERA, GIGA = 1e12, 1e9


def rough_time(memory: ConfigMemory) -> StepSeconds | None:
    """The time of a step; None if it was not traced, offloads, or needs a number that the data sheet lacks."""

    def seconds() -> tuple[float, ...] | None:
        time = _computed(memory)
        return None if time is None else astuple(time)

    key = f"time-{memory.name}-{memory_cache.hash_of(memory.config)}"
    found = memory_cache.recalled(key, seconds) if memory.name else seconds()
    return None if found is None else StepSeconds(*found)


def _computed(memory: ConfigMemory) -> StepSeconds | None:
    config, part = memory.config, memory.part(memory.config.batch.micro)
    peaks = peaks_of(config)
    if part is None or peaks is None or _offloads(config):
        return None
    linear, work = part.linear, memory.work(config.batch.micro)
    assert work is not None, "the part is the trace of this micro-batch"
    segments = work.map(lambda one: segment_s(one, peaks)).in_order(
        [(kind, unit) for _, kind, unit in linear.trace.marks]
    )
    if segments is None:
        return None
    rules, optimizer = memory.rules, config.optimizer
    element_bytes = update_bytes(
        config.precision.mixed,
        optimizer.rule.state_bytes,
        config.batch.accumulation,
        clips=optimizer.clip_norm is not None,
    )
    costs = step_costs(peaks, data_layout(config, rules.group_ranks), element_bytes)
    time = step_time(linear.trace, memory.units, rules, segments, costs, prefetch=config.zero.prefetch)
    return replace(time, exposed_s=time.exposed_s + _tensor_s(memory, peaks))


def data_layout(config: RunConfig, shards: int) -> Layout:
    """The ranks that ZeRO shards over. With tensor parallelism, one rank of each group of consecutive ranks."""
    return Layout(config.data_ranks, min(config.resources.nodes, config.data_ranks), shards)


def _tensor_s(memory: ConfigMemory, peaks: Peaks) -> float:
    """Seconds of the messages of tensor or sequence parallelism in a step; the ranks wait for all of them."""
    config, sent, group = memory.config, memory.tensor_sent(), memory.config.parallel.group
    if not sent.calls:
        return 0.0
    per_node = config.ranks // config.resources.nodes
    # All messages of layers as sums: those of one token's width are alike, and the loss's gather is small. In an
    # exchange of parts a rank sends as much as in one round of a ring.
    rounds = 2 if config.parallel.tp > 1 else 1
    ring = Ring(group, -(-group // per_node)).curve(peaks, PUBLISHED, rounds=rounds)
    full_bytes = sent.nbytes * group / (rounds * (group - 1))
    return config.batch.accumulation * sent.calls * ring.at(full_bytes / sent.calls)


def peak_flops_per_s(config: RunConfig, node: GpuNode | None = None) -> float | None:
    """The dense peak of the dtype that is computed in; None if the data sheet has none. node: None for the hardware of
    the configuration."""
    dtype: str = config.precision.mixed.compute or config.precision.mixed.param
    if dtype == "fp32" and config.precision.tf32:
        dtype = "tf32"
    tflops = (node or config.hardware).tflops(dtype)
    return None if tflops is None else tflops * TERA


def peaks_of(config: RunConfig) -> Peaks | None:
    """The peaks of the described GPU; None if one that the ranks use is not known."""
    node, resources = config.hardware, config.resources
    flops, link, network = peak_flops_per_s(config), node.link_gb_per_s, node.network_gb_per_s
    lacks_link = link is None and resources.ranks > resources.nodes
    if flops is None or node.memory_gb_per_s is None or lacks_link or (network is None and resources.nodes > 1):
        return None
    return Peaks(flops, node.memory_gb_per_s * GIGA, (link or network or 0.0) * GIGA, (network or link or 0.0) * GIGA)


def _offloads(config: RunConfig) -> bool:
    offload = config.offload
    return (
        offload.params is not Tier.DEVICE or offload.optimizer is not Tier.DEVICE or config.recompute.offload != "none"
    )
