"""rank_outcomes: like run_ranks, for runs that are meant to fail. Returns how and when each rank ended."""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from harness.patience import HANG_S
from harness.ranks import COMM, RANK_THREADS, fork_context
from zero_runtime.errors import RankError
from zero_runtime.watch.watch import RankWatch, WatchSettings

# A short slow_s keeps tests fast. With the long stuck_s a rank that only waits for a core does not count as stuck;
# tests of stuck ranks set another limit.
HASTY = WatchSettings(slow_s=1.0, stuck_s=HANG_S, answer_s=3.0, poll_s=0.1, grace_s=0.5)


@dataclass(frozen=True)
class Outcome:
    """`how`: "ok", "raised" (by the working thread), "ended" (by the watching one), or "died" without a report.

    `blamed`: the ranks that its RankError names. `seconds`: duration of the complete run, the same for all ranks.
    """

    how: str
    text: str = ""
    blamed: tuple[int, ...] = ()
    exit_code: int | None = None
    seconds: float = 0.0


def rank_outcomes(
    function: Callable[[RankWatch], Any],
    world: int,
    settings: WatchSettings = HASTY,
    *,
    limit_s: float = HANG_S,
    tcp: bool = False,
) -> list[Outcome]:
    """Run `function(watch)` on each of `world` ranks. Ranks that are still alive after `limit_s` are killed.

    A stopped rank is killed once all others have ended. `tcp`: the store is in the process of rank 0, not in a file.
    """
    context = fork_context()
    with tempfile.TemporaryDirectory() as folder:
        ranks = range(world)
        processes = [
            context.Process(target=_rank_main, args=(function, rank, world, folder, settings, tcp), daemon=True)
            for rank in ranks
        ]
        for process in processes:
            process.start()
        while not all(Path(folder, f"joined{rank}").exists() for rank in ranks):
            time.sleep(0.01)
        begun = time.monotonic()
        while any(p.is_alive() and not _stopped(p.pid) for p in processes) and time.monotonic() - begun < limit_s:
            time.sleep(0.02)
        seconds = time.monotonic() - begun
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        return [replace(_read(folder, r), exit_code=processes[r].exitcode, seconds=seconds) for r in ranks]


def _stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _read(folder: str, rank: int) -> Outcome:
    path = Path(folder, f"rank{rank}.pkl")
    return pickle.loads(path.read_bytes()) if path.exists() else Outcome("died")


def _tcp_store(folder: str, rank: int, world: int) -> Any:
    import torch.distributed as dist

    port = Path(folder, "port")
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        port.with_suffix(".part").write_text(str(store.port))
        port.with_suffix(".part").rename(port)
        return store
    while not port.exists():
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(port.read_text()), world, is_master=False)


def _rank_main(
    function: Callable[[RankWatch], Any], rank: int, world: int, folder: str, settings: WatchSettings, tcp: bool
) -> None:
    import torch
    import torch.distributed as dist

    from zero_runtime.world import WorldSettings, cpu_backend, watch_ranks

    def leave(outcome: Outcome) -> None:
        part = Path(folder, f"rank{rank}.part{outcome.how}")
        part.write_bytes(pickle.dumps(outcome))
        part.rename(Path(folder, f"rank{rank}.pkl"))

    def on_end(error: RankError) -> None:
        leave(Outcome("ended", str(error), error.ranks))

    torch.set_num_threads(RANK_THREADS)
    signal.alarm(int(HANG_S))  # so that a test that is itself wrong leaves no process behind
    store = _tcp_store(folder, rank, world) if tcp else dist.FileStore(str(Path(folder, "store")), world)
    # The backend's timeout is longer than any test, so that only the watch ends a rank.
    backend = cpu_backend(os.environ.get(COMM, "auto"), world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(minutes=10))
    watch = watch_ranks(store, WorldSettings(watch=settings, on_end=on_end))
    Path(folder, f"joined{rank}").touch()
    try:
        with watch:
            outcome = Outcome("ok", str(function(watch)))
    except BaseException as error:
        blamed = error.ranks if isinstance(error, RankError) else ()
        outcome = Outcome("raised", f"{type(error).__name__}: {error}", blamed)
    leave(outcome)
    os._exit(0 if outcome.how == "ok" else 1)


def assert_death_is_named(outcomes: Sequence[Outcome], killed: int, at: str) -> None:
    """Fails unless the rank was killed and every other one names it and where it was, such as `step 3, forward`."""
    assert outcomes[killed].how == "died"
    for rank, outcome in enumerate(outcomes):
        if rank != killed:
            assert outcome.how in ("raised", "ended"), outcome
            assert outcome.blamed == (killed,), outcome
            assert f"rank {killed} is gone" in outcome.text
            assert at in outcome.text
