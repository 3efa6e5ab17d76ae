"""A scratch file and its pipeline return the bytes that were written, and report failures with file and unit."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from harness.checkpoints import Setting, train
from harness.oracle import ADAMW
from harness.ranks import run_ranks
from test_offload import SPEC, offload_to, runtime_of

from orchestrator import cli
from zero_runtime.collectives import Collectives
from zero_runtime.errors import OffloadError, PlanError
from zero_runtime.offload import scratch_file as scratch_module
from zero_runtime.offload.drive_speed import BLOCK_MIB, REQUESTS, measure_drive
from zero_runtime.offload.nvme import NvmeTier
from zero_runtime.offload.pipeline import pipeline
from zero_runtime.offload.preflight import check_room
from zero_runtime.offload.scratch_file import (
    ALIGN_BYTES,
    HUGE_ADVICE,
    HUGE_BYTES,
    ScratchFile,
    ScratchSettings,
    aligned_buffer,
)
from zero_runtime.phase_clock import PhaseClock
from zero_runtime.precision import MixedPrecision

WHAT = "unit blocks.3"


def scratch(folder: Path, size: int = 10 * ALIGN_BYTES, **changes: object) -> ScratchFile:
    return ScratchFile(ScratchSettings(folder, block_bytes=3 * ALIGN_BYTES, requests=3, **changes), size, rank=0)  # type: ignore[arg-type]


def noise(size: int) -> torch.Tensor:
    buffer = aligned_buffer(size)
    return buffer.copy_(torch.randint(0, 256, (size,), dtype=torch.uint8))


def test_written_bytes_can_be_read_back_in_any_range(tmp_path: Path) -> None:
    file = scratch(tmp_path)
    assert list(tmp_path.iterdir()) == [], "unlinked at once: a killed run leaves nothing behind"
    for values in (noise(10 * ALIGN_BYTES), noise(10 * ALIGN_BYTES)):  # the second overwrites the first
        file.write(0, values, WHAT).wait()
    for first, count in ((0, 10), (1, 1), (2, 7), (9, 1)):
        target = aligned_buffer(count * ALIGN_BYTES)
        file.read(first * ALIGN_BYTES, target, WHAT).wait()
        assert torch.equal(target, values[first * ALIGN_BYTES :][: target.numel()])
    file.close()
    file.close()


def test_a_file_system_without_direct_io_is_used_after_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = os.open

    def without(path: object, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return really(path, flags, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", without)
    with pytest.warns(UserWarning, match="this file system has no direct I/O"):
        file = scratch(tmp_path)
    assert not file.direct
    values, target = noise(ALIGN_BYTES), aligned_buffer(ALIGN_BYTES)
    file.write(0, values, WHAT).wait()
    file.read(0, target, WHAT).wait()
    assert torch.equal(target, values)
    file.close()


def _flags_of(address: int) -> list[str]:
    """The kernel's VmFlags of the memory mapping that contains `address`."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first:
            low, high = (int(end, 16) for end in first.split("-"))
            inside = low <= address < high
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError(hex(address))


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no huge pages")
def test_large_buffers_request_huge_pages() -> None:
    buffer = aligned_buffer(2 * HUGE_BYTES)
    assert "hg" in _flags_of(buffer.data_ptr())
    assert "hg" in _flags_of(buffer.data_ptr() + buffer.nbytes - 1)


def test_huge_pages_are_requested_for_new_and_for_reused_memory_of_large_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def madvise(address: ctypes.c_void_p, size: ctypes.c_size_t, advice: int) -> int:
        asked.append((address.value, size.value, advice))
        return -1  # as on a kernel without huge pages

    monkeypatch.setattr(scratch_module, "_libc", SimpleNamespace(madvise=madvise))
    buffer = aligned_buffer(HUGE_BYTES + 5)
    assert buffer.numel() == HUGE_BYTES + 5
    assert asked == [(buffer.data_ptr(), HUGE_BYTES, advice) for advice in HUGE_ADVICE]
    assert aligned_buffer(HUGE_BYTES - 1).numel() == HUGE_BYTES - 1
    assert len(asked) == len(HUGE_ADVICE), "a small one is left alone"


def test_a_flipped_bit_is_detected_only_if_reads_are_verified(tmp_path: Path) -> None:
    for verify in (True, False):
        file = scratch(tmp_path, verify=verify)
        values = noise(4 * ALIGN_BYTES)
        file.write(0, values, WHAT).wait()
        values[3 * ALIGN_BYTES] ^= 1
        os.pwritev(file._fd, [memoryview(values[3 * ALIGN_BYTES :].numpy().data)], 3 * ALIGN_BYTES)
        moving = file.read(0, aligned_buffer(4 * ALIGN_BYTES), WHAT)
        if verify:
            with pytest.raises(OffloadError, match=rf"{WHAT}: expected to read 4096 bytes .* other bytes than were"):
                moving.wait()
        else:
            moving.wait()
        file.close()


