"""Ranks that die by SIGKILL inside a save leave a good checkpoint behind, and the run goes on from it.

A slowed writer spreads a save over most of a second, and the kill comes when a random part of its bytes is written. `in
the window` are the kills that came after the first byte of a file and before the commit; they are counted from what
lies on the disk when all ranks are dead, and printed.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import signal
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness.checkpoints import Setting, train
from harness.patience import HANG_S, wait_until
from harness.ranks import RANK_THREADS, run_ranks

from zero_runtime.checkpoint.background import BackgroundSaver
from zero_runtime.checkpoint.load import load_checkpoint
from zero_runtime.checkpoint.save import SaveSettings, save_checkpoint
from zero_runtime.checkpoint.shelf import clear_leftovers, committed, newest_good_together

HERE = Setting(3, 2)
SLOW = SaveSettings(block_bytes=1 << 13, pause_s=0.03)
SEED = 4


def run_on(root: Path, steps: int, behind: bool) -> list[tuple[int, float]]:
    """Resume from the newest good checkpoint, train so many steps, saving after each; the loss of every step."""
    runtime = HERE.runtime()
    found = newest_good_together(runtime.collectives, root)
    begun = load_checkpoint(runtime, found)["step"] if found else 0
    saver = BackgroundSaver(root, SLOW)
    losses = []
    for step in range(begun, begun + steps):
        losses += [(step, loss) for loss in train(runtime, HERE.case(), step, 1)]
        with open(root / f"losses.{dist.get_rank()}", "a") as file:
            file.write(f"{step} {losses[-1][1]!r}\n")
        if behind:
            saver.save(runtime, step=step + 1, trainer={"step": step + 1})
        else:
            save_checkpoint(runtime, root, step=step + 1, trainer={"step": step + 1}, settings=SLOW)
    saver.wait(runtime)
    return losses


def victim(root: Path, store: str, rank: int, behind: bool) -> None:
    torch.set_num_threads(RANK_THREADS)
    signal.alarm(int(HANG_S))  # a test that is itself wrong leaves no process behind
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=HANG_S)
    )
    run_on(root, 1000, behind)


def first_byte(root: Path) -> Path | None:
    """The partial folder, when a file in it has bytes."""
    with suppress(FileNotFoundError):  # committed or removed while we look
        return next((path.parent for path in root.glob(".step-*.partial/*.safetensors") if path.stat().st_size), None)
    return None


def kill_inside_a_save(root: Path, store: Path, chance: random.Random, whole: int) -> bool:
    """Start both ranks, kill one of them somewhere in a save of `whole` bytes, then the other; whether it fell into the
    window."""
    context = mp.get_context("forkserver")
    behind = chance.random() < 0.5
    ranks = [context.Process(target=victim, args=(root, str(store), rank, behind), daemon=True) for rank in (0, 1)]
    before = list(committed(root))
    clear_leftovers(root)  # else the last kill's would pass for this one's
    for process in ranks:
        process.start()
    wanted = chance.randint(1, 2)  # the save, counted from here
    share = chance.uniform(0, 0.6)
    wait_until(
        lambda: len(set(committed(root)) - set(before)) >= wanted - 1 and written(root) > share * whole, every_s=0.002
    )
    hit = chance.choice(ranks)
    assert hit.pid is not None
    os.kill(hit.pid, signal.SIGKILL)
    hit.join()
    partial = first_byte(root)
    for process in ranks:
        process.kill()
        process.join()
    return partial is not None and first_byte(root) is not None


def written(root: Path) -> int:
    """Bytes of the save that is under way."""
    with suppress(FileNotFoundError):
        return sum(path.stat().st_size for path in root.glob(".step-*.partial/*.safetensors"))
    return 0


def kills(root: Path, count: int, shared: Path) -> int:
    chance = random.Random(SEED)
    inside = 0
    wanted = dict(run_ranks(run_on_alone, 2, min(4 * count, 120))[0])
    run_ranks(run_on, 2, root, 1, False)
    whole = sum(path.stat().st_size for path in root.glob("step-*/*.safetensors"))
    for number in range(count):
        before = list(committed(root))
        inside += kill_inside_a_save(root, shared / f"store{number}", chance, whole)
        assert set(before) <= set(committed(root)), "a kill took an older checkpoint away"
    resumed = run_ranks(run_on, 2, root, 2, False)[0]
    assert resumed[0][0] == max(committed(root)) - 2 > 0, "the run never got on"
    told = [line.split() for rank in (0, 1) for line in (root / f"losses.{rank}").read_text().splitlines()]
    assert len({step for step, _ in told}) >= count / 2
    for step, loss in told:
        if int(step) in wanted:
            assert float(loss) == wanted[int(step)], f"step {step} of a resumed run differs from the unbroken run"
    print(f"{inside} of {count} kills fell between the first byte and the commit")
    return inside


def run_on_alone(steps: int) -> list[tuple[int, float]]:
    """The unbroken run."""
    return list(enumerate(train(HERE.runtime(), HERE.case(), 0, steps)))


def test_after_kills_inside_saves_the_run_goes_on_with_the_unbroken_losses(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    assert kills(tmp_path / "root", 5, tmp_path) >= 3


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_forty_of_fifty_kills_fall_inside_a_save(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    assert kills(tmp_path / "root", 50, tmp_path) >= 40
