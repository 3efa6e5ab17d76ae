"""A rank is bound to the allowed processors next to its GPU, as a machine's /sys describes them."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from zero_runtime.numa import bind_to_gpu, chosen_processors, near_processors, pci_address

FIRST, SECOND, HIDDEN = "0000:3b:00.0", "0000:d8:00.0", "0000:01:00.0"
ALL = frozenset(range(16))


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """Two nodes of eight processors, each two halves of four, and a GPU at each; a third GPU does not say."""
    for node, cpus in enumerate(("0-3,8-11\n", "4-7,12-15\n")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus, encoding="ascii")
    for address, node in ((FIRST, 0), (SECOND, 1), (HIDDEN, -1)):
        folder = tmp_path / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n", encoding="ascii")
    return tmp_path


def test_the_processors_of_the_gpus_node_are_near(system: Path) -> None:
    assert near_processors(FIRST, system) == {0, 1, 2, 3, 8, 9, 10, 11}
    assert near_processors(SECOND, system) == {4, 5, 6, 7, 12, 13, 14, 15}
    assert near_processors(HIDDEN, system) == near_processors("0000:ff:00.0", system) == frozenset()


@pytest.mark.parametrize(
    ("allowed", "threads", "expected"),
    [
        (ALL, 1, {4, 5, 6, 7, 12, 13, 14, 15}),
        (ALL, 8, {4, 5, 6, 7, 12, 13, 14, 15}),
        (ALL, 9, set()),  # more threads than the node has processors
        (frozenset({0, 4, 5}), 2, {4, 5}),
        (frozenset({0, 4, 5}), 3, set()),  # the scheduler gave some of another node
        (frozenset({0, 1}), 1, set()),
        (frozenset({4, 5}), 1, set()),  # bound already
    ],
)
def test_only_allowed_processors_are_chosen(
    system: Path, allowed: frozenset[int], threads: int, expected: set[int]
) -> None:
    assert chosen_processors(SECOND, allowed, threads, system) == expected


def test_a_rank_is_bound_by_the_address_of_its_gpu(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[frozenset[int]] = []
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xD8, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(ALL), raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, chosen: bound.append(chosen), raising=False)
    device = torch.device("cuda", 1)
    assert pci_address(device) == SECOND
    assert bind_to_gpu(device, 4, system) == {4, 5, 6, 7, 12, 13, 14, 15}
    assert bind_to_gpu(device, 9, system) == frozenset()
    assert bound == [{4, 5, 6, 7, 12, 13, 14, 15}]
