"""A rough estimate of the time of a configuration's step on described hardware, from the hardware's data sheet."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

from orchestrator.config.hardware import GpuNode
from orchestrator.config.schema import RunConfig
from orchestrator.wings.kinds.kind import is_causal
from orchestrator.wings.predict import memory_cache
from orchestrator.wings.predict.step import ConfigMemory
from zero_runtime.offload_plan import Tier
from zero_runtime.precision import ITEMSIZE_BYTES
from zero_runtime.predict.timing.data_sheet import (
    GENERATIONS,
    Efficiencies,
    HostPeaks,
    Layout,
    Peaks,
    Ring,
    fitted_shares,
    generation,
    segment_s,
    step_costs,
    update_bytes,
    with_host,
)
from zero_runtime.predict.timing.step_time import StepSeconds, step_time

TERA, GIGA = 1e12, 1e9
# Beyond what the published runs of the fit have, no number is shown (docs/published.md).
MOST_NODES = 32
LAUNCH_S = 8e-6  # in which the host calls an operation of torch and starts its kernel: assumed
# The largest part of the GPU's time. Up to here the errors of 271 published runs do not grow with it; from 0.15 to 0.2
# the estimate is 10 % too short in the median, to 0.3 18 %, to 0.5 37 %.
MOST_LAUNCHING = 0.15


@dataclass(frozen=True)
class RoughTime:
    """The estimated time of a step. launch_share: the time in which the host starts the model's kernels, of that in
    which the GPU computes them."""

    step: StepSeconds
    launch_share: float


def rough_time(memory: ConfigMemory) -> RoughTime | None:
    """The time of a step; None if it was not traced, offloads activations, or needs a number that the data sheet
    lacks."""

    def seconds() -> tuple[float, ...] | None:
        time = estimate(memory, shares_of(memory.config))
        return None if time is None else (time.launch_share, *astuple(time.step))

    key = f"time-{memory.name}-{memory_cache.hash_of(memory.config)}"
    found = memory_cache.recalled(key, seconds) if memory.name else seconds()
    return None if found is None else RoughTime(StepSeconds(*found[1:]), found[0])


def shares_of(config: RunConfig) -> Efficiencies:
    """Those of the described GPU's generation."""
    return fitted_shares(config.hardware.gpu or "")


def estimate(memory: ConfigMemory, shares: Efficiencies) -> RoughTime | None:
    """`rough_time` with these shares, not from the cache."""
    config, part = memory.config, memory.part(memory.config.batch.micro)
    peaks, host = peaks_of(config), host_of(config)
    if part is None or peaks is None or config.recompute.offload != "none" or (host is None and offloads(config)):
        return None
    linear, work = part.linear, memory.work(config.batch.micro)
    assert work is not None, "the part is the trace of this micro-batch"
    marks = [(kind, unit) for _, kind, unit in linear.trace.marks]
    works = work.in_order(marks)
    if works is None:
        return None
    segments = [segment_s(one, peaks, shares) for one in works]
    rules = memory.rules
    costs = step_costs(peaks, data_layout(config, rules.group_ranks), element_bytes(config), shares)
    if host is not None and offloads(config):
        precision = config.precision.mixed
        param, in_file = ITEMSIZE_BYTES[precision.param], config.offload.params is Tier.NVME
        costs = with_host(costs, host, element_bytes(config), param, params_in_file=in_file)
    time = step_time(linear.trace, memory.units, rules, segments, costs, prefetch=config.zero.prefetch)
    time = replace(time, exposed_s=time.exposed_s + tensor_s(memory, peaks, shares))
    return RoughTime(
        time.slower(shares.slowest(config.resources.nodes)),
        sum(one.kernels for one in works) * LAUNCH_S / sum(segments),
    )


def element_bytes(config: RunConfig) -> float:
    optimizer = config.optimizer
    clips = optimizer.clip_norm is not None
    return update_bytes(config.precision.mixed, optimizer.rule.state_bytes, config.batch.accumulation, clips=clips)


