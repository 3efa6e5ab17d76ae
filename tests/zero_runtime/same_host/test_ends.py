"""A rank that is killed, stopped, raises or leaves is named by those that wait for it: a kill within a second of its
end, a stop within the group's limit; and no process, socket or file is left. `make test-full` kills 200 ranks."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.attack_counts import Tally
from harness.models import TinySpec, TinyTransformer, batch, token_loss_sum
from harness.outcomes import HASTY, rank_outcomes
from harness.patience import HANG_S
from harness.ranks import fork_context

from zero_runtime.optim.configs import AdamWConfig
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime
from zero_runtime.same_host import progress
from zero_runtime.same_host.group import SharedGroup, register
from zero_runtime.same_host.meeting import Meeting
from zero_runtime.watch.watch import RankWatch

WORLD, VICTIM, LARGE = 3, 1, 2**18
LIMIT_S = 2.0  # of the groups in which a rank is stopped
# From the kill to the error. A second is the promise, and the kernel tells of an end at once; but on few cores, which
# other tests use too, a rank that is not scheduled cannot speak.
NAMED_S = 1.0 if (os.cpu_count() or 1) > 2 * WORLD else 5.0
SHARED = Path("/dev/shm")
SPEC = TinySpec(blocks=2)


def _gather(tensor: torch.Tensor) -> None:
    parts = [torch.empty_like(tensor) for _ in range(WORLD)] if dist.get_rank() == 0 else None
    dist.gather(tensor, parts, dst=0)


def _all_to_all(tensor: torch.Tensor) -> None:
    dist.all_to_all([torch.empty_like(tensor) for _ in range(WORLD)], [tensor] * WORLD)


def _pass_round(tensor: torch.Tensor) -> None:
    rank = dist.get_rank()
    sent = dist.isend(tensor, (rank + 1) % WORLD)
    dist.recv(torch.empty_like(tensor), (rank - 1) % WORLD)
    assert sent is not None
    sent.wait()


KINDS: dict[str, Callable[[torch.Tensor], object]] = {
    "all_reduce": dist.all_reduce,
    "small": lambda one: dist.all_reduce(one[:8]),
    "all_gather": lambda one: dist.all_gather([torch.empty_like(one) for _ in range(WORLD)], one),
    "reduce_scatter": lambda one: dist.reduce_scatter(torch.empty_like(one), [one] * WORLD),
    "all_to_all": _all_to_all,
    "broadcast": lambda one: dist.broadcast(one, VICTIM),
    "reduce": lambda one: dist.reduce(one, VICTIM),
    "gather": _gather,
    "messages": _pass_round,
    "barrier": lambda one: dist.barrier(),
}


def _rank(kind: str, moment_s: float, how: int, rank: int, folder: str) -> None:
    """Issue one kind again and again; the victim ends itself at a moment. Writes what the error was, and when."""
    torch.set_num_threads(1)
    signal.alarm(int(HANG_S))
    store = dist.FileStore(str(Path(folder, "store")), WORLD)
    limit = timedelta(seconds=LIMIT_S if how == signal.SIGSTOP else HANG_S)
    register()
    dist.init_process_group("shm", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=HANG_S))
    tested = dist.new_group(timeout=limit)
    dist.barrier()
    dist.distributed_c10d._update_default_pg(tested)
    if rank == VICTIM:
        signal.signal(signal.SIGALRM, lambda *_: _end(folder, how))
        signal.setitimer(signal.ITIMER_REAL, moment_s)
    tensor = torch.ones(LARGE)
    try:
        while True:
            KINDS[kind](tensor)
    except RuntimeError as error:
        Path(folder, f"told{rank}.part").write_text(f"{time.monotonic()} {error}")
        Path(folder, f"told{rank}.part").rename(Path(folder, f"told{rank}"))
    os._exit(0)


def _end(folder: str, how: int) -> None:
    Path(folder, "ended.part").write_text(str(time.monotonic()))
    Path(folder, "ended.part").rename(Path(folder, "ended"))
    if how == signal.SIGUSR1:
        os._exit(0)  # it leaves, with no word to the others
    os.kill(os.getpid(), how)


def _wrong(kind: str, moment_s: float, how: int) -> list[str]:
    """What was wrong about the end of the victim."""
    context, wrong = fork_context(), []
    shared = set(SHARED.iterdir()) if SHARED.exists() else set()
    with tempfile.TemporaryDirectory() as folder:
        processes: list[Any] = [
            context.Process(target=_rank, args=(kind, moment_s, how, rank, folder), daemon=True)
            for rank in range(WORLD)
        ]
        for process in processes:
            process.start()
        for rank, process in enumerate(processes):
            if rank != VICTIM:
                process.join(HANG_S)
        if how == signal.SIGSTOP:
            processes[VICTIM].kill()
        for process in processes:
            process.join()
        ended = float(Path(folder, "ended").read_text())
        texts = {rank: Path(folder, f"told{rank}") for rank in range(WORLD) if rank != VICTIM}
        names_victim = []
        for rank, path in texts.items():
            at, _, text = path.read_text().partition(" ") if path.exists() else ("inf", "", "no error")
            limit = NAMED_S + (LIMIT_S if how == signal.SIGSTOP else 0.0)
            names_victim.append(f"rank {VICTIM} " in text)
            # A rank may have waited for another that had ended because of the victim, and then names that one.
            if float(at) - ended > limit + (LIMIT_S if how == signal.SIGSTOP else 0.0) or "rank" not in text:
                wrong.append(f"{kind}, {how}, {moment_s:.3f} s: rank {rank} after {float(at) - ended:.2f} s: {text}")
        if not any(names_victim):
            wrong.append(f"{kind}, {how}, {moment_s:.3f} s: nobody named rank {VICTIM}")
        others = {path.name for path in Path(folder).iterdir()} - {"store", "ended", "told0", "told2"}
        wrong += [f"left in the folder: {others}"] if others else []
    left = {one for one in (SHARED.iterdir() if SHARED.exists() else ()) if one not in shared and "torch" in one.name}
    return [*wrong, *(f"left in /dev/shm: {one}" for one in left)]


def _kills(count: int, seed: int) -> list[tuple[str, float, int]]:
    """Kinds in turn, at random moments, every fourth a stop."""
    chance, kinds = random.Random(seed), list(KINDS)
    return [
        (
            kinds[number % len(kinds)],
            chance.uniform(0.0005, 0.05),
            signal.SIGSTOP if number % 4 == 3 else signal.SIGKILL,
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("count", [6, pytest.param(160, marks=[pytest.mark.full, pytest.mark.timeout(3600)])])
def test_killed_and_stopped_ranks_are_named_in_every_kind_of_collective(count: int, tally: Tally) -> None:
    kills = _kills(count, count)
    assert [one for kill in kills for one in _wrong(*kill)] == []
    tally("ranks killed in collectives over shm", kills=count, unnamed=0, left=0)


def test_a_rank_that_leaves_without_a_word_is_named() -> None:
    assert _wrong("all_reduce", 0.02, signal.SIGUSR1) == []


def test_a_group_that_outlives_the_modules_ends_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled model keeps groups until the ending interpreter has set every name of their modules to None."""
    told: list[Any] = []
    kept = SharedGroup(Meeting({}), 0, 1, timedelta(seconds=1))
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    monkeypatch.setattr(weakref.finalize, "_shutdown", True)  # set at the exit of an interpreter
    monkeypatch.setattr(progress, "suppress", None)
    del kept
    gc.collect()
    assert told == []


