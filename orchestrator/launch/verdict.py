"""Decides how a run ended from what its ranks left: result.json first, then rank records, then exit codes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.launch.rank import WHERE_SIGNAL
from orchestrator.machine.hardware import match_in
from orchestrator.machine.processes import is_alive
from orchestrator.records.record_file import BadRecord, read_json, read_or_warn, warn_once
from orchestrator.records.record_shapes import EXITS, RANK
from orchestrator.records.run_record import AttemptPaths
from orchestrator.records.run_state import RunState

GRACE_S = 0.6  # wait after the first sign of failure: the rank that caused it may not have been seen yet
STRAGGLER_S = 10.0  # time that ranks have to end after the result was written
START_S = 120.0  # time in which every rank must have recorded that it started
STACK_S = 0.5  # time that ranks have to write their stacks
LOG_LINES = 15
END_BYTES = 1 << 16
VMSTAT = Path("/proc/vmstat")
_STACK = "(most recent call first):"


@dataclass(frozen=True)
class Sight:
    """The known state of one rank. `exit_code` is None while its process runs or if its end was not observed.

    time, exit_time: when it last wrote its record and when it ended, on one clock for all ranks of a run.
    """

    rank: int
    state: RunState | None = None
    time: float = 0.0
    error: str = ""
    alive: bool = True
    exit_code: int | None = None
    exit_time: float = 0.0
    blamed: tuple[int, ...] = ()  # the ranks that this rank's error names: other ranks if the error is only an effect
    outcome: RunState = RunState.error  # the state of the run if this rank's error is the root cause

    @property
    def ended(self) -> bool:
        return self.exit_code is not None or not self.alive

    @property
    def failed(self) -> bool:
        return self.state not in (RunState.ok, RunState.preempted) and (self.state is RunState.error or self.ended)

    @property
    def failure_time(self) -> float:
        if self.state is RunState.error:
            return self.time
        # Other ranks may write their errors before this death is seen. SIGKILL comes from outside and is never an
        # effect, so that a killed rank is dated earlier.
        return self.exit_time - (2.0 if self.exit_code == -signal.SIGKILL else 0.0)


def kernel_kills() -> int:
    """The number of processes that this machine's kernel has killed because it was out of memory; 0 if unknown."""
    return int(match_in(VMSTAT, r"^oom_kill (\d+)$") or 0)


class Verdict(NamedTuple):
    """How the run ended. `rank` is the rank of the root cause; `note` is a problem that did not prevent success."""

    state: RunState
    rank: int = 0
    message: str = ""
    note: str = ""


def judge(sights: Sequence[Sight], *, has_result: bool, controller_alive: bool) -> Verdict | None:
    """The verdict, or None while the outcome is not decided."""
    failures = [sight for sight in sights if sight.failed]
    over = not controller_alive or all(sight.ended for sight in sights)
    # The file appears only when it is complete, so what fails afterwards takes nothing from the measurement.
    if has_result:
        note = f"after the result was written: {describe(failures[0])}" if failures else ""
        return Verdict(RunState.ok, note=note) if over or failures else None
    if all(sight.state is RunState.preempted for sight in sights):
        return Verdict(RunState.preempted, 0, sights[0].error) if over else None
    # The ranks die with their parent: no failure is a rank's own.
    if not controller_alive and failures and all(_ended_unseen(sight) for sight in failures):
        return Verdict(
            RunState.lost, 0, "the process that starts and holds the ranks was killed, and they ended with it"
        )
    if failures:
        # The first to fail is the cause; the others then find its connections closed. A rank that the others have named
        # outweighs that order: it may hang, and fail last or never.
        root = min(failures, key=lambda sight: sight.failure_time)
        accuser = next((sight for sight in failures if sight.blamed), None)
        if accuser is not None:
            return _accused(sights[accuser.blamed[0]], accuser)
        return Verdict(root.outcome, root.rank, describe(root))
    if not controller_alive:
        return Verdict(RunState.lost, 0, "the process that starts and holds the ranks ended before them")
    if over:
        return Verdict(RunState.error, 0, "every rank ended well, yet rank 0 wrote no result")
    return None


