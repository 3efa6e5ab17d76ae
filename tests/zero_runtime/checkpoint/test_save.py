"""A save is committed completely or not at all, equally on every rank, and leaves earlier checkpoints unchanged."""

from __future__ import annotations

import errno
import os
import resource
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness.checkpoints import Setting, assert_states, load_into, save_after, train, whole
from harness.patience import HANG_S
from harness.ranks import run_ranks

from zero_runtime.checkpoint import tensor_file
from zero_runtime.checkpoint.background import BackgroundSaver
from zero_runtime.checkpoint.digest import RunningDigest
from zero_runtime.checkpoint.layout import checksum_text, rank_file
from zero_runtime.checkpoint.load import CheckpointReader
from zero_runtime.checkpoint.retention import Retention, newest_good_together
from zero_runtime.checkpoint.save import SaveSettings, begin, save_checkpoint
from zero_runtime.checkpoint.tensor_file import TensorFile, write_tensor_file
from zero_runtime.errors import CheckpointError

HERE = Setting(2, 2)


def failing(function: Any, says: str) -> str:
    """The CheckpointError that `function` raises, the same text on every rank."""
    with pytest.raises(CheckpointError, match=says) as caught:
        function()
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, str(caught.value))
    assert len(set(texts)) == 1
    return texts[0]


def names(root: Path) -> list[str]:
    return sorted(os.listdir(root))


# ---- a full disk -----------------------------------------------------------------------------------------------------


def full_disk(root: Path, how: str, behind: bool) -> None:
    runtime = HERE.runtime()
    saver = BackgroundSaver(root)
    train(runtime, HERE.case(), 0, 1)
    save_checkpoint(runtime, root, step=1, trainer={})
    good, before = whole(runtime), names(root)
    train(runtime, HERE.case(), 1, 1)
    write = os.write

    def no_space(fd: int, data: Any) -> int:
        if how == "patched_index" or len(data) < 5000:
            return write(fd, data)
        raise OSError(errno.ENOSPC, "No space left on device")

    if dist.get_rank() == 1 and how == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
    elif dist.get_rank() == 1:
        os.write = no_space

    def save() -> None:
        if behind:
            saver.save(runtime, step=2, trainer={})
            saver.wait(runtime)
        else:
            save_checkpoint(runtime, root, step=2, trainer={})

    says = "File too large" if how == "limit" else "No space left"
    text = failing(save, rf"step-00000002: expected to write it, found {says}.*earlier checkpoints are untouched")
    assert "rank" in text
    assert names(root) == before
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    os.write = write
    found = newest_good_together(runtime.collectives, root)
    assert found is not None
    assert found.index.step == 1
    loaded, _ = load_into(found.path, HERE)
    assert_states(whole(loaded), good)
    saver.save(runtime, step=2, trainer={})  # the error was raised once; there is space again
    saver.wait(runtime)
    assert names(root) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize(
    ("how", "behind"),
    [
        *(("limit", False), ("patched", True)),
        *(pytest.param(*one, marks=pytest.mark.full) for one in (("limit", True), ("patched", False))),
    ],
)
def test_a_full_disk_on_one_rank_fails_on_all_and_leaves_the_last_checkpoint(
    how: str, behind: bool, tmp_path: Path
) -> None:
    run_ranks(full_disk, 2, tmp_path, how, behind)


def refused_starts(root: Path) -> None:
    runtime = HERE.runtime()
    blocked = root / "file"
    if dist.get_rank() == 0:
        blocked.write_text("no folder")
    dist.barrier()
    failing(lambda: save_checkpoint(runtime, blocked, step=1, trainer={}), "expected to write it, found")
    failing(
        lambda: save_checkpoint(runtime, root, step=1, trainer={"x": object()}), "expected a trainer state of finite"
    )
    failing(lambda: save_checkpoint(runtime, root, step=1, trainer={"x": float("nan")}), "give plain values")
    failing(lambda: save_checkpoint(runtime, root, step=dist.get_rank(), trainer={}), "every rank to save one step")
    assert names(root) == ["file"]


