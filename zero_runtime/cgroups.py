"""Limits on processors and memory that control groups (versions 1 and 2) set for this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
# Version 1 reports "no limit" as the largest multiple of the page size in a signed 64-bit number.
_NO_LIMIT = 1 << 60


def cpu_share() -> float | None:
    """Number of processors that this process may keep busy, possibly fractional; None without a limit."""
    shares = [*_shares_2(), *_shares_1()]
    return min(shares, default=None)


def memory_limit() -> int | None:
    """Smallest memory limit in bytes among the groups of this process; None without a limit."""
    return min((limit for limit, _ in _memory()), default=None)


def memory_room() -> int | None:
    """Bytes still available; None without a limit. Cached files count as available: the kernel drops them first."""
    return min((limit - used for limit, used in _memory()), default=None)


def _shares_2() -> Iterator[float]:
    for folder in _folders(""):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            yield int(quota) / int(period)


def _shares_1() -> Iterator[float]:
    for folder in _folders("cpu"):
        quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():  # -1 means no limit
            yield int(quota) / int(period)


def _memory() -> Iterator[tuple[int, int]]:
    """(limit, usage without cached files) in bytes of each group that has a limit."""
    names_2 = ("memory.max", "memory.current", "")
    names_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    for controller, (limit, usage, prefix) in (("", names_2), ("memory", names_1)):
        for folder in _folders(controller):
            most, used = _text(folder / limit), _text(folder / usage)
            if most.isdigit() and used.isdigit() and int(most) < _NO_LIMIT:
                yield int(most), int(used) - _cached_files(folder, prefix)


def _cached_files(folder: Path, prefix: str) -> int:
    wanted = {f"{prefix}active_file", f"{prefix}inactive_file"}
    lines = (line.split() for line in _text(folder / "memory.stat").splitlines())
    return sum(int(line[1]) for line in lines if line[0] in wanted)


def _folders(controller: str) -> Iterator[Path]:
    """Folders of the group of this process and of its parent groups; `controller` "" means version 2.

    A container may see its own group at the root while /proc names the path outside the container. So the root is
    always included; the caller skips folders that do not exist.
    """
    for line in _text(OWN).splitlines():
        _, names, path = line.split(":", 2)
        if controller not in names.split(","):
            continue
        # On a machine with both versions, version 2 has a separate folder; controllers of one mount share a folder.
        for top in (ROOT / name for name in ((names, controller) if controller else ("", "unified"))):
            own = top / path.strip("/")
            yield from (folder for folder in (own, *own.parents) if folder == top or top in folder.parents)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
