"""Points as SLURM jobs: submits them in arrays, queries them in one call, cancels them. Never waits for a job."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from orchestrator.config.cluster import ClusterError
from orchestrator.config.schema import Device, RunConfig, to_dict
from orchestrator.launch.environment import job_settings
from orchestrator.launch.rank import ENTRY, STOP_SIGNAL
from orchestrator.records.ownership import for_the_owner_alone
from orchestrator.records.record_file import write_json_atomic
from orchestrator.records.run_record import AttemptPaths
from orchestrator.wings.slurm import tools as slurm_tools
from orchestrator.wings.slurm.executor import BatchExecutor
from orchestrator.wings.slurm.tools import (
    DENIED,
    NO_SUCH_JOB,
    UNSEEN,
    JobPhase,
    JobSight,
    ask,
)

Sent = tuple[AttemptPaths, RunConfig]
AT_ONCE = 500  # job ids on one command line
ALL = 1 << 20  # no throttle: without a value, submitit takes 256


# ---- sending --------------------------------------------------------------------------------------------------------


def submit(jobs: Sequence[Sent], folder: Path, *, name: str = "zlab", entry: str = ENTRY) -> list[str]:
    """Sends each attempt as a job without waiting for it. Returns the job ids in order.

    Attempts of one shape form one array, split according to the site's MaxArraySize; cluster.throttle applies to all
    arrays together. Scripts, calls in JSON and SLURM's logs are stored in `folder`, which only its owner can read and
    which the nodes must see; each attempt's job.json names its files. If SLURM refuses a job, all are cancelled and
    ClusterError gives the reason.
    """
    ids: dict[int, str] = {}
    waves = Waves()
    with for_the_owner_alone():
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        try:
            for part in _arrays(jobs, slurm_tools.max_array_size()):
                members = [jobs[index] for index in part]
                after = waves.before(len(part), members[0][1].cluster.throttle)
                sent = _send(members, folder, name, entry, after)
                waves.sent(sent[0].partition("_")[0])
                ids |= zip(part, sent, strict=True)
        except ClusterError:
            with suppress(ClusterError):
                cancel(list(ids.values()))
            raise
    return [ids[index] for index in range(len(jobs))]


def _arrays(jobs: Sequence[Sent], largest: int) -> list[list[int]]:
    """The indices of the attempts in each array, in the order of sending. Throttled arrays wait for each other, so
    those that ask for the most node time, and wait longest for nodes, come last."""
    shapes: dict[str, list[int]] = {}
    for index, (_, config) in enumerate(jobs):
        shapes.setdefault(shape_of(config), []).append(index)
    parts = [
        members[start : start + largest] for members in shapes.values() for start in range(0, len(members), largest)
    ]

    def asks_for(part: list[int]) -> float:
        config = jobs[part[0]][1]
        return config.resources.nodes * config.resources.time_limit_min if config.cluster.throttle else 0.0

    return sorted(parts, key=asks_for)


class Waves:
    """Applies a throttle to several arrays; SLURM's throttle applies to one array only. Arrays that together fill the
    throttle form a wave, and each wave waits until the previous one has ended, successfully or not.

    Some places stay empty at the end of a wave, but the dependencies (afterany) keep the limit strictly and need no
    process. A process that submits jobs as places become free would have to live for days on a login node; licences and
    QOS limits are the site's to set; and with more arrays than places, no share of the throttle fits each array."""

    def __init__(self) -> None:
        self._before: list[str] = []
        self._wave: list[str] = []
        self._together = 0  # points of this wave that may run at the same time
        self._throttled = False

    def before(self, points: int, throttle: int | None) -> list[str]:
        """The jobs that an array of this many points must wait for."""
        self._throttled = throttle is not None
        if throttle is None:
            return []
        wanted = min(points, throttle)
        if self._wave and self._together + wanted > throttle:
            self._before, self._wave, self._together = self._wave, [], 0
        self._together += wanted
        return self._before

    def sent(self, job: str) -> None:
        """Reports the job id of the array of the last `before` call."""
        if self._throttled:
            self._wave.append(job)


def shape_of(config: RunConfig) -> str:
    """All settings passed to sbatch as one string: attempts with the same string can share an array."""
    resources = config.resources
    settings = (resources.device, resources.ranks, resources.nodes, resources.threads, resources.time_limit_min)
    return json.dumps([*map(str, settings), to_dict(config)["cluster"]], sort_keys=True)


