"""Checkpoints that are damaged, unfinished or of something else are refused by name and change nothing; what stays is
what retention says; saving in the background saves what was there when it was asked."""

from __future__ import annotations

import json
import re
import resource
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness.models import TinySpec
from harness.oracle import ADAMW, LR, Case
from harness.ranks import run_ranks
from harness.trainee import backwards_of_step, build_runtime, full_tensors

from zero_runtime.checkpoint.layout import INDEX, file_of, folder_of, partial_of
from zero_runtime.checkpoint.load import Checkpoint, load_checkpoint, load_weights, newest_good, open_verified
from zero_runtime.checkpoint.save import Saver, SaveSettings, local_group, save_checkpoint
from zero_runtime.checkpoint.shelf import Retention, steps_in
from zero_runtime.errors import CheckpointError
from zero_runtime.loss_scaler import LossScaleRule
from zero_runtime.optimizers import OptimizerConfig, SgdConfig
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import ZeroRuntime

CASE = Case(2)
FILE = file_of(1, 2)


def step(runtime: ZeroRuntime, number: int, case: Case = CASE) -> float:
    backwards_of_step(runtime, case, number)
    return runtime.step(LR).loss


def _saved(root: Path) -> None:
    runtime = build_runtime(CASE, 2)
    for number in range(2):
        step(runtime, number)
        save_checkpoint(runtime, root, step=number + 1, trainer={"step": number + 1})


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2 of a run; copied by whoever damages it."""
    root = tmp_path_factory.mktemp("shelf") / "checkpoints"
    run_ranks(_saved, 2, root)
    return root


@pytest.fixture
def copy(shelf: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shelf, tmp_path / "copy"))


# ---- damage ----------------------------------------------------------------------------------------------------------


def _flip(folder: Path) -> None:
    data = bytearray((folder / FILE).read_bytes())
    data[-100] ^= 1
    (folder / FILE).write_bytes(data)


def _cut(folder: Path) -> None:
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-10])


def _lose(folder: Path) -> None:
    (folder / FILE).unlink()


def _break_index(folder: Path) -> None:
    (folder / INDEX).write_text((folder / INDEX).read_text()[:-20])


def _age(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({**index, "version": 0}))


def _unfinish(folder: Path) -> None:
    (folder / INDEX).unlink()


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "flipped": (_flip, rf"{FILE}: expected the checksum .* its bytes have changed"),
    "cut": (_cut, rf"{FILE}: expected [\d,]+ bytes, found [\d,]+: it was cut off"),
    "lost": (_lose, rf"{FILE}: expected this file"),
    "index": (_break_index, r"index.json: expected the index of a checkpoint"),
    "version": (_age, r"version 1, found 'zero-lab checkpoint' version 0; load it with the version"),
    "unfinished": (_unfinish, r"expected a checkpoint, found no index.json"),
}


def _refusals(folders: dict[str, Path]) -> dict[str, tuple[str, int | None, list[str]]]:
    """By damage: what opening says, and the step and the notes of the newest good one beside it."""
    found = {}
    collectives = build_runtime(CASE, 3).collectives
    for name, root in folders.items():
        with pytest.raises(CheckpointError) as refusal:
            open_verified(folder_of(root, 2), collectives)
        newest, skipped = newest_good(root, collectives)
        found[name] = (str(refusal.value), newest and newest.index.step, skipped)
    return found


def test_a_damaged_checkpoint_is_refused_by_name_and_the_last_good_one_is_taken(shelf: Path, tmp_path: Path) -> None:
    folders = {}
    for name, (damage, _) in DAMAGES.items():
        folders[name] = Path(shutil.copytree(shelf, tmp_path / name))
        damage(folder_of(folders[name], 2))
    for by_damage in run_ranks(_refusals, 2, folders):
        for name, (message, good, skipped) in by_damage.items():
            assert re.search(DAMAGES[name][1], message), (name, message)
            assert good == 1, name
            assert len(skipped) == 1, name


def test_one_that_is_still_being_written_says_so(tmp_path: Path) -> None:
    partial = partial_of(tmp_path, 3)
    partial.mkdir()
    with pytest.raises(CheckpointError, match="still being written"):
        Checkpoint.open(partial)
    with pytest.raises(CheckpointError, match="expected the folder of a checkpoint, found none"):
        Checkpoint.open(tmp_path / "nowhere")


# ---- something else --------------------------------------------------------------------------------------------------

OTHERS: dict[str, tuple[TinySpec, OptimizerConfig, str]] = {
    "vocabulary": (TinySpec(vocab=41), ADAMW, r"embed.weight: the model has \[41, 20\], it has \[37, 20\]"),
    "deeper": (TinySpec(blocks=4), ADAMW, r"the model's blocks.3.down.bias, .* and \d+ more are not in it"),
    "shallower": (TinySpec(blocks=2), ADAMW, r"its blocks.2.down.bias, .* and \d+ more are not in the model"),
    "optimizer": (TinySpec(), SgdConfig(momentum=0.9), r"expected the states of Sgd, found those of AdamW; train with"),
}


def _misfits(root: Path) -> dict[str, tuple[str, bool]]:
    found = {}
    for name, (spec, optimizer, _) in OTHERS.items():
        runtime = build_runtime(replace(CASE, model=spec), 3, optimizer=optimizer)
        before = full_tensors(runtime, "param_shard")
        with pytest.raises(CheckpointError) as refusal:
            load_checkpoint(runtime, Checkpoint.open(folder_of(root, 2)))
        after = full_tensors(runtime, "param_shard")
        found[name] = str(refusal.value), all(torch.equal(before[key], after[key]) for key in before)
        runtime.close()
    return found


def test_another_model_or_optimizer_is_refused_before_anything_changes(shelf: Path) -> None:
    for by_name in run_ranks(_misfits, 2, shelf):
        for name, (message, same) in by_name.items():
            assert same, name
            assert re.search(OTHERS[name][2], message, re.DOTALL), (name, message)


def _weights_alone(root: Path) -> tuple[bool, bool]:
    runtime = build_runtime(replace(CASE, model=TinySpec(seed=5)), 3, optimizer=SgdConfig(momentum=0.9))
    load_weights(runtime, Checkpoint.open(folder_of(root, 2)))
    with runtime.full_params() as params:
        source = Checkpoint.open(folder_of(root, 2))
        same = all(
            torch.equal(value.reshape(-1), source.read(name, "master", 0, value.numel()))
            for name, value in params.items()
        )
    return same, all(not state.any() for state in runtime.optimizer.state_tensors())


def test_weights_alone_load_into_another_optimizer(shelf: Path) -> None:
    assert run_ranks(_weights_alone, 2, shelf) == [(True, True)] * 2


# ---- failures while saving -------------------------------------------------------------------------------------------


def _full_disk(root: Path) -> tuple[str, list[int], list[str], float]:
    """Rank 1 cannot write its second checkpoint; then there is room again."""
    runtime = build_runtime(CASE, 2)
    saver = Saver(root)
    step(runtime, 0)
    saver.save(runtime, step=1, trainer={})
    saver.wait()
    if dist.get_rank() == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a write beyond the limit is an error, as on a full disk
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    saver.save(runtime, step=2, trainer={})
    with pytest.raises(CheckpointError) as failure:
        saver.wait()
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()
    there, names = steps_in(root), sorted(one.name for one in root.iterdir())
    dist.barrier()
    saver.save(runtime, step=3, trainer={}, background=False)
    return str(failure.value), there, names, step(runtime, 1)


def test_a_disk_that_is_full_on_one_rank_is_told_on_all_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    for message, there, names, loss in run_ranks(_full_disk, 2, root):
        assert "rank 1: OSError" in message
        assert "the ones before it are untouched" in message
        assert there == [1]
        assert names == ["step-00000001"]
        assert loss > 0
    assert steps_in(root) == [3, 1]


def _no_permission(root: Path) -> str:
    with pytest.raises(CheckpointError) as failure:
        save_checkpoint(build_runtime(CASE, 1), root, step=1, trainer={})
    return str(failure.value)


def test_a_folder_that_cannot_be_made_is_told_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for message in run_ranks(_no_permission, 2, tmp_path / "file" / "checkpoints"):
        assert "rank 0: NotADirectoryError" in message


# ---- what is saved, and what stays -----------------------------------------------------------------------------------


def _behind_training(root: Path) -> bool:
    runtime = build_runtime(CASE, 3)
    saver = Saver(root, SaveSettings(pause_s=0.02))
    step(runtime, 0)
    before = {name: value.clone() for name, value in full_tensors(runtime, "master_shard").items()}
    saver.save(runtime, step=1, trainer={})
    step(runtime, 1)  # while the files are written
    saver.wait()
    source = Checkpoint.open(folder_of(root, 1))
    return all(
        torch.equal(value.reshape(-1), source.read(name, "master", 0, value.numel())) for name, value in before.items()
    )


def test_a_save_behind_training_has_the_values_of_its_moment(tmp_path: Path) -> None:
    assert run_ranks(_behind_training, 2, tmp_path / "checkpoints") == [True, True]


def _many(root: Path) -> None:
    runtime = build_runtime(CASE, 1)
    saver = Saver(root, SaveSettings(Retention(keep_last=2, keep_every=4)))
    for number in range(1, 8):
        saver.save(runtime, step=number, trainer={})
    saver.wait()
    saver.save(runtime, step=7, trainer={"again": True})
    saver.wait()


def test_the_last_ones_and_every_nth_stay_and_a_step_may_be_saved_again(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    (root / ".step-00000003.partial").mkdir(parents=True)  # of a save that was killed
    run_ranks(_many, 2, root)
    assert sorted(one.name for one in root.iterdir()) == ["step-00000004", "step-00000006", "step-00000007"]
    assert Checkpoint.open(folder_of(root, 7)).trainer == {"again": True}


def test_retention() -> None:
    assert Retention().goes([1, 2, 3]) == []
    assert Retention(keep_last=1).goes([3, 1, 2]) == [1, 2]
    assert Retention(keep_last=1, keep_every=2).goes([1, 2, 3, 4, 5]) == [1, 3]


def _scaled(root: Path) -> tuple[list[float], list[float]]:
    case = replace(CASE, precision=MixedPrecision("fp16"), loss_scale=LossScaleRule(initial_power=4, window=2))
    runtime = build_runtime(case, 2)
    for number in range(3):
        step(runtime, number, case)
    save_checkpoint(runtime, root, step=3, trainer={})
    torch.manual_seed(dist.get_rank())
    drawn = torch.rand(3)
    torch.manual_seed(7)
    other = build_runtime(case, 2)
    torch.manual_seed(dist.get_rank())
    save_checkpoint(runtime, root, step=4, trainer={})
    torch.manual_seed(99)
    load_checkpoint(other, Checkpoint.open(folder_of(root, 4)))
    assert torch.equal(torch.rand(3), drawn)
    scales = []
    for one in (runtime, other):
        scales.append([])
        for number in range(3, 7):
            backwards_of_step(one, case, number)
            scales[-1].append(one.step(LR).loss_scale)
    return scales[0], scales[1]


def test_the_loss_scale_and_each_ranks_random_numbers_go_on(tmp_path: Path) -> None:
    for went_on, loaded in run_ranks(_scaled, 2, tmp_path / "checkpoints"):
        assert went_on == loaded
        assert len(set(went_on)) > 1


# ---- nodes without a shared folder -----------------------------------------------------------------------------------


def _on_nodes(root: Path) -> tuple[list[str], bool, str]:
    rank = dist.get_rank()
    own = root / f"node{rank // 2}"
    case = Case(4)
    runtime = build_runtime(case, 3)
    step(runtime, 0, case)
    saver = Saver(own, SaveSettings(local_ranks=tuple(local_group(rank, 2, 4))))
    saver.save(runtime, step=1, trainer={}, background=False)
    wanted = full_tensors(runtime, "master_shard")
    files = sorted(one.name for one in folder_of(own, 1).iterdir())
    other = build_runtime(replace(case, model=TinySpec(seed=3)), 3)
    newest, _ = newest_good(own, other.collectives)
    assert newest is not None
    load_checkpoint(other, newest)
    same = all(torch.equal(value, full_tensors(other, "master_shard")[name]) for name, value in wanted.items())
    with pytest.raises(CheckpointError) as refusal:
        load_checkpoint(build_runtime(case, 0), newest)
    return files, same, str(refusal.value)


def test_nodes_may_have_folders_of_their_own_and_load_at_the_same_setting(tmp_path: Path) -> None:
    for rank, (files, same, refusal) in enumerate(run_ranks(_on_nodes, 4, tmp_path)):
        first = rank // 2 * 2
        assert files == [INDEX, file_of(first, 4), file_of(first + 1, 4)]
        assert same
        assert "the files of some nodes alone" in refusal