def outside(config: RunConfig, time: RoughTime) -> str:
    """Why the table of shares does not know a case like this; empty if it does."""
    node, resources = config.hardware, config.resources
    if not is_causal(config.model):
        return "models other than causal language models"
    if resources.nodes > MOST_NODES:
        return f"more than {MOST_NODES} nodes"
    if config.parallel.tp > resources.ranks // resources.nodes:
        return "tensor-parallel groups across nodes"
    slowest = (node.link_gb_per_s or 0.0) <= (node.host_link_gb_per_s or 0.0)
    if resources.ranks > resources.nodes and slowest:
        return "PCIe-only GPUs"
    if not generation(node.gpu or ""):
        return f"GPUs other than {' and '.join(GENERATIONS)}"
    if time.launch_share > MOST_LAUNCHING:
        return "batches so small that the host may not start kernels as fast as the GPU computes them"
    return ""


def data_layout(config: RunConfig, shards: int) -> Layout:
    """The ranks that ZeRO shards over. With tensor parallelism, one rank of each group of consecutive ranks."""
    return Layout(config.data_ranks, min(config.resources.nodes, config.data_ranks), shards)


def tensor_s(memory: ConfigMemory, peaks: Peaks, shares: Efficiencies) -> float:
    """Seconds of the messages of tensor or sequence parallelism in a step; the ranks wait for all of them."""
    config, sent, group = memory.config, memory.tensor_sent(), memory.config.parallel.group
    if not sent.calls:
        return 0.0
    per_node = config.ranks // config.resources.nodes
    # All messages of layers as sums: those of one token's width are alike, and the loss's gather is small. In an
    # exchange of parts a rank sends as much as in one round of a ring.
    rounds = 2 if config.parallel.tp > 1 else 1
    whole = replace(shares, messages=1.0)  # engines divide what a unit of ZeRO sends, and not these
    ring = Ring(group, -(-group // per_node)).curve(peaks, whole, rounds=rounds)
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


def dense_peak(config: RunConfig, gpu: str | None) -> tuple[float | None, str | None]:
    """The dense peak of a GPU of this name and where it is from; None for a CPU and for a GPU without a data sheet."""
    if gpu is None:
        return None, None
    from orchestrator.compose.known_gpus import data_sheet  # imported here: ranks on a CPU do without YAML

    node = config.hardware if config.hardware.is_described else data_sheet(gpu)
    peak = None if node is None else peak_flops_per_s(config, node)
    return peak, None if node is None or peak is None else f"hardware={node.name}"


def peaks_of(config: RunConfig) -> Peaks | None:
    """The peaks of the described GPU; None if one that the ranks use is not known."""
    node, resources = config.hardware, config.resources
    flops, link, network = peak_flops_per_s(config), node.link_gb_per_s, node.network_gb_per_s
    lacks_link = link is None and resources.ranks > resources.nodes
    if flops is None or node.memory_gb_per_s is None or lacks_link or (network is None and resources.nodes > 1):
        return None
    return Peaks(flops, node.memory_gb_per_s * GIGA, (link or network or 0.0) * GIGA, (network or link or 0.0) * GIGA)


def host_of(config: RunConfig) -> HostPeaks | None:
    """What a rank has of the described node's host; None if a bandwidth that the offload uses is not known."""
    node, ranks = config.hardware, config.ranks // config.resources.nodes
    link, memory, drive = node.host_link_gb_per_s, node.host_memory_gb_per_s, node.drive_gb_per_s
    in_file = Tier.NVME in (config.offload.params, config.offload.optimizer)
    if link is None or memory is None or (in_file and drive is None):
        return None
    of_drives = drive * GIGA / ranks if in_file and drive is not None else None
    return HostPeaks(link * GIGA, memory * GIGA / ranks, of_drives)


def lacking(config: RunConfig) -> list[str]:
    """The settings of the described hardware that are not known, and without which a step has no time."""
    resources = config.resources
    used = {
        "memory_gb_per_s": True,
        "link_gb_per_s": resources.ranks > resources.nodes,
        "network_gb_per_s": resources.nodes > 1,
        "host_link_gb_per_s": offloads(config),
        "host_memory_gb_per_s": offloads(config),
    }
    return [f"hardware.{name}" for name, is_used in used.items() if is_used and getattr(config.hardware, name) is None]


def offloads(config: RunConfig) -> bool:
    """Whether parameters or states of the optimizer are outside of the device."""
    return config.offload.params is not Tier.DEVICE or config.offload.optimizer is not Tier.DEVICE


def without_offload(config: RunConfig) -> RunConfig:
    """The configuration with parameters and states on the device."""
    offload = replace(config.offload, params=Tier.DEVICE, optimizer=Tier.DEVICE, folder=None)
    return replace(config, offload=offload)
