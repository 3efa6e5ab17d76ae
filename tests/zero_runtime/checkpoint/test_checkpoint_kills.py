"""Ranks killed by SIGKILL during a save leave a good checkpoint behind, from which the run resumes.

Random kills: a slowed writer spreads a save over most of a second, and a rank is killed when a random part of the
save's bytes is written. `in the window` are the kills after the first byte of a file and before the commit; they are
counted from the files on the disk when all ranks are dead, and printed.
Aimed kills: a rank is killed before each kind of change that it makes to files, in saves that delete older checkpoints.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness.attack_counts import Tally
from harness.checkpoints import Setting, train, whole
from harness.kill_points import Aim, KillPoints, kinds, notes
from harness.patience import HANG_S, wait_until
from harness.ranks import RANK_THREADS, fork_context, run_ranks

from zero_runtime.checkpoint import tensor_file
from zero_runtime.checkpoint.background import BackgroundSaver
from zero_runtime.checkpoint.load import load_checkpoint
from zero_runtime.checkpoint.retention import Retention, clear_leftovers, committed, newest_good_together
from zero_runtime.checkpoint.save import SaveSettings, save_checkpoint
from zero_runtime.runtime import ZeroRuntime

HERE = Setting(3, 2)
SLOW = SaveSettings(block_bytes=1 << 13)
PAUSE_S = 0.03  # after each block of SLOW
DELETING = SaveSettings(retention=Retention(keep_last=2))
SEED = 4
RECORDED = 4  # steps of the run that records the kill points: two of its saves delete an older checkpoint


def run_on(root: Path, steps: int, behind: bool, settings: SaveSettings = SLOW) -> tuple[list[tuple[int, float]], str]:
    """Resume from the newest good checkpoint and train `steps` steps, saving after each.

    Returns the loss of every step, and the digest of all states at the end.
    """
    runtime = HERE.runtime()
    found = newest_good_together(runtime.collectives, root)
    begun = load_checkpoint(runtime, found)["step"] if found else 0
    saver = BackgroundSaver(root, settings)
    losses = []
    for step in range(begun, begun + steps):
        losses += [(step, loss) for loss in train(runtime, HERE.case(), step, 1)]
        with open(root / f"losses.{dist.get_rank()}", "a") as file:
            file.write(f"{step} {losses[-1][1]!r}\n")
        if behind:
            saver.save(runtime, step=step + 1, trainer={"step": step + 1})
        else:
            save_checkpoint(runtime, root, step=step + 1, trainer={"step": step + 1}, settings=settings)
    saver.wait(runtime)
    return losses, digest(runtime)


def digest(runtime: ZeroRuntime) -> str:
    """SHA-256 of the bits of every state of every parameter."""
    found = hashlib.sha256()
    for name, values in sorted(whole(runtime).items()):
        found.update(name.encode() + values.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def victim(root: Path, store: str, rank: int, behind: bool, log: Path | None = None, aim: Aim | None = None) -> None:
    """Train until killed, by `aim` if one is given. With a log and no aim, train RECORDED steps and log kill points."""
    torch.set_num_threads(RANK_THREADS)
    if log is None:
        write = tensor_file._write_all
        tensor_file._write_all = lambda fd, block: (write(fd, block), time.sleep(PAUSE_S))
    signal.alarm(int(HANG_S))  # even a faulty test leaves no process behind
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=HANG_S)
    )
    if log is not None:
        sys.addaudithook(KillPoints(log, [root], f"rank{rank}", aim))
    run_on(root, 1000 if aim or not log else RECORDED, behind, DELETING if log else SLOW)


def first_byte(root: Path) -> Path | None:
    """The partial folder if a file in it has bytes, else None."""
    with suppress(FileNotFoundError):  # committed or removed in the meantime
        return next((path.parent for path in root.glob(".step-*.partial/*.safetensors") if path.stat().st_size), None)
    return None


def kill_inside_a_save(root: Path, store: Path, chance: random.Random, whole: int) -> bool:
    """Start both ranks, kill one of them at a random point of a save of `whole` bytes, then kill the other.

    Returns whether the first kill fell into the window.
    """
    context = fork_context()
    behind = chance.random() < 0.5
    ranks = [context.Process(target=victim, args=(root, str(store), rank, behind), daemon=True) for rank in (0, 1)]
    before = list(committed(root))
    clear_leftovers(root)  # else those of the last kill would be taken for this one's
    for process in ranks:
        process.start()
    wanted = chance.randint(1, 2)  # number of the save, counted from here
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


def kill_where_aimed(root: Path, log: Path, aim: Aim | None, behind: bool) -> None:
    """Start both ranks; when one is killed by the aim, kill the other too, as a launcher would."""
    context = fork_context()
    arguments = [(root, str(log.with_suffix(".store")), rank, behind, log, aim) for rank in (0, 1)]
    ranks = [context.Process(target=victim, args=one, daemon=True) for one in arguments]
    for process in ranks:
        process.start()
    wait_until(lambda: any(process.exitcode is not None for process in ranks))
    for process in ranks:
        if aim is not None:
            process.kill()
        process.join()


def written(root: Path) -> int:
    """Bytes written so far by the save in progress."""
    with suppress(FileNotFoundError):
        return sum(path.stat().st_size for path in root.glob(".step-*.partial/*.safetensors"))
    return 0


def assert_losses(root: Path, wanted: dict[int, float], least: int) -> None:
    """Assert that every loss that a rank ever recorded equals the loss of the uninterrupted run."""
    told = [line.split() for rank in (0, 1) for line in (root / f"losses.{rank}").read_text().splitlines()]
    assert len({step for step, _ in told}) >= least
    for step, loss in told:
        if int(step) in wanted:
            assert float(loss) == wanted[int(step)], f"step {step} of a resumed run differs from the unbroken run"


def kills(root: Path, count: int, shared: Path, tally: Tally) -> int:
    chance = random.Random(SEED)
    inside = 0
    wanted = dict(run_ranks(run_on_alone, 2, min(4 * count, 120))[0][0])
    run_ranks(run_on, 2, root, 1, False)
    whole = sum(path.stat().st_size for path in root.glob("step-*/*.safetensors"))
    for number in range(count):
        before = list(committed(root))
        inside += kill_inside_a_save(root, shared / f"store{number}", chance, whole)
        assert set(before) <= set(committed(root)), "a kill took an older checkpoint away"
    resumed, _ = run_ranks(run_on, 2, root, 2, False)[0]
    assert resumed[0][0] == max(committed(root)) - 2 > 0, "the run never got on"
    assert_losses(root, wanted, count // 2)
    print(f"{inside} of {count} kills fell between the first byte and the commit")
    tally("kills of saves at random", kills=count, in_the_window=inside, checkpoints_lost=0, wrong_bits=0)
    return inside


def run_on_alone(steps: int) -> tuple[list[tuple[int, float]], str]:
    """The losses and the digest of the uninterrupted run."""
    runtime = HERE.runtime()
    return list(enumerate(train(runtime, HERE.case(), 0, steps))), digest(runtime)


@pytest.mark.full
def test_a_run_resumes_with_the_losses_of_the_uninterrupted_run_after_kills_inside_saves(
    tmp_path: Path, tally: Tally
) -> None:
    (tmp_path / "root").mkdir()
    assert kills(tmp_path / "root", 5, tmp_path, tally) >= 3


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_run_survives_thirty_kills_of_which_at_least_twenty_fall_inside_a_save(tmp_path: Path, tally: Tally) -> None:
    (tmp_path / "root").mkdir()
    assert kills(tmp_path / "root", 30, tmp_path, tally) >= 20


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("behind", [False, True])
def test_a_kill_before_any_file_change_of_a_save_loses_no_checkpoint_and_no_bit(
    behind: bool, tmp_path: Path, tally: Tally
) -> None:
    record, root = tmp_path / "record" / "root", tmp_path / "root"  # the same name, as saves call mkdir on it
    record.mkdir(parents=True)
    root.mkdir()
    kill_where_aimed(record, tmp_path / "unbroken.log", None, behind)
    aims = [one if behind else one._replace(count=1) for one in kinds(tmp_path / "unbroken.log")]
    assert {one.change.call for one in aims} == {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}
    for number, (change, count) in enumerate(aims):
        before = list(committed(root))
        log = tmp_path / f"aim{number}.log"
        kill_where_aimed(root, log, Aim(change, count), behind)
        assert [tuple(words) for _, words in notes(log, "killed")] == [change]
        assert max(committed(root), default=0) >= max(before, default=0), f"{change}: a kill took a checkpoint away"
        assert len(before) < 2 or len(committed(root)) >= 2, f"{change}: fewer than are to be kept"
    resumed, end = run_ranks(run_on, 2, root, 2, behind, DELETING)[0]
    steps = resumed[-1][0] + 1
    losses, wanted = run_ranks(run_on_alone, 2, steps)[0]
    assert_losses(root, dict(losses), 5)  # a run that is killed before it commits makes no progress
    assert end == wanted, "the states at the end differ from the unbroken run's"
    assert sorted(path.name for path in root.iterdir()) == sorted(
        ["losses.0", "losses.1", *(f"step-{step:08d}" for step in (steps - 1, steps))]
    ), "leftovers"
    tally("kills of saves aimed", kills=len(aims), checkpoints_lost=0, wrong_bits=0, leftovers=0)
