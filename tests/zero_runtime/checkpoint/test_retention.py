"""The newest good checkpoint of a folder is selected, bad ones are reported, and retention deletes complete ones."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from harness.checkpoints import Setting, flip_a_bit
from harness.ranks import run_ranks

from zero_runtime.checkpoint.background import BackgroundSaver
from zero_runtime.checkpoint.layout import OWNER, trash_name
from zero_runtime.checkpoint.retention import (
    Retention,
    Skipped,
    clear_leftovers,
    committed,
    newest_good_together,
    prune,
    set_aside,
    trash_path,
)
from zero_runtime.checkpoint.save import SaveSettings, save_checkpoint
from zero_runtime.errors import CheckpointError
from zero_runtime.process_identity import mark


def save_steps(root: Path, steps: list[int], retention: Retention) -> list[list[int]]:
    """Save one checkpoint per step, every second one in the background; the committed steps after each save."""
    runtime = Setting(1, 2).runtime()
    settings = SaveSettings(retention=retention)
    saver = BackgroundSaver(root, settings)
    found = []
    for place, step in enumerate(steps):
        if place % 2:
            saver.save(runtime, step=step, trainer={})
            saver.wait(runtime)
        else:
            save_checkpoint(runtime, root, step=step, trainer={}, settings=settings)
        found.append(list(committed(root)))
        dist.barrier()
    return found


def test_retention_keeps_the_last_k_and_every_nth_checkpoint(tmp_path: Path) -> None:
    found = run_ranks(save_steps, 2, tmp_path, [10, 15, 20, 25, 30], Retention(keep_last=2, keep_every=20))[0]
    assert found == [[10], [10, 15], [15, 20], [20, 25], [20, 25, 30]]


@pytest.mark.parametrize(
    ("retention", "doomed"),
    [
        (Retention(), []),
        (Retention(keep_every=3), []),
        (Retention(keep_last=1), [1, 2, 3, 4]),
        (Retention(keep_last=9), []),
        (Retention(keep_last=2, keep_every=2), [1, 3]),
        (Retention(keep_last=2, also=(2,)), [1, 3]),
    ],
)
def test_doomed_gives_the_steps_that_retention_does_not_keep(retention: Retention, doomed: list[int]) -> None:
    assert retention.doomed([5, 3, 1, 2, 4]) == doomed


@pytest.mark.parametrize("settings", [{"keep_last": 0}, {"keep_every": -1}])
def test_a_retention_that_keeps_no_checkpoints_is_refused(settings: dict[str, int]) -> None:
    with pytest.raises(CheckpointError, match="expected at least 1 or null, found"):
        Retention(**settings)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shelf")
    run_ranks(save_steps, 2, root, [1, 2, 3, 4], Retention())
    return root


@pytest.fixture
def root(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "root")
    root = tmp_path / "root"
    flip_a_bit(root / "step-00000004" / "rank-00001-of-00002.safetensors", -3)
    (root / "step-00000003" / "rank-00000-of-00002.safetensors").unlink()
    (root / ".step-00000005.partial").mkdir()
    (root / "notes").mkdir()
    return root


def passed_over(root: Path) -> tuple[int | None, list[tuple[str, str]], str]:
    """The step that is found, what `tell` is called with, and what is logged without it."""
    collectives = Setting(1, 1).runtime().collectives
    told: list[Skipped] = []
    logged: list[str] = []
    found = newest_good_together(collectives, root, told.append)
    logging.getLogger("zero_runtime.checkpoint.retention").addFilter(lambda one: not logged.append(one.getMessage()))
    again = newest_good_together(collectives, root)
    step = found and found.index.step
    assert step == (again and again.index.step)
    assert found is None or found.verified
    return step, [(one.path.name, one.why) for one in told], "\n".join(logged)


def test_damaged_and_incomplete_checkpoints_are_skipped_and_reported_by_name(root: Path) -> None:
    [(step, told, logged)] = run_ranks(passed_over, 1, root)
    assert step == 2
    whys = dict(told)
    assert list(whys) == [".step-00000005.partial", "step-00000004", "step-00000003"]
    assert "not committed" in whys[".step-00000005.partial"]
    assert "expected checksum" in whys["step-00000004"]
    assert "found none" in whys["step-00000003"]
    assert all(name in logged for name in whys)


def together(root: Path) -> int | None:
    runtime = Setting(1, 2).runtime()
    found = newest_good_together(runtime.collectives, root)
    if found is None:
        return None
    assert found.verified
    return found.index.step


def test_all_ranks_select_the_same_newest_good_checkpoint(root: Path) -> None:
    assert run_ranks(together, 2, root) == [2, 2]


def none_good(root: Path) -> list[str]:
    collectives = Setting(1, 2).runtime().collectives
    with pytest.raises(CheckpointError) as caught:
        newest_good_together(collectives, root)
    return [str(caught.value), *sorted(path.name for path in root.iterdir())]


def test_a_folder_whose_checkpoints_are_all_damaged_is_refused_and_stays_as_it_is(root: Path) -> None:
    shutil.rmtree(root / "step-00000002")
    shutil.rmtree(root / "step-00000001")
    before = sorted(path.name for path in root.iterdir())
    for told, *after in run_ranks(none_good, 2, root):
        assert after == before
        assert told.startswith(f"{root}: expected a good checkpoint, found none among those of steps 3, 4 (")
        assert "or begin anew with checkpoint.resume=none" in told


def save_after_setting_aside(root: Path) -> list[str]:
    told: list[Skipped] = []
    if dist.get_rank() == 0:
        set_aside(root, 2, told.append)
    settings = SaveSettings(retention=Retention(keep_last=1))
    for step in (3, 4):
        save_checkpoint(Setting(1, 2).runtime(), root, step=step, trainer={}, settings=settings)
    return [one.why for one in told]


def test_what_was_passed_over_is_kept_by_the_saves_that_follow(root: Path) -> None:
    damaged = {path.name: sorted(path.iterdir()) for path in (root / "step-00000003", root / "step-00000004")}
    whys = run_ranks(save_after_setting_aside, 2, root)[0]
    assert list(committed(root)) == [4]
    for (name, files), why in zip(damaged.items(), whys, strict=True):
        [aside] = root.glob(f"{name}.aside-*")
        assert why == f"training goes on from step 2; kept as {aside.name}: delete it by hand"
        assert [path.name for path in sorted(aside.iterdir())] == [path.name for path in files]


def test_an_empty_or_absent_folder_has_no_checkpoint(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        assert run_ranks(passed_over, 1, folder) == [(None, [], "")]


def test_leftovers_of_ended_processes_are_removed_and_checkpoints_are_kept(root: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    dead = mark(child.pid)
    child.kill()
    child.wait()
    leftovers = [root / trash_name(1, f"{dead}-abc"), root / ".step-00000005.partial"]
    (leftovers[0] / "deep").mkdir(parents=True)
    (leftovers[1] / OWNER).write_text(dead)
    mine = [trash_path(root, 2), root / ".step-00000006.partial", root / ".step-00000007.partial"]
    for path in mine:
        path.mkdir()
    (mine[1] / OWNER).write_text(mark())  # the last one has no owner file
    assert clear_leftovers(root) == leftovers
    assert all(path.exists() for path in mine)
    assert list(committed(root)) == [1, 2, 3, 4]
    assert (root / "notes").exists()


def test_a_checkpoint_that_cannot_be_deleted_is_reported_and_kept(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", denied)
    with caplog.at_level(logging.WARNING):
        assert prune(root, Retention(keep_last=3)) == []
    assert "step-00000001: expected to delete it, found" in caplog.text


def node_steps(root: Path) -> int | None:
    """The step on which the nodes agree, where the second node lacks the newest step."""
    rank = dist.get_rank()
    own = root / f"node{rank}"
    runtime = Setting(1, 2).runtime()
    for step in (2, 3):
        save_checkpoint(runtime, own, step=step, trainer={}, settings=SaveSettings(node=rank))
    if rank == 1:
        shutil.rmtree(own / "step-00000003")
    return together(own)


def test_nodes_agree_on_a_step_that_all_have(tmp_path: Path) -> None:
    assert run_ranks(node_steps, 2, tmp_path) == [2, 2]
