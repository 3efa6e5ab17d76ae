"""Costs of a step on hardware that is not here, from its data sheet. A rough estimate. Standard library only.

[Note: shares of a data sheet]
A data sheet has peaks; operations reach a share of them. The shares below were fitted once to published step times
(benchmarks/published_shares.py); they are the same for every model and setting, and but for two of them for every GPU.
They start from what published measurements of single operations say. Each operation is taken as a kernel that reads and
writes memory, although caches keep what is small. docs/published.md has the method, and the errors on runs of sources
that a fit did not have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from zero_runtime.precision import ITEMSIZE_BYTES, MixedPrecision
from zero_runtime.predict.timing.costs import FREE, CollectiveCost, Curve, StepCosts
from zero_runtime.predict.timing.work import Work


@dataclass(frozen=True)
class Efficiencies:
    """Shares of a data sheet's peaks, and what a data sheet does not tell.

    products: of matrix products in 16 bits, of the dense peak. The best shapes reach 86 % on an A100 and 80 % on an
    H100 (github.com/stas00/ml-engineering, table of maximum achievable matmul FLOPS).

    attention: of attention kernels, of the same peak. FlashAttention-2 reaches 50 to 73 % on an A100 (arXiv 2307.08691)
    and 35 % on an H100, where FlashAttention-3 reaches up to 75 % (arXiv 2407.08608). Runs with the first
    FlashAttention have a share of their own in the fit.

    memory, update: of copies, and of the optimizer's pass over its states, of the memory's bandwidth. Copies on an H100
    reach 3.02 of 3.35 TB/s, BabelStream on a GH200 2.98 to 3.31 of 4 TB/s (github.com/UoB-HPC/BabelStream, issue 194).
    traffic: of the counted bytes of operations that are no products: what a cache keeps does not reach memory.

    links, network: of collectives, of the bandwidth in one direction of the links within a node and between nodes.
    nccl-tests reports 230 to 250 of 300 GB/s between 8 A100; copies between two H100 reach 380 of 450 GB/s
    (github.com/NVIDIA/nccl, issue 1264). links is at the most that the fit allows: sums in the switch of 8 H100, and
    what engines hide of them, are not modelled.

    kernel_s: seconds by which each kernel is longer than its operations and bytes take: its start, its end, and the
    part of the GPU that it does not fill. messages: by how much the latency of a collective is longer than that of one
    ring: engines divide what a unit sends. unhidden: the share of collectives beside computing that a step takes in
    addition. stragglers: by which share each doubling of the nodes makes a step longer.

    compute_slowdown: by how much computing takes longer beside a collective: 18.9 % on average of GPT and Llama models
    on A100, H100, MI210 and MI250 (arXiv 2507.03114). Not fitted, as update is not: no run tells them apart.
    """

    products: float = 0.694
    attention: float = 0.532
    memory: float = 0.793
    traffic: float = 0.88
    update: float = 0.80
    links: float = 0.95
    network: float = 0.59
    kernel_s: float = 4.22e-6
    messages: float = 5.3
    unhidden: float = 0.149
    compute_slowdown: float = 0.189
    stragglers: float = 0.0135

    def slowest(self, nodes: int) -> float:
        """By which factor a step on so many nodes is longer than that of a rank that waits for no other."""
        return 1 + self.stragglers * math.log2(nodes)


PUBLISHED = Efficiencies()
# The factors of an estimated time between which 80 % of the published ones are expected, of a source that the fit did
# not have.
SHORTEST, LONGEST = 0.789, 1.337
# The generations of which published runs are in the fit, by what the names of their GPUs have. Three sources have runs
# on Hopper, which has products and attention of its own.
GENERATIONS = {"A100": ("A100", "A800"), "Hopper": ("H100", "H200", "H800", "GH200")}
OWN = {"Hopper": replace(PUBLISHED, products=0.598, attention=0.339)}


def generation(gpu: str) -> str:
    """The generation of a GPU by its name, as the driver reports it; empty if no published run of it is in the fit."""
    return next((name for name, marks in GENERATIONS.items() if any(mark in gpu for mark in marks)), "")


def fitted_shares(gpu: str) -> Efficiencies:
    """The shares for a GPU by its name."""
    return OWN.get(generation(gpu), PUBLISHED)


@dataclass(frozen=True)
class HostEfficiencies:
    """Shares of a host's peaks that an offload reaches: assumed, as no published run of the fit has an offload.

    link: copies from page-locked memory reach about 25 of 32 GB/s of PCIe 4.0 x16. memory: of an update by all cores.
    drive: of the drives' bandwidth, which is stated for long requests, as the runtime makes them.
    """

    link: float = 0.78
    memory: float = 0.50
    drive: float = 0.90


HOST = HostEfficiencies()


@dataclass(frozen=True)
class Peaks:
    """A GPU's data sheet: operations and bytes per second, links in one direction; of the dtype that is computed in."""

    flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float


