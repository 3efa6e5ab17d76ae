"""Calls SLURM's command-line tools and parses what they print about jobs. The parsers are pure functions."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from orchestrator.config.cluster import ClusterError

TIMEOUT_S = 30.0
NONE = ("", "N/A", "(null)", "None", "Unknown", "None assigned")


class JobPhase(str, Enum):
    """The scheduler's states, in groups. `unknown` is never final: the tools may not have answered."""

    pending = "pending"
    running = "running"
    ended = "ended"
    unknown = "unknown"


PHASES = {
    **dict.fromkeys(
        ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"),
        JobPhase.pending,
    ),
    **dict.fromkeys(
        ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"), JobPhase.running
    ),
    **dict.fromkeys(
        ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "DEADLINE", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY"),
        JobPhase.ended,
    ),
    "PREEMPTED": JobPhase.ended,
    "REVOKED": JobPhase.ended,
}


class JobSight(NamedTuple):
    """The scheduler's description of one job.

    reason: why it waits, or how it ended. exit_code: "code:signal" as SLURM writes it, empty while it runs. began,
    est_start: seconds since the epoch; its latest start, and the start that the scheduler expects.
    """

    state: JobPhase = JobPhase.unknown
    slurm_state: str = ""
    reason: str = ""
    exit_code: str = ""
    nodes: str = ""
    began: float | None = None
    est_start: float | None = None


UNSEEN = JobSight()  # no tool answered
DENIED = JobSight(reason="SLURM knows no such job")  # a tool answered; the job may have ended long ago, or be too new
NO_SUCH_JOB = "Invalid job id"


def ask(
    words: Sequence[str],
    environ: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
    *,
    text: str | None = None,
) -> str:
    """Runs the tool with `text` on its standard input and returns its output. ClusterError if it fails, or if it does
    not answer within `timeout_s`, as when SLURM's controller is down."""
    tool = words[0]
    try:
        done = subprocess.run(
            words, env=environ, input=text, capture_output=True, encoding="utf-8", errors="replace", timeout=timeout_s
        )
    except FileNotFoundError:
        raise ClusterError(f"{tool}: expected it on the PATH, found none; use a machine of the cluster") from None
    except OSError as error:
        raise ClusterError(f"{tool}: expected a program that starts, found: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{tool}: expected an answer within {timeout_s:g} s; try `scontrol ping`") from None
    if done.returncode != 0:
        reason = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise ClusterError(f"{' '.join(words[:2])}: {reason}")
    return done.stdout


