"""Checks before any allocation that offloaded states will fit into host memory and onto the disk."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from zero_runtime import cgroups
from zero_runtime.collectives import Collectives
from zero_runtime.errors import OffloadError, missing_folder
from zero_runtime.flat_layout import FlatLayout
from zero_runtime.offload.predicted import predicted_bytes
from zero_runtime.optim.configs import OptimizerConfig
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import ITEMSIZE_BYTES
from zero_runtime.settings import RuntimeSettings
from zero_runtime.shard_location import OffloadedShards
from zero_runtime.state_bytes import UnitSize, model_state_bytes
from zero_runtime.unit_planner import UnitSpec


class OffloadSpace(NamedTuple):
    """Bytes that one rank will use in the scratch folder and in host memory."""

    host: str
    device: int  # device number of the folder's file system
    folder: str | None
    scratch: int
    memory: int


def check_offload(
    planned: Sequence[tuple[UnitSpec, FlatLayout, OffloadedShards]],
    settings: RuntimeSettings,
    config: OptimizerConfig,
    plan: ZeroPlan,
    collectives: Collectives,
    device: str,
) -> None:
    """Raise OffloadError, the same on every rank, if offloaded states do not fit on a machine. A collective.

    planned: all units of the model. device: the type of the device that computes.
    """
    units = [(_size(spec, layout, shards, config), spec.precision) for spec, layout, shards in planned]
    needed = predicted_bytes(settings, config, units, collectives.shard_count)
    memory = needed.host
    # On a CPU the shards that are not offloaded take host memory too, and so does one unsharded unit at a time.
    if device == "cpu":
        memory += model_state_bytes(
            plan,
            units,
            world=collectives.data_world,
            micro_batches=settings.micro_batches,
            state_bytes=config.state_bytes,
        ).total
        memory += max(size.numel * ITEMSIZE_BYTES[kind.compute or kind.param] for size, kind in units)
    scratch = settings.offload.scratch
    folder = scratch.folder if scratch is not None and settings.offload.uses_nvme else None
    check_room(collectives, folder, scratch=needed.scratch, memory=memory)


def _size(spec: UnitSpec, layout: FlatLayout, offloaded: OffloadedShards, config: OptimizerConfig) -> UnitSize:
    return UnitSize.of(
        layout,
        trainable=spec.trainable,
        state_bytes=config.matrix_state_bytes if spec.matrices else None,
        params_offloaded=offloaded.params,
        optimizer_offloaded=offloaded.optimizer,
        separate_memory=offloaded.separate_memory,
    )


def check_room(collectives: Collectives, folder: Path | None, *, scratch: int, memory: int) -> None:
    """Raise OffloadError, the same on every rank, if the ranks of a machine need more space than it has. A collective.

    scratch: bytes that this rank will use in the folder, if there is one. memory: bytes that it will use on the host in
    addition to those that it already holds.
    """
    device, trouble = (0, []) if folder is None else _device_of(folder)
    own = OffloadSpace(platform.node(), device, None if folder is None or trouble else str(folder), scratch, memory)
    everyone = collectives.gather_objects(own)
    here = [need for need in everyone if need.host == own.host]
    trouble += [*_disk_trouble(own, here), *_memory_trouble(own, here)]
    found = [text for texts in collectives.gather_objects(trouble) for text in texts]
    if found:
        raise OffloadError("; ".join(dict.fromkeys(found)))


def _device_of(folder: Path) -> tuple[int, list[str]]:
    """Device number of the folder's file system, and problems if the folder is missing. The caller raises these after
    the collectives, in which ranks that have their folder wait for those that have none. Problems name the machine,
    since a folder may be local to each node."""
    if not os.path.isdir(folder):
        return 0, [f"{platform.node()}: {folder}: expected a folder for scratch files, found {missing_folder(folder)}"]
    return os.stat(folder).st_dev, []


def _disk_trouble(own: OffloadSpace, here: list[OffloadSpace]) -> list[str]:
    if own.folder is None:
        return []
    needed = sum(need.scratch for need in here if need.device == own.device)
    stats = os.statvfs(own.folder)
    free = stats.f_bavail * stats.f_frsize
    found = []
    if not os.access(own.folder, os.W_OK):
        found.append(f"{own.folder}: expected to be allowed to write, found that it is not; mend its rights")
    if needed > free:
        found.append(
            f"{own.folder}: expected {needed:,} bytes free for the scratch files of {len(here)} ranks, found {free:,}; "
            "make room, or give another offload.folder or a smaller offload.ratio"
        )
    return found


def _memory_trouble(own: OffloadSpace, here: list[OffloadSpace]) -> list[str]:
    needed = sum(need.memory for need in here)
    limits = {name: room for name, room in (*_rooms(own.memory, needed),) if room is not None}
    return [
        f"{own.host}: expected {wanted:,} bytes of memory for what this run keeps there, found {room:,} left of "
        f"{name}; use fewer ranks there, another offload, or a smaller model"
        for name, (wanted, room) in limits.items()
        if wanted > room
    ]


def _rooms(own: int, all_here: int) -> list[tuple[str, tuple[int, int] | None]]:
    """(name, (bytes wanted, bytes left)) of each limit: of this process, the machine and its control group."""
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    used = _bytes_of(Path("/proc/self/status"), "VmData")
    limited = None if soft == resource.RLIM_INFINITY or used is None else (own, max(soft - used, 0))
    free = _bytes_of(Path("/proc/meminfo"), "MemAvailable")
    group = cgroups.memory_room()
    return [
        ("RLIMIT_DATA", limited),
        ("the machine's memory", None if free is None else (all_here, free)),
        ("its control group's memory limit", None if group is None else (all_here, group)),
    ]


def _bytes_of(path: Path, key: str) -> int | None:
    try:
        line = next(line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith(f"{key}:"))
    except (OSError, StopIteration):
        return None
    return int(line.split()[1]) * 1024