# ---- in training and in saving ---------------------------------------------------------------------------------------


def _trains(watch: RankWatch, stage: int, moment_s: float, folder: str, how: int) -> None:
    """Train and save without an end; the victim is killed at a moment after its first step."""
    from zero_runtime.checkpoint.save import save_checkpoint

    settings = RuntimeSettings(watch=watch)
    runtime = ZeroRuntime(
        TinyTransformer(SPEC),
        ZeroPlan.from_stage(stage),
        MixedPrecision(),
        AdamWConfig(),
        settings,
        torch.device("cpu"),
    )
    assert dist.get_backend() == "shm"
    step = 0
    while True:
        ids, labels = batch(SPEC, 0, dist.get_rank(), step)
        runtime.backward(token_loss_sum(runtime.model, ids, labels))
        runtime.step(1e-3)
        if step == 0 and dist.get_rank() == VICTIM:
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), how))
            signal.setitimer(signal.ITIMER_REAL, moment_s)
        if folder:
            save_checkpoint(runtime, folder, step=step, trainer={})
        step += 1


def _training_kills(count: int) -> list[str]:
    """What was wrong about kills in training at stages 0 and 3, and in saving."""
    wrong, chance = [], random.Random(count)
    for number in range(count):
        stage, saves, how = (0, 3)[number % 2], number % 4 > 1, (signal.SIGKILL, signal.SIGSTOP)[number % 5 == 4]
        with tempfile.TemporaryDirectory() as folder:
            act = partial(
                _trains, stage=stage, moment_s=chance.uniform(0, 0.3), how=how, folder=folder if saves else ""
            )
            outcomes = rank_outcomes(act, WORLD, HASTY)
        wrong += [
            f"stage {stage}, saves {saves}, {how!r}: rank {rank}: {one}"
            for rank, one in enumerate(outcomes)
            if rank != VICTIM and (one.how not in ("raised", "ended") or one.blamed != (VICTIM,))
        ]
    return wrong


@pytest.mark.parametrize("count", [2, pytest.param(40, marks=[pytest.mark.full, pytest.mark.timeout(3600)])])
def test_the_watch_names_a_rank_that_is_killed_in_training_or_in_saving(count: int, tally: Tally) -> None:
    assert _training_kills(count) == []
    tally("ranks killed in training over shm", kills=count, unnamed=0)