def _accused(culprit: Sight, accuser: Sight) -> Verdict:
    """Blames one rank: the ranks compared their state (zero_runtime.watch.watch), so other errors are effects."""
    message = accuser.error.splitlines()[0].partition(": ")[2]
    if culprit.failed and culprit.state is RunState.error and not culprit.blamed:
        return Verdict(culprit.outcome, culprit.rank, describe(culprit))
    # gloo aborts ranks that receive more than they expect: an effect of the ranks' difference, not a cause.
    if culprit.failed and _by_signal(culprit) and culprit.exit_code != -signal.SIGABRT:
        return Verdict(culprit.outcome, culprit.rank, f"{describe(culprit)}; {message}")
    return Verdict(accuser.outcome, culprit.rank, message)


def _ended_unseen(sight: Sight) -> bool:
    """True if the rank recorded no error and its exit was not observed."""
    return sight.state is not RunState.error and sight.exit_code is None and not sight.alive


def describe(sight: Sight) -> str:
    """Describes in one sentence how a rank failed."""
    if sight.state is RunState.error:
        named = sight.error.startswith(f"rank {sight.rank}: ")
        return sight.error if named else f"rank {sight.rank}: {sight.error}"
    if _by_signal(sight):
        name = signal.Signals(-(sight.exit_code or 0)).name
        return f"rank {sight.rank} was killed by {name}"
    code = "unknown" if sight.exit_code is None else sight.exit_code
    return f"rank {sight.rank} ended without finishing (exit code {code})"


def _by_signal(sight: Sight) -> bool:
    return sight.exit_code is not None and sight.exit_code < 0


