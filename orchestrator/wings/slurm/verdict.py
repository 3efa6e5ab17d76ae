"""Decides how a point on a cluster stands: from its result, then its ranks' records, then the scheduler's state.

[Note: silence] Clocks of different machines are not compared, because each may be set at any time. The time for which a
value has not changed is measured by one machine on its monotonic clock, and stored on disk for the next command on that
machine.
"""

from __future__ import annotations

import math
import re
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.launch.verdict import Sight, Verdict, end_of, judge, recorded
from orchestrator.records.record_file import read_or_warn, write_json_atomic
from orchestrator.records.record_shapes import HEARTBEAT, JOB, RANK, SEEN, misfit
from orchestrator.records.run_record import AttemptPaths
from orchestrator.records.run_state import RunState
from orchestrator.wings.slurm.tools import DENIED, UNSEEN, JobPhase, JobSight
from zero_runtime.process_identity import boot_id

# Wait after the first recorded error: on a shared disk, the error that caused it may become visible later.
GRACE_S = 5.0
# Allows for the difference between two machines' clocks, and for the scheduler's times being rounded to seconds.
SKEW_S = 5.0
# How long SLURM must not know the job, and rank 0 be silent, before it is lost. Heartbeats come every 10 s.
LOST_S = 120.0
# Ends that the scheduler decides: errors that ranks raise while they are killed are effects.
OUTSIDE = {
    "TIMEOUT": RunState.timeout,
    "DEADLINE": RunState.timeout,
    "CANCELLED": RunState.cancelled,
    "PREEMPTED": RunState.preempted,
    "OUT_OF_MEMORY": RunState.oom_host,
    "NODE_FAIL": RunState.error,
    "BOOT_FAIL": RunState.error,
}
MORE_MEMORY = "set cluster.memory_gib, or raise it"
# Matches the log of the node that exceeded its memory, and of the nodes that SLURM ends because of it.
MEMORY = re.compile(r"exceeded (job )?memory limit|oom[-_]kill|Out Of Memory|OutOfMemory", re.IGNORECASE)


def verdict(attempt: AttemptPaths, world: int, sight: JobSight, now: float | None = None) -> Verdict | None:
    """The verdict, or None while nothing is decided. A job that the scheduler does not know is undecided.

    now: a value of time.monotonic(); None reads the clock.
    """
    records = [read_or_warn(attempt.rank_record(rank), RANK) for rank in range(world)]
    log = Path((read_or_warn(attempt.job, JOB) or {}).get("log") or "")
    first = _first_error(records, sight)
    error_s = 0.0 if first is None else _unchanged_s(attempt.failing, first, now)
    decided = decide(records, sight, has_result=attempt.result.exists(), error_s=error_s)
    if decided is None or decided.state is not RunState.error or sight.state is not JobPhase.ended:
        return decided
    line = next(filter(None, map(_of_memory, [log, *map(attempt.rank_log, range(world))])), "")
    if line:
        return Verdict(RunState.oom_host, decided.rank, f"the node's memory was not enough: {line}; {MORE_MEMORY}")
    if all(record is None for record in records) and (lines := _end_of(log)):
        return decided._replace(message=f"{decided.message}; the job's log ends: {lines[-1]}")
    return decided


def verdict_or_lost(attempt: AttemptPaths, world: int, sight: JobSight, now: float | None = None) -> Verdict | None:
    """As `verdict`. Also lost, if for LOST_S SLURM has not known the job and no heartbeat has come.

    See [Note: silence].
    """
    decided = verdict(attempt, world, sight, now)
    if sight not in (DENIED, UNSEEN):
        attempt.denied.unlink(missing_ok=True)
    if decided is not None or sight != DENIED:
        return decided
    beat = (read_or_warn(attempt.heartbeat, HEARTBEAT) or {}).get("time")
    silent_s = _unchanged_s(attempt.denied, beat, now)
    if silent_s < LOST_S:
        return None
    silence = "never sent a heartbeat" if beat is None else f"has been silent for {silent_s / 60:.0f} min"
    return Verdict(RunState.lost, 0, f"SLURM does not know the job anymore, and rank 0 {silence}")


def _unchanged_s(kept: Path, value: object, now: float | None = None) -> float:
    """Seconds for which this machine has seen the same value. `kept`: the file that stores it. See [Note: silence]."""
    now = time.monotonic() if now is None else now
    witness = f"{socket.gethostname()} {boot_id()}"
    seen = read_or_warn(kept) or {}
    before = seen.get(witness)
    if before is None or misfit(before, SEEN) or before["value"] != value:
        write_json_atomic(kept, {**seen, witness: {"value": value, "since": now}})
        return 0.0
    return max(0.0, now - float(before["since"]))