def test_an_impossible_save_is_refused_on_all_ranks_before_anything_is_written(tmp_path: Path) -> None:
    run_ranks(refused_starts, 2, tmp_path)


def a_silent_rank(root: Path) -> None:
    """Rank 1's writer never runs: the leader stops waiting for it, and the next call raises an error on all ranks."""
    settings = SaveSettings(limit_s=2.0)
    runtime = HERE.runtime()
    if dist.get_rank() == 0:
        saver = BackgroundSaver(root, settings)
        saver.save(runtime, step=1, trainer={})
        failing(lambda: saver.wait(runtime), r"expected the files of ranks \[1\], found none that is finished")
    else:
        begin(runtime, root, step=1, trainer={}, settings=settings)
        failing(lambda: BackgroundSaver(root).wait(runtime), r"rank 0: .*nothing written for 2")
    assert names(root) == []


@pytest.mark.full
def test_a_rank_that_never_finishes_its_file_fails_the_save_after_the_time_limit(tmp_path: Path) -> None:
    run_ranks(a_silent_rank, 2, tmp_path)


def saved_again(root: Path) -> None:
    """An interrupted attempt with its reports and a damaged checkpoint already exist at the paths of this save."""
    old = root / ".step-00000003.partial"
    if dist.get_rank() == 0:
        old.mkdir(parents=True)
        (old / "rank-00001-of-00002.json").write_text('{"token": "old", "trouble": "of another attempt"}')
        (root / "step-00000003").mkdir()
        (root / "step-00000003" / "rubble").write_text("x")
    dist.barrier()
    path, states = save_after(root, HERE)
    loaded, _ = load_into(path, HERE)
    assert_states(whole(loaded), states)
    assert names(root) == ["step-00000003"]
    assert len(names(path)) == 3


def test_a_save_replaces_an_interrupted_or_damaged_save_of_the_same_step(tmp_path: Path) -> None:
    run_ranks(saved_again, 2, tmp_path)


# ---- in the background -----------------------------------------------------------------------------------------------


def behind_training(root: Path) -> float:
    """Training continues while the copy is written; a second save waits for the first, whose writer waits for `gate`.

    Returns the seconds that the second save took.
    """
    gate = threading.Event()
    write = os.write
    runtime = HERE.runtime()  # its ranks wake each other by os.write
    train(runtime, HERE.case(), 0, 1)
    states = whole(runtime)

    def held(fd: int, data: Any) -> int:
        if threading.current_thread().name == "checkpoint-writer":
            assert gate.wait(HANG_S)
        return write(fd, data)

    os.write = held
    saver = BackgroundSaver(root)
    path = saver.save(runtime, step=1, trainer={"samples": 1})
    busy = saver.busy
    assert not path.exists()
    train(runtime, HERE.case(), 1, 2)
    later = whole(runtime)
    threading.Timer(0.2, gate.set).start()
    begun = time.monotonic()
    second = saver.save(runtime, step=3, trainer={"samples": 3})
    waited = time.monotonic() - begun
    saver.wait(runtime)
    assert busy
    assert not saver.busy
    for step, wanted in ((path, states), (second, later)):
        loaded, _ = load_into(step, HERE)
        assert_states(whole(loaded), wanted)
        loaded.close()
    return waited


def test_a_background_save_holds_the_state_at_the_time_of_the_call(tmp_path: Path) -> None:
    assert min(run_ranks(behind_training, 2, tmp_path)) > 0.15  # the wait for the gate


# ---- local to a node -------------------------------------------------------------------------------------------------


