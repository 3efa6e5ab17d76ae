"""One rank of a job: its place in the world, the call of its entry function, and the record that it writes."""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from orchestrator.machine.processes import redirect_output, started
from orchestrator.records.record_file import write_json_atomic
from orchestrator.records.run_record import AttemptPaths
from orchestrator.records.run_state import RunState
from orchestrator.text.paths import CODE
from zero_runtime.errors import CheckpointError, RankError, RankMemoryError

OURS = ("orchestrator", "zero_runtime")
ENTRY = "orchestrator.worker.train:run_rank"
# Asks a rank to write its current stack to its log, as SIGQUIT does for a Java or Go program.
WHERE_SIGNAL = signal.SIGQUIT
# Asks a rank to stop at the next step that all ranks agree on. SLURM is configured to send this signal, which users of
# submitit know; SIGUSR1 is avoided because NCCL may use it. submitit's own handlers are not installed: they save on
# rank 0 only, and ignore SIGTERM.
STOP_SIGNAL = signal.SIGUSR2
_STDERR = 2


@dataclass(frozen=True)
class RankInfo:
    """A rank's place in the world. `meeting` is where the ranks rendezvous, as `join_world` takes it.

    `restarts`: how often a scheduler requeued the job of this attempt and started it again. on_end: called, in place of
    writing the rank's record, before the watch ends the process; see RankWatch.
    """

    rank: int
    world: int
    local_rank: int
    meeting: str | Path
    restarts: int = 0
    on_end: Callable[[BaseException], None] | None = None


@dataclass(frozen=True)
class Stopped:
    """Returned by an entry that was asked to stop: its last step, and whether a checkpoint holds that step."""

    step: int
    saved: bool

    def __str__(self) -> str:
        then = "saved" if self.saved else "nothing was saved (checkpoint=none), so it starts again from step 0"
        return f"stopped by a signal after step {self.step}, {then}"


Entry = Callable[[AttemptPaths, RankInfo], Stopped | None]


def rank_in_world(environ: Mapping[str, str], meeting: str | Path) -> RankInfo | None:
    """The place that torchrun, srun or our own launcher gave this process; None if it was started by none of them."""
    restarts = int(environ.get("SLURM_RESTART_COUNT", "0"))
    if "RANK" in environ and "WORLD_SIZE" in environ:
        local = environ.get("LOCAL_RANK", environ.get("SLURM_LOCALID", environ["RANK"]))
        return RankInfo(int(environ["RANK"]), int(environ["WORLD_SIZE"]), int(local), meeting, restarts)
    # A batch script also has SLURM_PROCID; only the processes of a job step are ranks.
    if environ.get("SLURM_STEP_ID", "").isdigit() and "SLURM_PROCID" in environ:
        rank, world, local_rank = (int(environ[f"SLURM_{key}"]) for key in ("PROCID", "NTASKS", "LOCALID"))
        return RankInfo(rank, world, local_rank, meeting, restarts)
    return None


def place(rank: int, world: int, local_rank: int, local_world: int) -> dict[str, str]:
    """The variables from which `rank_in_world`, torch and other libraries read a rank's place."""
    found = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_world}
    return {name: str(value) for name, value in found.items()}


def load_entry(entry: str) -> Entry:
    """Imports and returns the function that "module:function" names."""
    module, _, name = entry.partition(":")
    function: Entry = getattr(importlib.import_module(module), name)
    return function


class RankRecord:
    """The record of one rank: its process, when it started, and how it ended. Only that rank writes it."""

    def __init__(self, attempt: AttemptPaths, rank: int) -> None:
        self._path = attempt.rank_record(rank)
        self._facts = {"rank": rank, "pid": os.getpid(), "started": started(os.getpid())}

    def write(self, state: RunState, **facts: Any) -> None:
        # Events are ordered by `monotonic`: all processes of a machine share that clock, and nobody can set it.
        now = {"time": time.time(), "monotonic": time.monotonic()}
        write_json_atomic(self._path, {**self._facts, "state": state.value, **now, **facts})

    def write_error(self, error: BaseException) -> None:
        """Records a failure. `outcome` is the state of the run if this error is its root cause."""
        facts: dict[str, Any] = {"traceback": "".join(traceback.format_exception(error)), "blamed": []}
        facts["explained"] = _is_explained(error)
        outcome = RunState.error
        if isinstance(error, RankMemoryError):
            outcome = RunState.oom_host if error.on_host else RunState.oom
            facts["memory"] = error.facts
        elif isinstance(error, RankError):
            facts["blamed"] = list(error.ranks)
            outcome = RunState.hang if error.hung else RunState.error
        text = str(error) if isinstance(error, RankMemoryError) else f"{type(error).__name__}: {error}"
        self.write(RunState.error, error=text, outcome=outcome.value, **facts)


def _is_explained(error: BaseException) -> bool:
    """Whether a line of ours raised it for what the user gave, so that its message says what to do."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = any(Path(frames[-1].filename).is_relative_to(CODE / room) for room in OURS) if frames else False
    return ours and isinstance(error, (ValueError, CheckpointError))


def run_recorded(attempt: AttemptPaths, rank: RankInfo, entry: str) -> BaseException | Stopped | None:
    """Runs the entry and records how it ended. Returns the failure (its traceback is in the log) or the stop."""
    record = RankRecord(attempt, rank.rank)
    record.write(RunState.running)
    faulthandler.register(WHERE_SIGNAL, file=_STDERR, all_threads=False)
    try:
        stopped = load_entry(entry)(attempt, rank)
    except BaseException as error:  # SystemExit and KeyboardInterrupt are failures too
        record.write_error(error)
        traceback.print_exc()
        sys.stderr.flush()
        return error
    if stopped is not None:
        record.write(RunState.preempted, message=str(stopped), **asdict(stopped))
        return stopped
    record.write(RunState.ok)
    return None


def begin_rank(attempt: AttemptPaths, meeting: str | Path, where: str = "") -> RankInfo:
    """Sends the output of this process to the log of its rank, and records that it starts. where: for the first line of
    that log."""
    rank = rank_in_world(os.environ, meeting)
    assert rank is not None, "the launcher did not say which rank this is"
    redirect_output(attempt.rank_log(rank.rank))
    RankRecord(attempt, rank.rank).write(RunState.starting)
    again = f", restart {rank.restarts}" if rank.restarts else ""
    os.write(1, f"rank {rank.rank} of {rank.world}, {where}pid {os.getpid()}{again}\n".encode())
    return rank


def run_as_rank(attempt: AttemptPaths, rank: RankInfo, entry: str) -> Stopped | None:
    """Runs the entry in a process that is a rank and nothing else. Ends the process if the entry fails."""
    ended = run_recorded(attempt, rank, entry)
    if isinstance(ended, BaseException):
        leave_failed()
    return ended


def leave_failed() -> NoReturn:
    """Ends the process of a failed rank. Runs no collective or destructor, which could wait for a rank that is gone."""
    sys.stdout.flush()
    os._exit(1)