def decide(
    records: Sequence[Mapping[str, Any] | None], sight: JobSight, *, has_result: bool, error_s: float
) -> Verdict | None:
    """The verdict, from data without files. `error_s`: seconds since the first error was seen."""
    ended = sight.state is JobPhase.ended
    ranks = [_rank(rank, record, sight) for rank, record in enumerate(records)]
    if has_result:
        done = ended or all(rank.state is RunState.ok for rank in ranks)
        return judge(ranks, has_result=True, controller_alive=False) if done else None
    if sight.state is JobPhase.pending:
        return None  # requeued or not started yet: any records are from before the requeue
    causes = [rank for rank in ranks if rank.state is RunState.error and not rank.blamed]
    if ended and not causes and sight.slurm_state in OUTSIDE:
        return _from_outside(ranks, sight)
    if any(rank.state is RunState.error for rank in ranks):
        return judge(ranks, has_result=False, controller_alive=not ended) if ended or error_s > GRACE_S else None
    if not ended:
        return None
    if all(rank.state is RunState.preempted for rank in ranks):
        return Verdict(RunState.preempted, 0, ranks[0].error)
    return _without_words(ranks, sight)


def _first_error(records: Sequence[Mapping[str, Any] | None], sight: JobSight) -> float | None:
    """When the first rank failed, by its own clock; None if no rank has failed since the job's last start."""
    ranks = [_rank(rank, record, sight) for rank, record in enumerate(records)]
    return min((rank.time for rank in ranks if rank.state is RunState.error), default=None)


def _of_memory(log: Path) -> str:
    """The line in which SLURM reports that memory was exceeded; empty if there is none."""
    return next((line for line in _end_of(log) if MEMORY.search(line) and "slurm" in line.lower()), "")


def _end_of(log: Path) -> list[str]:
    return [line.strip() for line in end_of(log) if line.strip()]


def _rank(rank: int, record: Mapping[str, Any] | None, sight: JobSight) -> Sight:
    """The state that a rank recorded since the job's last start; older records are ignored.

    Nobody observed the end of its process, so that end counts as later than all that any rank wrote.
    """
    stale = record is not None and sight.began is not None and record["time"] < sight.began - SKEW_S
    unseen = Sight(rank, alive=sight.state is not JobPhase.ended, exit_time=math.inf)
    if record is None or stale:
        return unseen
    return recorded(unseen, record, record["time"])


def _from_outside(ranks: Sequence[Sight], sight: JobSight) -> Verdict:
    state, nodes = OUTSIDE[sight.slurm_state], f" on {sight.nodes}" if sight.nodes else ""
    because = f" ({sight.reason})" if sight.reason and sight.reason.upper() != sight.slurm_state else ""
    text = {
        RunState.timeout: "SLURM ended it at its time limit",
        RunState.cancelled: "it was cancelled in SLURM",
        RunState.preempted: "SLURM took its nodes and did not requeue it",
        RunState.oom_host: f"SLURM ended it because it was out of memory{nodes}: {MORE_MEMORY}",
        RunState.error: f"a node failed{nodes}",
    }[state]
    stopped = ranks[0].error if ranks and ranks[0].state is RunState.preempted else ""
    return Verdict(state, 0, "; ".join(filter(None, [f"{text}{because}", stopped])))


def _without_words(ranks: Sequence[Sight], sight: JobSight) -> Verdict:
    """The verdict for a job that has ended without a rank recording the reason."""
    code, _, signal = sight.exit_code.partition(":")
    how = f"exit code {code}" if code not in ("", "0") else f"signal {signal}" if signal not in ("", "0") else ""
    end = f"the job ended as {sight.slurm_state}" + (f", {how}" if how else "")
    silent = [rank.rank for rank in ranks if rank.state is None]
    if silent:
        return Verdict(RunState.error, silent[0], f"{end}, and ranks {silent} never started")
    if all(rank.state is RunState.ok for rank in ranks):
        return Verdict(RunState.error, 0, "every rank ended well, yet rank 0 wrote no result")
    first = next(rank.rank for rank in ranks if rank.state is not RunState.ok)
    return Verdict(RunState.error, first, f"rank {first} ended without finishing: {end}")