def save_on_nodes(root: Path, stage: int, nodes: list[int]) -> list[str]:
    setting = Setting(stage, len(nodes), shard_ranks=2 if stage == 3 else None)
    node = nodes[dist.get_rank()]
    own = root / f"node{node}"
    path, states = save_after(own, setting, settings=SaveSettings(node=node))
    runtime = setting.runtime()
    found = newest_good_together(runtime.collectives, own)
    assert found is not None
    loaded, _ = load_into(path, setting)
    assert_states(whole(loaded), states)
    assert found.index.ranks == tuple(rank for rank, other in enumerate(nodes) if other == node)
    return names(path)


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 2)), 3])
def test_without_a_shared_folder_each_node_writes_and_reads_its_own_files(stage: int, tmp_path: Path) -> None:
    nodes = [0, 0, 1, 1] if stage == 3 else [0, 0, 1]
    found = run_ranks(save_on_nodes, len(nodes), tmp_path, stage, nodes)
    for rank, files in enumerate(found):
        local = [rank_file(other, len(nodes)) for other, node in enumerate(nodes) if node == nodes[rank]]
        assert files == ["index.json", *local]


def load_on_nodes(root: Path, setting: Setting, says: str) -> None:
    own = root / f"node{min(dist.get_rank() // 2, 1)}" / "step-00000003"
    failing(lambda: load_into(own, setting), says)


def test_loading_from_a_node_without_all_needed_files_is_refused(tmp_path: Path) -> None:
    run_ranks(save_on_nodes, 3, tmp_path, 2, [0, 0, 1])
    run_ranks(load_on_nodes, 2, tmp_path, Setting(2, 2), "bring the files of all nodes together")
    (tmp_path / "node0" / "step-00000003" / rank_file(1, 3)).unlink()
    run_ranks(load_on_nodes, 3, tmp_path, Setting(2, 3), "rank-00001-of-00003.*found none; copy the whole folder")


def test_nodes_with_their_own_files_must_keep_two_checkpoints() -> None:
    with pytest.raises(CheckpointError, match="expected at least 2 where each node keeps its own files, found 1"):
        SaveSettings(node=0, retention=Retention(keep_last=1))


# ---- one file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_bytes", [1, 1000, 1 << 19, 1 << 23])
def test_a_tensor_file_is_correct_for_every_block_size(block_bytes: int, tmp_path: Path) -> None:
    sizes = [0, 1, 7] if block_bytes == 1 else [0, 1, 7, 300_001, 3, 200_000]
    tensors = {f"t{i}": torch.randn(n) for i, n in enumerate(sizes)} | {"half": torch.randn(5).bfloat16()}
    entry = write_tensor_file(tmp_path / "a", tensors, {"k": "v"}, block_bytes=block_bytes)
    data = (tmp_path / "a").read_bytes()
    assert (len(data), checksum_text(zlib.crc32(data))) == entry
    tensor_file.check_file(tmp_path / "a", entry)
    file = TensorFile(tmp_path / "a")
    for key, values in tensors.items():
        found = torch.empty_like(values)
        file.read_into(key, 0, found)
        assert torch.equal(found, values)
    assert file.bytes_read == sum(one.numel() * one.element_size() for one in tensors.values())
    file.close()


def test_the_running_checksum_equals_the_checksum_of_all_bytes() -> None:
    data = os.urandom(1 << 21)
    digest = RunningDigest()
    for start in range(0, len(data), 700_000):
        digest.add(data[start : start + 700_000])
    digest.add(b"end")
    assert digest.text() == checksum_text(zlib.crc32(data + b"end"))


def test_large_tensors_are_written_without_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(1 << 20)
    address = values.data_ptr()
    found = []
    write = os.write

    def watched(fd: int, data: memoryview) -> int:
        found.append(np.frombuffer(data, np.uint8).ctypes.data - address)
        return write(fd, data)

    monkeypatch.setattr(os, "write", watched)
    write_tensor_file(tmp_path / "a", {"t": values}, {}, block_bytes=1 << 20)
    assert found[1:] == [0, 1 << 20, 2 << 20, 3 << 20]


def test_a_checkpoint_contains_no_pickle(tmp_path: Path) -> None:
    path, _ = run_ranks(save_after, 1, tmp_path, Setting(3, 1))[0]
    assert {Path(name).suffix for name in names(path)} == {".json", ".safetensors"}
    assert CheckpointReader.open(path).index.trainer == {"samples": 96}