def test_two_swapped_blocks_are_detected(tmp_path: Path) -> None:
    file = scratch(tmp_path)
    block = file.settings.block_bytes
    values = noise(2 * block)
    file.write(0, values, WHAT).wait()
    swapped = aligned_buffer(2 * block)
    swapped[:block], swapped[block:] = values[block:], values[:block]
    os.pwritev(file._fd, [memoryview(swapped.numpy().data)], 0)
    for offset in (0, block):
        with pytest.raises(OffloadError, match=rf"read {block} bytes at {offset} of .* other bytes than were written"):
            file.read(offset, aligned_buffer(block), WHAT).wait()
    file.close()


def test_a_short_file_and_a_full_disk_are_reported_with_unit_and_file(tmp_path: Path) -> None:
    file = scratch(tmp_path)
    os.ftruncate(file._fd, ALIGN_BYTES)
    with pytest.raises(OffloadError, match=rf"{WHAT}: expected to read .* found the file's end"):
        file.read(0, aligned_buffer(2 * ALIGN_BYTES), WHAT).wait()
    full = os.open("/dev/full", os.O_RDWR)
    os.dup2(full, file._fd)
    os.close(full)
    with pytest.raises(OffloadError, match=rf"{WHAT}: expected to write .*\.scratch, found No space left on device"):
        file.write(0, noise(ALIGN_BYTES), WHAT).wait()
    file.close()


def _too_large(folder: Path) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (ALIGN_BYTES, ALIGN_BYTES))
    with pytest.raises(OffloadError) as error:
        scratch(folder)
    assert list(folder.iterdir()) == []
    return str(error.value)


def test_a_folder_that_cannot_hold_the_scratch_file_is_reported_before_any_allocation(tmp_path: Path) -> None:
    (text,) = run_ranks(_too_large, 1, tmp_path)
    assert f"expected to make a scratch file there for {10 * ALIGN_BYTES:,} bytes, found File too large" in text
    assert "make room or mend the rights, or give another offload.folder" in text


def _no_room(folder: Path) -> list[str]:
    """The errors if both ranks need more than the machine has; each names the sum over the machine's ranks."""
    collectives, told = Collectives(2, PhaseClock(torch.device("cpu"))), []
    check_room(collectives, folder, scratch=1, memory=1)
    for scratch_bytes, memory in ((10**18, 0), (0, 10**18)):
        with pytest.raises(OffloadError) as error:
            check_room(collectives, folder, scratch=scratch_bytes, memory=memory)
        told.append(str(error.value))
    return told


def test_the_needs_of_all_ranks_on_a_machine_are_summed_and_compared_with_its_free_space(tmp_path: Path) -> None:
    first, second = run_ranks(_no_room, 2, tmp_path)
    assert first == second
    disk, memory = first
    assert "expected 2,000,000,000,000,000,000 bytes free for the scratch files of 2 ranks, found" in disk
    assert "expected 2,000,000,000,000,000,000 bytes of memory" in memory
    assert "left of the machine's memory" in memory


def _no_folder(folder: Path) -> str:
    """The folder is missing on rank 1 only."""
    collectives = Collectives(2, PhaseClock(torch.device("cpu")))
    with pytest.raises(OffloadError) as error:
        check_room(collectives, folder / "other" / "scratch" if dist.get_rank() else folder, scratch=1, memory=1)
    return str(error.value)


def test_a_folder_missing_on_one_rank_is_reported_on_all_with_the_machine_and_not_created(tmp_path: Path) -> None:
    told = run_ranks(_no_folder, 2, tmp_path)
    text = (
        f"{platform.node()}: {tmp_path}/other/scratch: expected a folder for scratch files, found none (of its path "
        f"only {tmp_path} exists); correct the path, or make the folder: mkdir -p {tmp_path}/other/scratch"
    )
    assert told == [text] * 2
    assert not (tmp_path / "other").exists()


def test_a_scratch_file_does_not_create_its_folder(tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match=f"{tmp_path}/fasst: expected a folder .* mkdir -p {tmp_path}/fasst$"):
        scratch(tmp_path / "fasst")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"block_bytes": 0},
            "offload.block_bytes must be a multiple of 4,096 and above 0, which direct I/O needs, found 0 ",
        ),
        (
            {"block_bytes": 5000},
            "offload.block_bytes must be a multiple of 4,096 and above 0, which direct I/O needs, found 5000 ",
        ),
        ({"requests": 0}, "offload.requests must be at least 1, found 0"),
        ({"ahead": -1}, "offload.ahead must be at least 0, found -1"),
    ],
)
def test_invalid_settings_of_a_scratch_file_are_refused(settings: dict[str, int], told: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=f"^{told}"):
        ScratchSettings(tmp_path, **settings)