def outside_of_jobs(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables of a SLURM job, so that a job sent from inside another is independent."""
    if "SLURM_JOB_ID" not in environ:
        return dict(environ)
    kept = ("SLURM_CONF", "SLURM_CLUSTERS")
    return {key: value for key, value in environ.items() if key in kept or not key.startswith(("SLURM", "SRUN_"))}


# ---- jobs -----------------------------------------------------------------------------------------------------------

SACCT_FIELDS = ("JobID", "State", "ExitCode", "NodeList", "Start", "Reason")
SQUEUE_FIELDS = ("JobArrayID", "State", "Reason", "exit_code", "StartTime", "NodeList")


def sacct_words(ids: Sequence[str]) -> list[str]:
    jobs = ",".join(dict.fromkeys(job.partition("_")[0] for job in ids))
    return ["sacct", "--parsable2", "--noheader", "--allocations", "--format", ",".join(SACCT_FIELDS), "--jobs", jobs]


def squeue_words(ids: Sequence[str]) -> list[str]:
    """The command line of squeue. --states=all keeps jobs for some minutes after their end."""
    jobs = ",".join(dict.fromkeys(job.partition("_")[0] for job in ids))
    columns = ",".join(f"{name}:|" for name in SQUEUE_FIELDS)
    return ["squeue", "--array", "--states=all", "--noheader", "--Format", columns, "--jobs", jobs]


def read_sacct(text: str) -> dict[str, JobSight]:
    """Parses sacct's output by job id. Waiting tasks of an array share a line."""
    sights: dict[str, JobSight] = {}
    for job, state, code, nodes, start, reason in rows_of(text, len(SACCT_FIELDS)):
        sights |= dict.fromkeys(expand_ids(job), _sight(state, reason, code, nodes, start))
    return sights


def read_squeue(text: str) -> dict[str, JobSight]:
    """Parses squeue's output by job id."""
    sights: dict[str, JobSight] = {}
    for job, state, reason, status, start, nodes in rows_of(text, len(SQUEUE_FIELDS)):
        code = f"{int(status) >> 8}:{int(status) & 0x7F}" if status.isdigit() else ""
        sights |= dict.fromkeys(expand_ids(job), _sight(state, reason, code, nodes, start))
    return sights


def rows_of(text: str, columns: int) -> Iterator[list[str]]:
    """The first cells of each line, separated by |; lines with fewer cells are messages and are left out."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) >= columns:
            yield cells[:columns]


def read_scontrol_job(text: str) -> JobSight:
    """Parses `scontrol -o show job`."""
    facts = fields_of(text)
    if "JobState" not in facts:
        return UNSEEN
    return _sight(
        facts["JobState"],
        facts.get("Reason", ""),
        facts.get("ExitCode", ""),
        facts.get("NodeList", ""),
        facts.get("StartTime", ""),
    )


def _sight(state: str, reason: str, code: str, nodes: str, start: str) -> JobSight:
    name = state.split()[0].rstrip("+") if state.split() else ""  # "CANCELLED by 1000"
    phase = PHASES.get(name, JobPhase.unknown)
    when = read_time(start)
    return JobSight(
        phase,
        name,
        "" if reason in NONE else reason,
        code if phase is JobPhase.ended else "",
        "" if nodes in NONE else nodes,
        began=when if phase is not JobPhase.pending else None,
        est_start=when if phase is JobPhase.pending else None,
    )


def expand_ids(text: str) -> list[str]:
    """The job ids in one column: "7", "7_3", "7_[2-4,9%2]". A step ("7.batch") is not a job."""
    match = re.fullmatch(r"(\d+)(?:_(?:(\d+)|\[([\d,\-]+)(?:%\d+)?\]))?", text.strip())
    if match is None:
        return []
    job, index, ranges = match.groups()
    if ranges is None:
        return [job if index is None else f"{job}_{index}"]
    ids = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        ids += [f"{job}_{number}" for number in range(int(first), int(last or first) + 1)]
    return ids


def fields_of(text: str) -> dict[str, str]:
    """Parses scontrol's one-line form. A word with "=" starts a field; other words continue the previous field."""
    fields: dict[str, str] = {}
    last = ""
    for word in text.split():
        key, sign, value = word.partition("=")
        if sign and re.fullmatch(r"[A-Za-z][\w:/.]*", key):
            fields[key] = value
            last = key
        elif last:
            fields[last] += f" {word}"
    return fields


def read_time(text: str) -> float | None:
    """Seconds since the epoch. The tools print local time of the machine that they run on."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def read_limit_min(text: str) -> float | None:
    """Minutes of "2-00:00:00", "1:00:00", "30:00" or "15"; None where there is no limit."""
    days, _, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in parts) or (days and not days.isdigit()):
        return None
    numbers = [int(part) for part in parts]
    if days:  # days-hours, days-hours:minutes, ...
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, (*numbers, 0)[:2]
    return 1440 * int(days or 0) + 60 * hours + minutes + seconds / 60


def accounting_works() -> bool:
    """Whether sacct has a database to query."""
    return _setting("AccountingStorageType") not in (None, "accounting_storage/none")


def max_array_size() -> int:
    """The largest number of tasks that an array may have on this cluster."""
    size = _setting("MaxArraySize") or ""
    return max(int(size), 1) if size.isdigit() else 1001  # SLURM's default


def _setting(name: str) -> str | None:
    """A setting of the cluster's configuration."""
    match = re.search(rf"^{name}\s*=\s*(\S+)", ask(["scontrol", "show", "config"]), re.MULTILINE)
    return match[1] if match else None


def environ_job(environ: Mapping[str, str] = os.environ) -> str:
    """The id of the SLURM job that contains this process, with the array index, as users write it."""
    if "SLURM_ARRAY_JOB_ID" in environ:
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ["SLURM_JOB_ID"]
