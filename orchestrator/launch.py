"""Sends points out through submitit: their ranks as one session of processes of this machine, or as jobs of SLURM.

It is also the program of those processes: `controller FOLDER`, `rank ATTEMPT ENTRY` and `slurm-rank FOLDER ENTRY`.
What travels to a rank is two strings, on its command line or as JSON: no pickle, which would be code for whoever may
write where it lies.
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
from typing import Any

import submitit
from submitit.core.utils import JobPaths
from submitit.local.local import Controller

from orchestrator import slurm_rank, start
from orchestrator.job import STOP_SIGNAL, RankRecord, run_as_rank
from orchestrator.processes import die_with_parent, end_session, redirect_output
from orchestrator.record import AttemptPaths
from orchestrator.record_file import read_json, write_json_atomic
from orchestrator.run_state import RunState
from orchestrator.schema import Device, RunConfig
from orchestrator.slurm_tools import ask, outside_of_jobs

PARENT = "ZLAB_PARENT_PID"
TUNABLES, TUNABLES_OF_RANKS = "GLIBC_TUNABLES", "ZLAB_GLIBC_TUNABLES"
GLIBC = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=8589934592"
# Beyond the run's own limit, which the command watches: the controller's is for when that fails.
BACKSTOP_MIN = 2.0
CALL_S = 60.0


def job_environment(config: RunConfig, base: Mapping[str, str], gpus: Sequence[str] | None = None) -> dict[str, str]:
    """What a careful person sets by hand for such a job. What the user set stays, but for the thread counts.

    `gpus`: those of the user's that this job has, as entries of CUDA_VISIBLE_DEVICES.
    """
    given = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    return {**base, **job_settings(config, base), **given}


def job_settings(config: RunConfig, base: Mapping[str, str]) -> dict[str, str]:
    """The part of the job's environment that we decide."""
    on_cuda = config.resources.device is Device.cuda
    threads = str(config.resources.threads)
    wanted = {
        "TOKENIZERS_PARALLELISM": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONFAULTHANDLER": "1",
        # The allocator reads it when the process starts: freed blocks stay, and the next gather takes no page faults.
        TUNABLES: GLIBC,
    }
    if config.resources.nodes == 1:
        # All ranks are on one machine; without it gloo resolves the host name, which may lead nowhere.
        wanted["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    if on_cuda and "PYTORCH_CUDA_ALLOC_CONF" not in base:
        wanted["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    fixed = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, start.PYTHONPATH: start.named(base)}
    if not on_cuda:
        fixed["CUDA_VISIBLE_DEVICES"] = ""
    return {key: value for key, value in wanted.items() if key not in base} | fixed


class _SessionExecutor(submitit.LocalExecutor):
    """submitit's local executor with a controller that leads its own session and dies with the command.

    It leaves CUDA_VISIBLE_DEVICES as it is: the plain executor replaces it, and cannot write GPUs by UUID.
    """

    def __init__(self, attempt: AttemptPaths, entry: str, environment: Mapping[str, str]) -> None:
        super().__init__(attempt.submitit)
        self._attempt, self._entry = attempt, entry
        self._environment = dict(environment)
        self.controller: subprocess.Popen[bytes] | None = None

    @property
    def _submitit_command_str(self) -> str:
        words = ["rank", str(self._attempt.root), self._entry]
        return shlex.join(start.words("orchestrator.launch", *words, flags=("-u",)))

    def start(self) -> subprocess.Popen[bytes]:
        """The controller of the ranks, in place of `submit`, which pickles a call."""
        self._submit_command(self._submitit_command_str)
        assert self.controller is not None
        return self.controller

    def _submit_command(self, command: str) -> submitit.LocalJob[Any]:
        ranks: int = self.parameters["tasks_per_node"]
        told = {
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_NTASKS": str(ranks),
            "SUBMITIT_LOCAL_TIMEOUT_S": str(int(60 * self.parameters["timeout_min"])),
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "0",
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_STDERR_TO_STDOUT": "1",
            "SUBMITIT_LOCAL_WITH_SHELL": "",
            PARENT: str(os.getpid()),
            TUNABLES_OF_RANKS: self._environment[TUNABLES],
        }
        # Up to 2.38 glibc cuts its variable at the first colon in the process that reads it, and a child of that
        # process would inherit the rest: the controller must not read it (see _controller_main).
        environment = {key: value for key, value in self._environment.items() if key != TUNABLES}
        with self._attempt.controller_log.open("ab") as log:
            self.controller = subprocess.Popen(
                start.words("orchestrator.launch", "controller", str(self.folder)),
                env={**environment, **told},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        identifier = str(self.controller.pid)
        return submitit.LocalJob(self.folder, identifier, tasks=list(range(ranks)), process=self.controller)


class Job:
    """A submitted point: the controller and the ranks, which are one session."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.session = process.pid

    def controller_alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        """Returns when no process of the job is left. Ending twice is no error."""
        end_session(self.session)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)


def submit(attempt: AttemptPaths, config: RunConfig, entry: str, gpus: Sequence[str] | None = None) -> Job:
    """Starts the ranks; call it from the main thread (see processes.die_with_parent). Never blocks on them."""
    attempt.submitit.mkdir(exist_ok=True)
    executor = _SessionExecutor(attempt, entry, job_environment(config, os.environ, gpus))
    limit_min = config.resources.time_limit_min + BACKSTOP_MIN
    executor.update_parameters(tasks_per_node=config.resources.ranks, timeout_min=limit_min)
    return Job(executor.start())


class _Watcher(Controller):
    """submitit's controller, which tells at once how each rank's process ended."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._exits = AttemptPaths(folder.parent).exits

    def wait(self, freq: int = 20) -> Sequence[int | None]:
        """Until all ranks ended or the time is over. Sends no signal: submitit's would requeue a slow rank 0."""
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
    place = submitit.JobEnvironment()
    _say_place(place)
    attempt = AttemptPaths(Path(attempt_dir))
    redirect_output(attempt.rank_log(place.global_rank))
    RankRecord(attempt, place.global_rank).write(RunState.starting)
    os.write(1, f"rank {place.global_rank} of {place.num_tasks}, pid {os.getpid()}\n".encode())
    run_as_rank(attempt, entry)


class BatchExecutor(submitit.SlurmExecutor):
    """submitit's SLURM executor, for calls that know by themselves where their ranks' output and records go.

    It differs from the plain one in what the ranks' processes are started with, in that nothing but their owner may
    read what it writes, and in that no call of SLURM's waits for ever.
    """

    def __init__(self, folder: Path, entry: str, settings: Mapping[str, str]) -> None:
        super().__init__(folder)
        self._entry, self._settings = entry, dict(settings)

    @property
    def _submitit_command_str(self) -> str:
        # A signal that comes before Python has its own handler must not kill a rank that is still importing.
        ignoring = f'trap "" {STOP_SIGNAL.name.removeprefix("SIG")}; exec "$@"'
        # `env` sets them last: glibc cuts GLIBC_TUNABLES short in each process that reads it (see _SessionExecutor),
        # and srun is one.
        settings = [f"{key}={value}" for key, value in sorted(self._settings.items())]
        program = start.words("orchestrator.launch", "slurm-rank", str(self.folder), self._entry, flags=("-u",))
        return shlex.join(["sh", "-c", ignoring, "rank", "env", *settings, *program])

    def send(self, attempts: Sequence[AttemptPaths]) -> list[str]:
        """One job, or one array of them; their ids in order. Asks for an umask that leaves files to their owner."""
        self.folder.mkdir(parents=True, exist_ok=True)
        many = len(attempts) > 1
        if many:
            self.parameters["map_count"] = len(attempts)
        script = self._make_submission_file_text(self._submitit_command_str, "")
        # By its standard input: between a file's writing and its reading somebody else could have put another there.
        job = ask(["sbatch", "--parsable"], outside_of_jobs(os.environ), text=script).split(";")[0].strip()
        ids = [f"{job}_{index}" for index in range(len(attempts))] if many else [job]
        for one, attempt in zip(ids, attempts, strict=True):
            write_json_atomic(_call_path(self.folder, one), {"attempt": str(attempt.root)})
        self.script(ids[0]).write_text(script, encoding="utf-8")
        return ids

    def script(self, job: str) -> Path:
        return JobPaths(self.folder, job).submission_file

    def log(self, job: str) -> Path:
        """What SLURM and the setup lines say of a job."""
        return JobPaths(self.folder, job).stdout


def _call_path(folder: Path, job: str) -> Path:
    """Which attempt a job is."""
    return folder / f"{job}_submitted.json"


def _slurm_rank_main(folder: str, entry: str) -> None:
    place = submitit.JobEnvironment()
    path = _call_path(Path(folder), place.job_id)
    deadline = time.monotonic() + CALL_S
    while (call := read_json(path)) is None:  # the job may start before its submission has written it
        if time.monotonic() > deadline:
            raise RuntimeError(f"{path}: expected the call of this job within {CALL_S:g} s; is it on a shared drive?")
        time.sleep(0.2)
    slurm_rank.say_place(os.environ, place.hostnames)
    slurm_rank.run_in_job(AttemptPaths(Path(call["attempt"])), entry)


def _say_place(place: submitit.JobEnvironment) -> None:
    """The names that torch and everything around it read."""
    os.environ["RANK"] = str(place.global_rank)
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(place.num_tasks)
    os.environ["LOCAL_RANK"] = str(place.local_rank)


if __name__ == "__main__":
    if sys.argv[1] == "controller":
        _controller_main(sys.argv[2])
    elif sys.argv[1] == "slurm-rank":
        _slurm_rank_main(sys.argv[2], sys.argv[3])
    else:
        _rank_main(sys.argv[2], sys.argv[3])
