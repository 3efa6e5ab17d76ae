"""Limits of control groups are read in versions 1 and 2, from the group of the process and from its parents."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_runtime import cgroups


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    monkeypatch.setattr(cgroups, "ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(cgroups, "OWN", tmp_path / "own")
    return Groups(tmp_path)


class Groups:
    """Temporary files that replace /sys/fs/cgroup and /proc/self/cgroup."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def own(self, *lines: str) -> None:
        (self._folder / "own").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def put(self, place: str, **files: str) -> None:
        folder = self._folder / "cgroup" / place
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text + "\n", encoding="utf-8")


def limits() -> tuple[float | None, int | None, int | None]:
    return cgroups.cpu_share(), cgroups.memory_limit(), cgroups.memory_room()


def test_a_machine_without_control_groups_has_no_limit(groups: Groups) -> None:
    assert limits() == (None, None, None)
    groups.own("0::/")
    groups.put("", cpu__max="max 100000", memory__max="max", memory__current="77")
    assert limits() == (None, None, None)


def test_version_2_in_a_container_is_read_at_the_root_folder(groups: Groups) -> None:
    groups.own("0::/docker/that-nobody-here-sees")
    groups.put("", cpu__max="150000 100000", memory__max="1000", memory__current="400")
    assert limits() == (1.5, 1000, 600)


def test_the_smallest_limit_of_a_group_and_its_parents_applies(groups: Groups) -> None:
    groups.own("0::/user.slice/job.scope")
    groups.put("", cpu__max="max 100000")
    groups.put("user.slice", cpu__max="200000 100000", memory__max="500", memory__current="100")
    groups.put("user.slice/job.scope", cpu__max="max 100000", memory__max="900", memory__current="600")
    assert limits() == (2.0, 500, 300)


def test_version_1_is_read_from_the_folder_of_each_controller(groups: Groups) -> None:
    groups.own("11:memory:/box", "4:cpu,cpuacct:/box", "1:name=systemd:/x")
    groups.put("cpu,cpuacct/box", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    groups.put("memory", memory__limit_in_bytes="9223372036854771712", memory__usage_in_bytes="5")
    groups.put("memory/box", memory__limit_in_bytes="2000", memory__usage_in_bytes="300")
    assert limits() == (0.5, 2000, 1700)
    groups.put("cpu,cpuacct/box", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert cgroups.cpu_share() is None


def test_cached_files_count_as_free_memory(groups: Groups) -> None:
    groups.own("0::/")
    groups.put(
        "", memory__max="1000", memory__current="950", memory__stat="anon 50\nactive_file 400\ninactive_file 500"
    )
    assert cgroups.memory_room() == 950