@dataclass(frozen=True)
class HostPeaks:
    """What a rank has of its node, in bytes per second: its GPU's link to the host in one direction, its part of the
    host's memory bandwidth, and its part of the drives', or None if nothing is in a scratch file."""

    link_bytes_per_s: float
    memory_bytes_per_s: float
    drive_bytes_per_s: float | None = None


@dataclass(frozen=True)
class _Protocol:
    """A protocol of NCCL's rings: seconds of a collective of one step, and of each further step within a node and
    between nodes; the share of the bandwidth that is left for data. From src/graph/tuning.cc of NCCL 2.2x."""

    base_s: float
    node_step_s: float
    network_step_s: float
    share: float


_SIMPLE = _Protocol(8.4e-6, 3.4e-6, 14.0e-6, 1.0)
_LL128 = _Protocol(14.0e-6, 1.9e-6, 4.0e-6, 0.92)
# A sum of a few numbers: the tree with the protocol LL, from the same tables.
_TREE_BASE_S, _TREE_NODE_STEP_S, _TREE_NETWORK_STEP_S = 6.8e-6, 0.6e-6, 5.0e-6


@dataclass(frozen=True)
class Ring:
    """Ranks of a group, equally many on each of its nodes. Within a node each has the link, and between nodes its own
    network adapter, which all ranks of the group on a node use together."""

    ranks: int
    nodes: int

    def curve(self, peaks: Peaks, shares: Efficiencies, *, rounds: int = 1) -> Curve:
        """Seconds by the bytes of the full tensor.

        rounds: 1 for an all-gather or a reduce-scatter, 2 for an all-reduce. In each of them every rank sends
        (ranks - 1) / ranks of the bytes, in ranks - 1 steps. NCCL takes the faster of two protocols.
        """
        if self.ranks == 1:
            return FREE
        bandwidth = peaks.link_bytes_per_s * shares.links
        if self.nodes > 1:
            bandwidth = min(bandwidth, peaks.network_bytes_per_s * shares.network * self.ranks / self.nodes)
        sent = rounds * (self.ranks - 1) / self.ranks / bandwidth
        (low, slow), (high, fast) = sorted(
            (self._latency_s(one, rounds) * shares.messages, sent / one.share) for one in (_SIMPLE, _LL128)
        )
        if slow <= fast:
            return Curve.of_rate(low, 1 / slow)
        crossing = (high - low) / (slow - fast)
        return Curve([(0.0, low), (crossing, high + crossing * fast), (2 * crossing, high + 2 * crossing * fast)])

    def _latency_s(self, protocol: _Protocol, rounds: int) -> float:
        between = self.nodes - 1 if rounds == 1 else rounds * self.nodes * (self.nodes > 1)  # as NCCL counts them
        within = rounds * (self.ranks - 1) - between
        return protocol.base_s + within * protocol.node_step_s + between * protocol.network_step_s

    @property
    def sum_s(self) -> float:
        """Of the sum of a few numbers over the ranks."""
        if self.ranks == 1:
            return 0.0
        within, across = self.ranks // self.nodes - 1, (self.nodes - 1).bit_length()
        return _TREE_BASE_S + 2 * (within * _TREE_NODE_STEP_S + across * _TREE_NETWORK_STEP_S)