def _send(jobs: Sequence[Sent], folder: Path, name: str, entry: str, after: Sequence[str]) -> list[str]:
    config = jobs[0][1]
    executor = BatchExecutor(folder, entry, job_settings(config, os.environ))
    executor.update_parameters(**parameters(config, name, after))
    ids = executor.send([attempt for attempt, _ in jobs])
    for (attempt, _), job in zip(jobs, ids, strict=True):
        facts = {"job": job, "script": str(executor.script(job)), "log": str(executor.log(job)), "time": time.time()}
        write_json_atomic(attempt.job, facts)
    return ids


def parameters(config: RunConfig, name: str, after: Sequence[str] = ()) -> dict[str, Any]:
    """The configuration as parameters of submitit's executor. `after`: jobs that must have ended before it starts."""
    resources, cluster = config.resources, config.cluster
    per_node = resources.ranks // resources.nodes
    cpus = cluster.cpus_per_rank or resources.threads
    wanted = {
        "job_name": name,
        "nodes": resources.nodes,
        "ntasks_per_node": per_node,
        "cpus_per_task": cpus,
        "gpus_per_node": per_node if resources.device is Device.cuda else None,
        "time": math.ceil(resources.time_limit_min),
        "mem": None if cluster.memory_gib is None else f"{math.ceil(1024 * cluster.memory_gib)}M",
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "exclude": cluster.exclude,
        "exclusive": cluster.exclusive or None,
        "setup": cluster.setup or None,
        "array_parallelism": cluster.throttle or ALL,
        "stderr_to_stdout": True,
        # If one rank fails, all end; otherwise they would wait for it until the time limit. srun does not inherit the
        # cores per task from sbatch.
        "srun_args": ["--kill-on-bad-exit=1", f"--cpus-per-task={cpus}"],
    }
    signal = f"{STOP_SIGNAL.name.removeprefix('SIG')}@{cluster.signal_delay_s}"
    additional = {"requeue": True, "signal": signal, **cluster.additional}
    if after:
        own = [str(cluster.additional["dependency"])] if "dependency" in cluster.additional else []
        additional["dependency"] = ",".join([*own, f"afterany:{':'.join(after)}"])
    kept = {key: value for key, value in wanted.items() if value is not None}
    return {**kept, "wckey": None, "additional_parameters": additional}


# ---- looking --------------------------------------------------------------------------------------------------------


class SlurmQueue:
    """Queries SLURM for jobs with as few calls as possible. Checks once whether sacct works."""

    def __init__(self) -> None:
        self._accounting: bool | None = None

    def look(self, ids: Sequence[str]) -> dict[str, JobSight]:
        """The state of each job. UNSEEN: no tool answered. DENIED: SLURM does not know the job. Neither is final."""
        kept: dict[str, JobSight] = {}
        if ids and self._has_accounting():
            kept = _states_from(slurm_tools.sacct_words(ids), slurm_tools.read_sacct) or {}
        # sacct lags by seconds: for jobs that have not ended there, the controller has newer information.
        left = [job for job in ids if job not in kept or not _has_ended_for_good(kept[job])]
        now = _from_controller(left) if left else {}
        seen = {job: sight for job, sight in now.items() if sight not in (UNSEEN, DENIED)}
        # The controller's answers come first, then those of sacct, then UNSEEN and DENIED.
        best = {**now, **kept, **seen}
        return {job: best.get(job, UNSEEN) for job in ids}

    def _has_accounting(self) -> bool:
        if self._accounting is None:
            with suppress(ClusterError):
                self._accounting = slurm_tools.accounting_works()
        return bool(self._accounting)


def _from_controller(ids: Sequence[str]) -> dict[str, JobSight]:
    """The states from squeue, which knows jobs for some minutes after their end."""
    queue = _states_from(slurm_tools.squeue_words(ids), slurm_tools.read_squeue)
    return {job: UNSEEN if queue is None else queue.get(job, DENIED) for job in ids}


def _states_from(words: Sequence[str], read: Callable[[str], dict[str, JobSight]]) -> dict[str, JobSight] | None:
    """The states that a tool prints; None if it did not answer, empty if it knows none of the jobs."""
    try:
        return read(ask(words))
    except ClusterError as error:
        return {} if NO_SUCH_JOB in str(error) else None


def _has_ended_for_good(sight: JobSight) -> bool:
    """False for a job that was preempted or whose node failed: it may be back in the queue."""
    return sight.state is JobPhase.ended and sight.slurm_state not in ("PREEMPTED", "NODE_FAIL", "BOOT_FAIL")


def cancel(ids: Sequence[str]) -> None:
    """Asks SLURM to end the jobs, running or waiting, and does not wait for it. Ended jobs are ignored."""
    for start in range(0, len(ids), AT_ONCE):
        ask(["scancel", "--quiet", *ids[start : start + AT_ONCE]])
