"""spawn_ranks: runs a function on ranks that are fresh processes, each with its GPU, over NCCL; on CPUs over gloo.

Ranks are spawned and not forked, because a process that has used CUDA cannot be forked. Needs torch alone.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zero_runtime.errors import RankError
from zero_runtime.watch.watch import WatchSettings
from zero_runtime.world import WorldSettings, join_world, leave_world

START_S = 120.0  # for torch's import, CUDA's context and NCCL's first connection


@dataclass(frozen=True)
class Ended:
    """How a rank ended: "ok" with the function's value, "raised" or "ended" (by its watch), or "died" without a word.

    `text`, `blamed`: of the error, and the ranks that a RankError names. `kind`: the class of the error.
    """

    how: str
    value: Any = None
    text: str = ""
    kind: str = ""
    blamed: tuple[int, ...] = ()


def spawn_ranks(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    device: str = "cuda",
    limit_s: float = 300.0,
    watch: WatchSettings | None = None,
) -> list[Ended]:
    """Runs `function(watch, device, *args)` on each rank of a new world. Returns how each ended, in order of rank.

    Ranks that live after `limit_s` are killed; they have "died".
    """
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(function, args, rank, world, folder, device, watch or WatchSettings()) for rank in range(world)]
        processes = [context.Process(target=_main, args=given, daemon=True) for given in arguments]
        for process in processes:
            process.start()
        deadline = time.monotonic() + START_S + limit_s
        for process in processes:
            process.join(max(deadline - time.monotonic(), 0.0))
        for process in processes:
            process.kill()
            process.join()
        return [_read(Path(folder, f"{rank}.pkl"), processes[rank].exitcode) for rank in range(world)]


def values_of(ended: list[Ended]) -> list[Any]:
    """The values of ranks that all ended well; AssertionError with the texts of those that did not."""
    texts = [f"--- rank {rank}: {one.how}\n{one.text}" for rank, one in enumerate(ended) if one.how != "ok"]
    assert not texts, "\n".join(texts)
    return [one.value for one in ended]


def _read(path: Path, code: int | None) -> Ended:
    if not path.exists():
        return Ended("died", text=f"exit code {code}: killed at its limit, or ended by a signal")
    found: Ended = pickle.loads(path.read_bytes())
    return found


def _main(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world: int,
    folder: str,
    kind: str,
    settings: WatchSettings,
) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)

    def tell(ended: Ended) -> None:
        part = Path(folder, f"{rank}.part")
        part.write_bytes(pickle.dumps(ended))
        part.rename(Path(folder, f"{rank}.pkl"))

    def failed(how: str, error: BaseException) -> Ended:
        text = "".join(traceback.format_exception(error))
        return Ended(how, None, text, type(error).__name__, error.ranks if isinstance(error, RankError) else ())

    joined = WorldSettings(watch=settings, on_end=lambda error: tell(failed("ended", error)))
    try:
        with join_world(Path(folder, "store"), rank, world, device, joined) as watch:
            value = function(watch, device, *args)
        leave_world()
        tell(Ended("ok", value))
    except BaseException as error:
        tell(failed("raised", error))
        os._exit(1)  # runs no destructor: a communicator's waits for ranks that may be gone
    os._exit(0)