@dataclass(frozen=True)
class Layout:
    """Ranks on equal nodes, in shard groups of consecutive ranks, and the replicas of each shard."""

    ranks: int
    nodes: int
    shards: int

    @property
    def shard_group(self) -> Ring:
        return Ring(self.shards, -(-self.shards // self._per_node))

    @property
    def replicas(self) -> Ring:
        count = self.ranks // self.shards
        return Ring(count, min(count, -(-count * self.shards // self._per_node)))

    @property
    def _per_node(self) -> int:
        return self.ranks // self.nodes


def segment_s(work: Work, peaks: Peaks, shares: Efficiencies = PUBLISHED) -> float:
    """Seconds of a segment: products are bound by operations or by memory, and the other operations by memory."""
    rate = peaks.memory_bytes_per_s * shares.memory
    attention = work.attention_flops / shares.attention
    products_s = (work.product_flops / shares.products + attention) / peaks.flops_per_s
    return (
        max(products_s, work.product_bytes / rate)
        + work.other_bytes * shares.traffic / rate
        + work.kernels * shares.kernel_s
    )


def update_bytes(precision: MixedPrecision, state_bytes: float, micro_batches: int, *, clips: bool) -> float:
    """Bytes that an optimizer's step reads and writes for each element of a rank's shard.

    It reads the gradient, reads and writes the weight and the states, and writes the parameter if that is not the
    weight itself. Clipping reads the gradient once more before.
    """
    grad, master = ITEMSIZE_BYTES[precision.grad(micro_batches)], ITEMSIZE_BYTES[precision.master]
    rounded = 0 if precision.master == precision.param else ITEMSIZE_BYTES[precision.param]
    return (1 + clips) * grad + 2 * (master + state_bytes) + rounded


def with_host(
    costs: StepCosts, host: HostPeaks, element_bytes: float, param_bytes: float, *, params_in_file: bool
) -> StepCosts:
    """The costs of a step with offload. element_bytes: of the optimizer's step, see `update_bytes`; an element of the
    states in a scratch file is read and written as often as in memory. param_bytes: of an element that is sent back.

    An update, its transfer to the device and the drive work on different units at a time: the slowest decides.
    """
    link = host.link_bytes_per_s * HOST.link
    seconds = [element_bytes / (host.memory_bytes_per_s * HOST.memory), param_bytes / link]
    fetched = link
    if host.drive_bytes_per_s is not None:
        drive = host.drive_bytes_per_s * HOST.drive
        seconds.append(element_bytes / drive)
        fetched = min(link, drive) if params_in_file else link
    return replace(
        costs,
        fetch=Curve.of_rate(0.0, fetched),
        send=Curve.of_rate(0.0, link),
        host_update=Curve.of_rate(0.0, 1 / max(seconds)),
    )


def step_costs(peaks: Peaks, layout: Layout, element_bytes: float, shares: Efficiencies = PUBLISHED) -> StepCosts:
    """The costs of everything but the segments. element_bytes: of the optimizer's step, see `update_bytes`."""
    rate = peaks.memory_bytes_per_s * shares.memory
    within = CollectiveCost(rest=layout.shard_group.curve(peaks, shares))
    return StepCosts(
        gather=within,
        reduce=within,
        replica=CollectiveCost(rest=layout.replicas.curve(peaks, shares, rounds=2)),
        control_s=Ring(layout.ranks, layout.nodes).sum_s,
        copy=Curve.of_rate(0.0, rate),
        update=Curve.of_rate(0.0, peaks.memory_bytes_per_s * shares.update / element_bytes),
        compute_slowdown=shares.compute_slowdown if layout.ranks > 1 else 0.0,
        unhidden=shares.unhidden,
    )