def test_io_bench_measures_the_disk_at_every_setting_and_refuses_bad_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    found = list(measure_drive(tmp_path, total=1 << 20))
    assert len(found) == len(BLOCK_MIB) * len(REQUESTS)
    assert all(speed.read > 0 and speed.write > 0 and speed.both > 0 for speed in found)
    assert cli.main(["io-bench"]) == 2
    assert "io-bench [-h] FOLDER" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert cli.main(["io-bench", str(tmp_path / "file")]) == 2
    assert "found a file of that name; give another folder" in capsys.readouterr().err
    assert cli.main(["io-bench", str(tmp_path / "fasst" / "new")]) == 2
    assert f"of its path only {tmp_path} exists" in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


# ---- the pipeline ----------------------------------------------------------------------------------------------------


class _Move:
    def __init__(self, log: list[str], name: str, fails: bool = False) -> None:
        self._log, self._name, self._fails = log, name, fails

    def wait(self) -> None:
        self._log.append(f"end {self._name}")
        if self._fails:
            raise OffloadError(self._name)


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_every_pipeline_depth_computes_in_the_same_order_and_bounds_the_items_in_memory(depth: int) -> None:
    log: list[str] = []
    held = most = 0

    def fetch(item: int) -> _Move:
        nonlocal held, most
        held, most = held + 1, max(most, held + 1)
        return _Move(log, f"fetch {item}")

    class Flush(_Move):
        def wait(self) -> None:
            nonlocal held
            held -= 1
            super().wait()

    def compute(item: int) -> None:
        assert f"end fetch {item}" in log
        log.append(f"compute {item}")

    pipeline(range(6), fetch, compute, lambda item: Flush(log, f"flush {item}"), depth=depth)
    assert [entry for entry in log if entry.startswith("compute")] == [f"compute {item}" for item in range(6)]
    assert sorted(entry for entry in log if "flush" in entry) == [f"end flush {item}" for item in range(6)]
    assert most <= 2 * depth + 1


def test_a_failed_transfer_is_raised_after_all_transfers_have_ended() -> None:
    log: list[str] = []
    with pytest.raises(OffloadError, match="fetch 1"):
        pipeline(
            range(5),
            lambda item: _Move(log, f"fetch {item}", fails=item == 1),
            lambda item: None,
            lambda item: _Move(log, f"flush {item}"),
            depth=2,
        )
    assert "end fetch 2" in log
    assert "end fetch 3" in log
    assert "end flush 0" in log


# ---- in a run --------------------------------------------------------------------------------------------------------


def _a_unit_comes_back_spoilt(folder: Path) -> str:
    """Rank 1's disk returns other bytes than were written: that rank reports it, and no rank continues training."""
    setting = Setting(3, 2, MixedPrecision())
    runtime = runtime_of(setting, offload_to(folder, params=True), ADAMW)
    case = setting.case(model=SPEC)
    train(runtime, case, 0, 1)
    if dist.get_rank() == 1:
        assert isinstance(runtime.tier, NvmeTier)
        file = runtime.tier._file
        junk = noise(ALIGN_BYTES)
        os.pwritev(file._fd, [memoryview(junk.numpy().data)], 0)
    with pytest.raises(Exception) as error:  # noqa: PT011 - rank 0's is of its connection
        train(runtime, case, 1, 3)
    return str(error.value)


def test_a_corrupted_unit_ends_the_run_with_the_name_of_the_unit(tmp_path: Path) -> None:
    _, told = run_ranks(_a_unit_comes_back_spoilt, 2, tmp_path)
    assert "other bytes than were written there; the run ends here, its checkpoints are as they were" in told
    assert told.startswith("unit ")


def _a_part_is_read_of_a_spoilt_block(folder: Path) -> str:
    """Read part of a unit's last state after the page of its first state was corrupted; one block holds both."""
    offload = offload_to(folder, params=True)
    assert offload.scratch is not None
    offload = replace(offload, scratch=replace(offload.scratch, block_bytes=1 << 20))
    runtime = runtime_of(Setting(3, 1, MixedPrecision()), offload, ADAMW)
    train(runtime, Setting(3, 1).case(model=SPEC), 0, 1)
    tier, unit = runtime.tier, runtime.units[0]
    assert isinstance(tier, NvmeTier)
    read = tier.reader(unit, "exp_avg_sq")
    assert read is not None
    with runtime.resident(unit):
        wanted = runtime.optimizer.states_of(unit)["exp_avg_sq"][3:7].clone()
    assert torch.equal(read(3, 7), wanted)
    os.pwritev(tier._file._fd, [memoryview(noise(ALIGN_BYTES).numpy().data)], tier._records[unit.name].offset)
    with pytest.raises(OffloadError) as error:
        read(3, 7)
    runtime.close()
    return str(error.value)


def test_reading_part_of_a_corrupted_block_is_refused(tmp_path: Path) -> None:
    (told,) = run_ranks(_a_part_is_read_of_a_spoilt_block, 1, tmp_path)
    assert "other bytes than were written there" in told
