"""A slot is held by one command at a time, the user's GPU mask is respected, and busy GPUs are reported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.config.schema import Device, ResolvedResources
from orchestrator.machine import hardware, slots
from orchestrator.machine.slots import Slot, SlotPool
from orchestrator.planning.rules.output import place_problems

SMI = """#!/bin/sh
case "$1" in
  -L) for i in 0 1 2 3; do echo "GPU $i: NVIDIA H100 (UUID: GPU-aa$i)"; done ;;
  --query-gpu=*) for i in 0 1 2 3; do echo "$i, GPU-aa$i, 81559"; done ;;
  --query-compute-apps=*) [ -z "$BUSY" ] || echo "$BUSY, 4242, 1000" ;;
esac
"""


def pool(tmp_path: Path, count: int) -> SlotPool:
    tmp_path.mkdir(exist_ok=True)
    return SlotPool([Slot(f"core{number}") for number in range(count)], tmp_path)


def test_held_slots_are_not_given_out_until_they_are_released(tmp_path: Path) -> None:
    mine, other = SlotPool([Slot(f"core{number}") for number in range(4)], tmp_path, "sweep stages"), pool(tmp_path, 4)
    first = mine.take(3)
    assert first is not None
    assert [slot.name for slot in first.slots] == ["core0", "core1", "core2"]
    assert other.take(2) is None
    (holder,) = other.holders()
    assert re.fullmatch(rf"core0 core1 core2: sweep stages \(pid {os.getpid()}\), since \d\d:\d\d", holder)
    text = other.waiting_text()
    assert text.startswith(f"waiting 0 s for slots that another command holds: {holder}. Ctrl-C ends the wait, ")
    assert other.waiting_text() == "", "it is told now and then"
    one = other.take(1)
    assert one is not None
    first.release()
    assert other.take(3) is not None


def test_a_holder_is_never_an_empty_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/x/zlab", "zero=stage3", *["batch.micro=1"] * 20])
    leases = [pool(tmp_path, 1).take(1), SlotPool([Slot("core1")], tmp_path).take(1)]
    (tmp_path / "core1.lock").write_text("")  # as between the lock and its text
    typed, begun = pool(tmp_path, 2).holders()
    assert re.fullmatch(rf"core0: \S*zlab zero=stage3 batch.micro=1 .* \.\.\. \(pid {os.getpid()}\), since .*", typed)
    assert len(typed) < 130
    assert begun == "core1: a command that has just begun"
    assert all(leases)


def test_a_lease_ends_with_the_process_that_holds_it(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from orchestrator.machine.slots import Slot, SlotPool;"
        f"lease = SlotPool([Slot('core0')], Path({str(tmp_path)!r})).take(1); print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    assert pool(tmp_path, 1).take(1) is None
    process.kill()
    process.communicate()
    assert pool(tmp_path, 1).take(1) is not None


def test_adjacent_slots_are_preferred_and_too_large_a_request_gets_all_slots(tmp_path: Path) -> None:
    mine = pool(tmp_path, 5)
    leases = [mine.take(1) for _ in range(5)]
    for index in (0, 2, 3):
        assert leases[index] is not None
        leases[index].release()
    found = mine.take(2)
    assert found is not None
    assert [slot.name for slot in found.slots] == ["core2", "core3"]
    found.release()
    assert mine.take(9) is None
    for lease in leases:
        assert lease is not None
        lease.release()
    everything = mine.take(9)
    assert everything is not None
    assert len(everything.slots) == 5


def test_a_run_takes_one_gpu_per_rank_or_one_core_per_thread() -> None:
    assert slots.wanted(ResolvedResources(Device.cuda, ranks=4, threads=8)) == 4
    assert slots.wanted(ResolvedResources(Device.cpu, ranks=4, threads=8)) == 32


@pytest.fixture
def four_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(hardware, "PROC_GPUS", tmp_path / "none")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("ZLAB_LOCKS", str(tmp_path / "locks"))


@pytest.mark.parametrize(
    ("mask", "visible", "names"),
    [
        (None, ["0", "1", "2", "3"], ["gpu-GPU-aa0", "gpu-GPU-aa1", "gpu-GPU-aa2", "gpu-GPU-aa3"]),
        ("2,3", ["2", "3"], ["gpu-GPU-aa2", "gpu-GPU-aa3"]),
        ("GPU-aa1", ["GPU-aa1"], ["gpu-GPU-aa1"]),
        ("", [], []),
    ],
)
def test_only_gpus_in_the_users_mask_are_slots_and_a_gpu_keeps_its_name(
    mask: str | None, visible: list[str], names: list[str], four_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mask is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    found = slots.pool_of(Device.cuda).slots
    assert [slot.visible for slot in found] == visible
    assert [slot.name for slot in found] == names
    if mask == "2,3":
        lease = slots.pool_of(Device.cuda).take(2)
        assert lease is not None
        assert lease.gpus == ["2", "3"]
        assert hardware.visible_gpus()[0].memory_bytes == 81559 << 20


def test_a_gpu_used_by_another_process_is_reported(four_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUSY", "GPU-aa1")
    found = slots.pool_of(Device.cuda).slots
    assert slots.busy_gpus(found) == ["GPU GPU-aa1: process 4242 uses 1000"]
    assert slots.busy_gpus(found[2:]) == []


def test_each_folder_that_cannot_be_written_is_one_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZLAB_LOCKS", str(tmp_path / "locks"))
    assert place_problems(str(tmp_path / "new" / "outputs")) == []
    (tmp_path / "file").touch()
    below = str(tmp_path / "file" / "outputs")
    (problem,) = place_problems(below)
    expected = f"output={below}: expected a folder that can be written to, found: Not a directory"
    assert problem == f"{expected}      fix: output=FOLDER"
    monkeypatch.setenv("ZLAB_LOCKS", below)
    assert [one.split(":")[0] for one in place_problems(below)] == [f"output={below}", below]


def test_a_lock_folder_of_another_user_is_a_problem_with_a_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZLAB_LOCKS", str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    (problem,) = place_problems(str(tmp_path))
    found = f"expected a folder of user 4242, found one of user {tmp_path.stat().st_uid}"
    assert problem == f"{tmp_path}: {found}; set ZLAB_LOCKS to a folder of yours, or unset it"
