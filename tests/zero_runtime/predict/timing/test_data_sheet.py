"""Costs from a data sheet follow from its peaks, the published shares and the rings of the ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.timing.data_sheet import (
    HOST,
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
from zero_runtime.predict.timing.work import Work

PEAKS = Peaks(flops_per_s=300e12, memory_bytes_per_s=2e12, link_bytes_per_s=300e9, network_bytes_per_s=25e9)
ALL = Efficiencies(
    **dict.fromkeys(("products", "attention", "memory", "traffic", "update", "links", "network", "messages"), 1.0),
    **dict.fromkeys(("kernel_s", "unhidden", "compute_slowdown", "stragglers"), 0.0),
)
LARGE = 1e12  # bytes: latencies vanish


def test_products_are_bound_by_operations_or_by_memory_and_the_rest_by_memory() -> None:
    assert segment_s(Work(product_flops=300, product_bytes=1), PEAKS, ALL) == pytest.approx(1e-12)
    assert segment_s(Work(product_flops=300, product_bytes=4), PEAKS, ALL) == pytest.approx(2e-12)
    assert segment_s(Work(attention_flops=300, other_bytes=4), PEAKS, ALL) == pytest.approx(3e-12)


def test_each_kind_of_work_has_its_share_of_the_peak() -> None:
    for name, work in {
        "products": Work(product_flops=300),
        "attention": Work(attention_flops=300),
        "memory": Work(other_bytes=2),
    }.items():
        assert segment_s(work, PEAKS, replace(ALL, **{name: 0.25})) == pytest.approx(4e-12)


@pytest.mark.parametrize(
    ("ring", "bandwidth"),
    [
        (Ring(8, 1), 300e9),  # the link
        (Ring(16, 2), 8 * 25e9),  # the adapters of a node's eight ranks
        (Ring(4, 4), 25e9),  # one adapter
        (Ring(64, 2), 300e9),  # more adapters than the link can fill
    ],
)
def test_a_ring_sends_all_but_its_own_part_over_its_slowest_link(ring: Ring, bandwidth: float) -> None:
    sent = LARGE * (ring.ranks - 1) / ring.ranks
    assert ring.curve(PEAKS, ALL).at(LARGE) == pytest.approx(sent / bandwidth, rel=1e-3)
    assert ring.curve(PEAKS, ALL, rounds=2).at(LARGE) == pytest.approx(2 * sent / bandwidth, rel=1e-3)
    half = replace(ALL, links=0.5, network=0.5)
    assert ring.curve(PEAKS, half).at(LARGE) == pytest.approx(2 * sent / bandwidth, rel=1e-3)


def test_a_small_message_takes_the_latency_of_the_faster_protocol() -> None:
    """Steps of 3.4 us within a node and 14 us between nodes, or of 1.9 and 4 us, after 8.4 or 14 us."""
    assert Ring(2, 1).curve(PEAKS, ALL).at(0) == pytest.approx(8.4e-6 + 3.4e-6)
    assert Ring(16, 2).curve(PEAKS, ALL).at(0) == pytest.approx(14e-6 + 14 * 1.9e-6 + 4e-6)
    assert Ring(16, 2).curve(PEAKS, ALL, rounds=2).at(0) == pytest.approx(14e-6 + 26 * 1.9e-6 + 4 * 4e-6)
    assert Ring(1, 1).curve(PEAKS, ALL).at(LARGE) == 0


def test_the_protocols_cross_where_they_take_equally_long() -> None:
    curve = Ring(16, 2).curve(PEAKS, ALL)
    (_, low), (crossing, seconds), _ = curve.points
    sent = crossing * 15 / 16 / 200e9
    assert seconds == pytest.approx(low + sent / 0.92) == pytest.approx(8.4e-6 + 14 * 3.4e-6 + 14e-6 + sent)


@pytest.mark.parametrize(
    ("layout", "shard_group", "replicas"),
    [
        (Layout(16, 2, 16), Ring(16, 2), Ring(1, 1)),  # all shards
        (Layout(16, 2, 8), Ring(8, 1), Ring(2, 2)),  # sharded within a node
        (Layout(16, 2, 4), Ring(4, 1), Ring(4, 2)),  # two groups in a node
        (Layout(32, 4, 16), Ring(16, 2), Ring(2, 2)),  # a group on two nodes
        (Layout(16, 2, 1), Ring(1, 1), Ring(16, 2)),  # nothing sharded
        (Layout(8, 1, 2), Ring(2, 1), Ring(4, 1)),
    ],
)
def test_shard_groups_are_consecutive_ranks_and_replicas_are_in_other_groups(
    layout: Layout, shard_group: Ring, replicas: Ring
) -> None:
    assert (layout.shard_group, layout.replicas) == (shard_group, replicas)


def test_an_update_reads_the_gradient_and_moves_weights_and_states() -> None:
    bf16 = MixedPrecision("bf16", reduce="bf16")
    assert update_bytes(MixedPrecision(), 8.0, 1, clips=False) == 4 + 2 * (4 + 8)
    assert update_bytes(MixedPrecision(), 8.0, 1, clips=True) == 8 + 2 * (4 + 8)
    assert update_bytes(bf16, 8.0, 1, clips=False) == 2 + 2 * (4 + 8) + 2
    assert update_bytes(bf16, 8.0, 2, clips=False) == 4 + 2 * (4 + 8) + 2  # summed in fp32


def test_the_costs_of_a_step_are_those_of_its_groups_and_of_memory() -> None:
    costs = step_costs(PEAKS, Layout(16, 2, 8), 28.0, ALL)
    assert costs.gather.rest == costs.reduce.rest == Ring(8, 1).curve(PEAKS, ALL)
    assert costs.replica.rest == Ring(2, 2).curve(PEAKS, ALL, rounds=2)
    assert costs.copy.at(2e12) == pytest.approx(1.0)
    assert costs.update.at(2e12 / 28) == pytest.approx(1.0)
    some = replace(ALL, compute_slowdown=0.2, unhidden=0.1, update=0.5)
    others = step_costs(PEAKS, Layout(16, 2, 8), 28.0, some)
    assert (others.compute_slowdown, others.unhidden) == (0.2, 0.1)
    assert others.update.at(2e12 / 28) == pytest.approx(2.0)
    alone = step_costs(PEAKS, Layout(1, 1, 1), 28.0, some)
    assert (alone.compute_slowdown, alone.control_s) == (0.0, 0.0)


def test_kernels_traffic_and_latencies_have_their_shares() -> None:
    work = Work(product_flops=300, other_bytes=4, kernels=3)
    found = segment_s(work, PEAKS, replace(ALL, kernel_s=1e-12, traffic=0.5))
    assert found == pytest.approx(1e-12 + 0.5 * 2e-12 + 3 * 1e-12)
    ring = Ring(16, 2)
    assert ring.curve(PEAKS, replace(ALL, messages=3.0)).at(0) == pytest.approx(3 * ring.curve(PEAKS, ALL).at(0))


@pytest.mark.parametrize(("nodes", "factor"), [(1, 1.0), (2, 1.1), (8, 1.3)])
def test_a_step_grows_with_each_doubling_of_the_nodes(nodes: int, factor: float) -> None:
    assert replace(ALL, stragglers=0.1).slowest(nodes) == pytest.approx(factor)


def test_only_hopper_has_shares_of_its_own() -> None:
    assert [generation(gpu) for gpu in ("NVIDIA A100-SXM4-80GB", "NVIDIA H200", "Tesla T4")] == ["A100", "Hopper", ""]
    a100, hopper, other = map(fitted_shares, ("NVIDIA A100-SXM4-80GB", "NVIDIA H200", "Tesla T4"))
    assert a100 == other == replace(hopper, products=a100.products, attention=a100.attention)
    assert hopper != a100


def test_the_slowest_of_update_link_and_drive_decides_about_an_offload() -> None:
    """16e9 elements of 28 bytes: the memory takes 28 s at half of 32 GB/s, and a drive of 10 GB/s longer."""
    costs = step_costs(PEAKS, Layout(1, 1, 1), 28.0, ALL)
    memory = with_host(costs, HostPeaks(32e9, 32e9), 28.0, 2.0, params_in_file=False)
    drive = with_host(costs, HostPeaks(32e9, 32e9, 10e9), 28.0, 2.0, params_in_file=True)
    slow_link = with_host(costs, HostPeaks(1e9, 32e9), 28.0, 2.0, params_in_file=False)
    assert memory.host_update is not None
    assert drive.host_update is not None
    assert slow_link.host_update is not None
    assert memory.host_update.at(16e9) == pytest.approx(16e9 * 28 / (32e9 * HOST.memory))
    assert drive.host_update.at(16e9) == pytest.approx(16e9 * 28 / (10e9 * HOST.drive))
    assert slow_link.host_update.at(16e9) == pytest.approx(16e9 * 2 / (1e9 * HOST.link))
    assert memory.fetch.at(32e9) == memory.send.at(32e9) == pytest.approx(1 / HOST.link)
    assert drive.fetch.at(10e9) == pytest.approx(1 / HOST.drive)
