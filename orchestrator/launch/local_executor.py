"""Starts the ranks of a point on this machine through submitit, as one session of processes.

This file is also the program of those processes: `controller FOLDER` and `rank ATTEMPT ENTRY`. A rank receives two
strings on its command line and no pickle: anyone who can write to a pickle's folder could run code through it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import submitit
from submitit.local.local import Controller

from orchestrator.config.schema import RunConfig
from orchestrator.launch.environment import TUNABLES, job_environment
from orchestrator.launch.rank import begin_rank, place, run_as_rank
from orchestrator.machine import children
from orchestrator.machine.processes import die_with_parent, end_session
from orchestrator.records.record_file import write_json_atomic
from orchestrator.records.run_record import AttemptPaths

PARENT = "ZLAB_PARENT_PID"
TUNABLES_OF_RANKS = "ZLAB_GLIBC_TUNABLES"
# Extra time after the run's own limit, which the command enforces: the controller's limit applies if that fails.
BACKSTOP_MIN = 2.0


class _SessionExecutor(submitit.LocalExecutor):
    """submitit's local executor with a controller that leads its own session and dies with the command.

    It leaves CUDA_VISIBLE_DEVICES unchanged: the base class replaces it and cannot handle GPU UUIDs.
    """

    def __init__(self, attempt: AttemptPaths, entry: str, environment: Mapping[str, str], config: RunConfig) -> None:
        super().__init__(attempt.submitit)
        self._attempt, self._entry, self._config = attempt, entry, config
        self._environment = dict(environment)

    def command(self) -> str:
        """What the controller starts for each rank."""
        words = ["rank", str(self._attempt.root), self._entry]
        where = {"code": self._config.resources.code, "python": self._config.engine.python}
        return shlex.join(children.words("orchestrator.launch.local_executor", *words, flags=("-u",), **where))

    def start(self) -> subprocess.Popen[bytes]:
        """Starts the controller of the ranks. Replaces `submit`, which pickles a call."""
        settings = {
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_COMMAND": self.command(),
            "SUBMITIT_LOCAL_NTASKS": str(self.parameters["tasks_per_node"]),
            "SUBMITIT_LOCAL_TIMEOUT_S": str(int(60 * self.parameters["timeout_min"])),
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "0",
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_STDERR_TO_STDOUT": "1",
            "SUBMITIT_LOCAL_WITH_SHELL": "",
            PARENT: str(os.getpid()),
            TUNABLES_OF_RANKS: self._environment[TUNABLES],
        }
        # glibc up to 2.38 truncates this variable at the first colon in the process that reads it, and a child of that
        # process would inherit the truncated value. The controller must therefore not read it (see _controller_main).
        environment = {key: value for key, value in self._environment.items() if key != TUNABLES}
        words = children.words("orchestrator.launch.local_executor", "controller", str(self.folder))
        return children.start(words, {**environment, **settings}, self._attempt.controller_log)


class Job:
    """A submitted point: its controller and ranks, which form one session."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.session = process.pid

    def controller_alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        """Returns when no process of the job is left. May be called more than once."""
        end_session(self.session)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)


def submit(
    attempt: AttemptPaths, config: RunConfig, entry: str, gpus: Sequence[str] | None = None, points: int = 1
) -> Job:
    """Starts the ranks without waiting for them. Call it from the main thread (see processes.die_with_parent).

    points: how many take turns, so that a run may have to wait for that many.
    """
    attempt.submitit.mkdir(exist_ok=True)
    executor = _SessionExecutor(attempt, entry, job_environment(config, os.environ, gpus), config)
    limit_min = points * config.resources.time_limit_min + BACKSTOP_MIN
    executor.update_parameters(tasks_per_node=config.resources.ranks, timeout_min=limit_min)
    return Job(executor.start())


class _Watcher(Controller):
    """submitit's controller, which also records immediately how each rank's process ended."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._exits = AttemptPaths(folder.parent).exits

    def wait(self, freq: int = 20) -> Sequence[int | None]:
        """Waits until all ranks ended or the time is up. Sends no signal: submitit's would requeue a slow rank 0."""
        deadline = time.monotonic() + self.timeout_s
        exits: dict[str, dict[str, float]] = {}
        while len(exits) < len(self.tasks) and time.monotonic() < deadline:
            for rank, task in enumerate(self.tasks):
                code = task.poll()
                if code is not None and str(rank) not in exits:
                    exits[str(rank)] = {"code": code, "time": time.time(), "monotonic": time.monotonic()}
                    write_json_atomic(self._exits, exits)
            time.sleep(1 / freq)
        return [task.poll() for task in self.tasks]


def _controller_main(folder: str) -> None:
    die_with_parent(int(os.environ[PARENT]))
    os.environ[TUNABLES] = os.environ.pop(TUNABLES_OF_RANKS)
    _Watcher(Path(folder)).run(max_retry=1)


def _rank_main(attempt_dir: str, entry: str) -> None:
    die_with_parent(int(os.environ["SUBMITIT_LOCAL_JOB_ID"]))
    environment = submitit.JobEnvironment()
    world = environment.num_tasks
    os.environ.update(place(environment.global_rank, world, environment.local_rank, local_world=world))
    attempt = AttemptPaths(Path(attempt_dir))
    run_as_rank(attempt, begin_rank(attempt, attempt.rendezvous.absolute()), entry)


if __name__ == "__main__":
    if sys.argv[1] == "controller":
        _controller_main(sys.argv[2])
    else:
        _rank_main(sys.argv[2], sys.argv[3])
