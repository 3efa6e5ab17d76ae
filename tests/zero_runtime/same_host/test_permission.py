"""Ranks of an ordinary user read each other, with nothing in /dev/shm; if one may not read the others, all ranks of its
group use gloo and say why."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.ranks import run_ranks

from zero_runtime.errors import RankError
from zero_runtime.same_host import group, meeting, peer_memory
from zero_runtime.same_host.group import SharedGroup
from zero_runtime.world import WorldSettings, join_world, leave_world

SHM = Path("/dev/shm")
ODD_RANK = 1
SET_DUMPABLE = 4  # of prctl(2): 0 lets no other process of the user read this one
NOBODY = 65534


def _forbid_reading() -> None:
    def refuse(*_: Any) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1

    known = peer_memory._function
    peer_memory._function = lambda name: refuse if name == "process_vm_readv" else known(name)


def _be_elsewhere() -> None:
    meeting._host = lambda: "another host"


def _be_another_user() -> None:
    own = os.getuid()
    os.getuid = lambda: own + 1


def _have_no_call() -> None:
    peer_memory._function = lambda name: None


def _is_sum(found: Any) -> bool:
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=found)
    return bool((tensor == dist.get_world_size(found)).all())


def _of_all(odd: Callable[[], None]) -> tuple[bool, bool, str]:
    """Whether a group with an odd rank is gloo's, whether its sum is right, and why it is gloo's."""
    if dist.get_rank() == ODD_RANK:
        odd()
    found: Any = dist.new_group(backend="shm")
    assert dist.get_backend(found) == "shm"
    return not isinstance(found, SharedGroup), _is_sum(found), group._reasons[-1]


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (_forbid_reading, "rank 1 may not read the memory of rank 0 (process_vm_readv: Operation not permitted)"),
        (_have_no_call, "this system has no process_vm_readv"),
        (_be_elsewhere, "is on another host, in another container, or another user's"),
        (_be_another_user, "is on another host, in another container, or another user's"),
    ],
)
def test_all_ranks_use_gloo_if_one_may_not_read_the_others(odd: Callable[[], None], reason: str) -> None:
    for is_gloo, is_right, why in run_ranks(_of_all, 3, odd):
        assert is_gloo
        assert is_right
        assert reason in why


def _across_hosts() -> tuple[bool, bool, bool]:
    """Ranks 0 and 1 on one host, 2 and 3 on another: whether the group of the pair, and of all, is gloo's."""
    host = dist.get_rank() // 2
    meeting._host = lambda: f"host {host}"
    pairs: list[Any] = [dist.new_group([0, 1], backend="shm"), dist.new_group([2, 3], backend="shm")]
    everyone: Any = dist.new_group(backend="shm")
    both = _is_sum(pairs[host]) and _is_sum(everyone)
    return both, isinstance(pairs[host], SharedGroup), isinstance(everyone, SharedGroup)


def test_a_group_on_one_host_reads_and_one_across_hosts_uses_gloo() -> None:
    assert run_ranks(_across_hosts, 4) == [(True, True, False)] * 4


# ---- as an ordinary user ---------------------------------------------------------------------------------------------


def _joined(rank: int, world: int, place: Path, comm: str, odd: str) -> None:
    """Join, sum, print what the group is and what is left in /dev/shm; for a process of its own."""
    torch.set_num_threads(1)
    if odd == "undumpable" and rank == ODD_RANK:
        assert ctypes.CDLL(None).prctl(SET_DUMPABLE, 0, 0, 0, 0) == 0
    try:
        with join_world(place, rank, world, torch.device("cpu"), WorldSettings(comm=comm)):
            large = torch.ones(2**20)
            dist.all_reduce(large)
            kind = type(dist.group.WORLD).__name__
            own = [one for one in SHM.iterdir() if one.stat().st_uid == os.getuid()] if SHM.exists() else []
            print(f"{kind} {bool((large == world).all())} {len(own)} {group.reason()}", flush=True)
        leave_world()
    except RankError as error:
        print(f"RankError {error}", flush=True)
        os._exit(0)


def _as_user(comm: str, odd: str) -> list[str]:
    """What two ranks print that run as an ordinary user."""
    if os.getuid() != 0:
        demote: list[str] = []
    elif (setpriv := shutil.which("setpriv")) is None:
        pytest.skip("this is root, who may read every process, and there is no setpriv to become another user")
    else:
        demote = [setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--inh-caps=-all"]
    root = Path(__file__).resolve().parents[3]
    probe = subprocess.run([*demote, sys.executable, "-c", "import torch"], cwd=root, capture_output=True, check=False)
    if probe.returncode:
        pytest.skip(f"another user cannot run this interpreter: {probe.stderr.decode()[-200:]}")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        environment = {
            "PYTHONPATH": f"{root}:{root}/tests",
            "HOME": folder,
            "TMPDIR": folder,
            "PATH": os.environ["PATH"],
        }
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONDONTWRITEBYTECODE": "1"}
        ranks = [
            subprocess.Popen(
                [*demote, sys.executable, __file__, str(rank), f"{folder}/store", comm, odd],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        told = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], told
    return [out.strip() for out, _ in told]


@pytest.mark.parametrize(
    ("comm", "odd", "expected"),
    [
        ("auto", "none", "SharedGroup True 0"),
        ("auto", "undumpable", "True 0 rank 0 may not read the memory of rank 1 (process_vm_readv: "),
        ("shm", "undumpable", "RankError comm=shm: rank 0 may not read the memory of rank 1"),
    ],
)
def test_an_ordinary_user_reads_its_own_ranks_and_nothing_is_left_in_shared_memory(
    comm: str, odd: str, expected: str
) -> None:
    for told in _as_user(comm, odd):
        assert expected in told
        assert ("Operation not permitted" in told) == (odd == "undumpable")


if __name__ == "__main__":
    _joined(int(sys.argv[1]), 2, Path(sys.argv[2]), *sys.argv[3:])