class Watch:
    """Polls one attempt until its outcome is decided."""

    def __init__(
        self,
        attempt: AttemptPaths,
        world: int,
        limit_s: float,
        controller_alive: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._attempt, self._world, self._limit_s = attempt, world, limit_s
        self._controller_alive, self._clock = controller_alive, clock
        self._begun = self._looked = clock()
        self._waited_s = 0.0
        self._kills = kernel_kills()
        self._failing_since: float | None = None
        self._result_since: float | None = None
        self.sights: list[Sight] = []

    def look(self, *, waits: bool = False) -> Verdict | None:
        """The verdict, or None while the run continues. Never blocks.

        waits: since the last look, the ranks have waited for their turn, which the time limit leaves out.
        """
        alive = (
            self._controller_alive()
        )  # read before the files: its ranks end a moment after it, and may write until then
        now = self._clock()
        self._waited_s += now - self._looked if waits else 0.0
        self._looked = now
        self.sights = look_at_ranks(self._attempt, self._world)
        has_result = self._attempt.result.exists()
        verdict = judge(self.sights, has_result=has_result, controller_alive=alive)
        if verdict is not None and verdict.state is not RunState.ok:
            self._failing_since = now if self._failing_since is None else self._failing_since
            return self._with_kernel(verdict) if not alive or now - self._failing_since >= GRACE_S else None
        # A rank may end between the reads of its record and of the process table; the next look sees its final state.
        self._failing_since = None
        return verdict or self._too_late(now, has_result)

    def _with_kernel(self, verdict: Verdict) -> Verdict:
        """Reports out of memory if a rank got SIGKILL and the kernel has killed processes for memory during the run."""
        by_kill = self.sights[verdict.rank].exit_code == -signal.SIGKILL
        if not by_kill or verdict.state is not RunState.error or kernel_kills() == self._kills:
            return verdict
        return verdict._replace(
            state=RunState.oom_host, message=f"{verdict.message}: the machine's memory was used up (see `dmesg`)"
        )

    @property
    def all_running(self) -> bool:
        return bool(self.sights) and all(sight.state is not None for sight in self.sights)

    def _too_late(self, now: float, has_result: bool) -> Verdict | None:
        if has_result:
            self._result_since = now if self._result_since is None else self._result_since
            if now - self._result_since < STRAGGLER_S:
                return None
            busy = [sight.rank for sight in self.sights if not sight.ended]
            return Verdict(RunState.ok, note=f"ranks {busy} were still busy {STRAGGLER_S:g} s after the result")
        elapsed = now - self._begun - self._waited_s
        if elapsed > self._limit_s:
            message = f"not done after resources.time_limit_min={self._limit_s / 60:g}"
            return Verdict(RunState.timeout, 0, message)
        missing = [sight.rank for sight in self.sights if sight.state is None]
        if missing and elapsed > START_S:
            return Verdict(RunState.error, missing[0], f"ranks {missing} did not start within {START_S:g} s")
        return None


def success(result: Mapping[str, Any]) -> RunState:
    """ok, or tight: the run fits, but the allocator had to free memory and retry, which is slow."""
    return RunState.tight if result["memory"].get("alloc_retries") else RunState.ok


def look_at_ranks(attempt: AttemptPaths, world: int) -> list[Sight]:
    """The state of each rank, from its files and the process table."""
    exits = read_or_warn(attempt.exits, EXITS) or {}
    return [_look_at(attempt, rank, exits.get(str(rank))) for rank in range(world)]


def _look_at(attempt: AttemptPaths, rank: int, ended: dict[str, Any] | None) -> Sight:
    """An unreadable record shows only that the rank started; its exit code or its next record gives the rest."""
    try:
        return _sight(rank, read_json(attempt.rank_record(rank), RANK), ended)
    except (BadRecord, OSError) as error:
        warn_once(str(error))
        return replace(_sight(rank, None, ended), state=RunState.running)


def _sight(rank: int, record: dict[str, Any] | None, ended: dict[str, Any] | None) -> Sight:
    code, when = (None, time.monotonic()) if ended is None else (int(ended["code"]), ended.get("monotonic", 0.0))
    if record is None:
        return Sight(rank, exit_code=code, exit_time=when)
    alive = ended is None and is_alive(record["pid"], record["started"])
    return recorded(Sight(rank, alive=alive, exit_code=code, exit_time=when), record, record.get("monotonic", 0.0))


def recorded(sight: Sight, record: Mapping[str, Any], when: float) -> Sight:
    """The sight with the state that the rank recorded at the time `when`."""
    return replace(
        sight,
        state=RunState(record["state"]),
        time=when,
        error=str(record.get("error", record.get("message", ""))),
        blamed=tuple(record.get("blamed", ())),
        outcome=RunState(record.get("outcome", RunState.error.value)),
    )


def ask_where(attempt: AttemptPaths, world: int) -> int | None:
    """Makes every rank write its stack to its log. Returns the rank that the others wait for; None if unclear."""
    for rank in range(world):
        record = read_or_warn(attempt.rank_record(rank), RANK)
        # The signal's handler is installed only in state `running`; before that the signal would kill the rank.
        if record and record["state"] == RunState.running.value and is_alive(record["pid"], record["started"]):
            os.kill(record["pid"], WHERE_SIGNAL)
    time.sleep(STACK_S)
    busy = [rank for rank in range(world) if not _is_waiting(attempt.rank_log(rank))]
    return busy[0] if len(busy) == 1 and world > 1 else None


def _is_waiting(log: Path) -> bool:
    stack = "\n".join(excerpt(log))
    return _STACK in stack and "distributed" in stack


def last_words(attempt: AttemptPaths, rank: int) -> tuple[list[str], Path]:
    """The end of a rank's log, or of its traceback if its output went elsewhere, and the file that it is from."""
    log, record = attempt.rank_log(rank), attempt.rank_record(rank)
    if log.is_file():
        return excerpt(log), log
    return str((read_or_warn(record, RANK) or {}).get("traceback", "")).splitlines()[-LOG_LINES:], record


def is_explained(attempt: AttemptPaths, rank: int) -> bool:
    """Whether the message of a failed rank says what to do, so that its traceback adds nothing on a screen."""
    return bool((read_or_warn(attempt.rank_record(rank), RANK) or {}).get("explained"))


def excerpt(log: Path) -> list[str]:
    """The last lines of a log; if the log ends with a dumped stack, the innermost calls of that stack."""
    end = end_of(log)
    stacks = [index for index, line in enumerate(end) if line.endswith(_STACK)]
    after = end[stacks[-1] :] if stacks else []
    if after and all(line.startswith("  File ") or line.endswith(_STACK) for line in after):
        return after[:LOG_LINES]
    return end[-LOG_LINES:]


def end_of(log: Path) -> list[str]:
    """The lines in the last END_BYTES of a log; empty if it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - END_BYTES))
            return file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []
