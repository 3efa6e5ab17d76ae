"""Binds a rank to the processors next to its GPU, so that the host memory it takes is there too.

Linux puts a page of memory on the NUMA node of the thread that touches it first. Copies to a GPU from the memory of
another socket, and updates of that memory, are about half as fast.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

SYSTEM = Path("/sys")


def bind_to_gpu(device: torch.device, threads: int, system: Path = SYSTEM) -> frozenset[int]:
    """Bind the calling thread, and the threads that it starts afterwards, to the processors next to the GPU.

    threads: the number of processors that the rank needs. system: see `chosen_processors`. Returns the processors;
    empty if nothing was changed, because the system does not say which ones are near, or because fewer than `threads`
    of them are allowed to this process.
    """
    if not hasattr(os, "sched_setaffinity"):
        return frozenset()  # macOS
    allowed = frozenset(os.sched_getaffinity(0))
    chosen = chosen_processors(pci_address(device), allowed, threads, system)
    if chosen:
        os.sched_setaffinity(0, chosen)
    return chosen


def pci_address(device: torch.device) -> str:
    """The GPU's name in /sys/bus/pci/devices, such as 0000:3b:00.0."""
    of: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack these three
    return f"{of.pci_domain_id:04x}:{of.pci_bus_id:02x}:{of.pci_device_id:02x}.0"


def chosen_processors(address: str, allowed: frozenset[int], threads: int, system: Path = SYSTEM) -> frozenset[int]:
    """Those of the `allowed` processors that are next to the PCI device; empty if that changes or allows nothing.

    system: the folder that describes the machine; Linux documents it in Documentation/ABI/stable/sysfs-devices-node and
    Documentation/ABI/testing/sysfs-bus-pci.
    """
    near = allowed & near_processors(address, system)
    return near if near != allowed and len(near) >= max(threads, 1) else frozenset()


def near_processors(address: str, system: Path = SYSTEM) -> frozenset[int]:
    """The processors of the PCI device's NUMA node; empty if the machine has one node or does not say."""
    try:
        node = int((system / "bus/pci/devices" / address / "numa_node").read_text(encoding="ascii"))
        text = (system / f"devices/system/node/node{node}/cpulist").read_text(encoding="ascii")
    except (OSError, ValueError):
        return frozenset()  # a virtual machine may hide it; -1 stands for no node, which has no folder
    return frozenset(_numbers(text))


def _numbers(text: str) -> Iterator[int]:
    """The numbers of a list such as 0-2,8,10-11."""
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
