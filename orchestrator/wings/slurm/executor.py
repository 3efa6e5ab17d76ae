"""submitit's SLURM executor for our ranks, and the program of each rank:
`python -m orchestrator.wings.slurm.executor FOLDER ENTRY`.

A rank gets the entry on its command line and the folder of its attempt as JSON. No pickle is used: anyone who can write
to a pickle's folder could run code through it.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import submitit
from submitit.core.utils import JobPaths

from orchestrator.launch.rank import STOP_SIGNAL
from orchestrator.machine import children
from orchestrator.records.record_file import read_json, write_json_atomic
from orchestrator.records.run_record import AttemptPaths
from orchestrator.wings.slurm import rank as slurm_rank
from orchestrator.wings.slurm.tools import ask, outside_of_jobs

CALL_S = 60.0


class BatchExecutor(submitit.SlurmExecutor):
    """submitit's SLURM executor, for ranks that choose the files of their output and records themselves.

    It differs from the base class in three ways: the command that starts the ranks, files that only their owner can
    read, and a time limit on every SLURM call. Of the base class it uses little more than the script: submitit's job
    watcher needs sacct, and its job arrays are sent by an executor of the base class.
    """

    def __init__(self, folder: Path, entry: str, settings: Mapping[str, str]) -> None:
        super().__init__(folder)
        self._entry, self._settings = entry, dict(settings)

    def _command(self) -> str:
        # A signal that arrives before Python installs its handler must not kill a rank that is still importing.
        ignoring = f'trap "" {STOP_SIGNAL.name.removeprefix("SIG")}; exec "$@"'
        # `env` sets these variables last: glibc truncates GLIBC_TUNABLES in each process that reads it, srun included
        # (see local_executor.py).
        settings = [f"{key}={value}" for key, value in sorted(self._settings.items())]
        program = children.words("orchestrator.wings.slurm.executor", str(self.folder), self._entry, flags=("-u",))
        return shlex.join(["sh", "-c", ignoring, "rank", "env", *settings, *program])

    def send(self, attempts: Sequence[AttemptPaths]) -> list[str]:
        """Sends one job, or one array of jobs. Returns their ids in order. The umask must deny access to others."""
        self.folder.mkdir(parents=True, exist_ok=True)
        many = len(attempts) > 1
        if many:
            self.parameters["map_count"] = len(attempts)
        script = self._make_submission_file_text(self._command(), "")
        # Sent on standard input: another user could replace a file between our write and sbatch's read.
        job = ask(["sbatch", "--parsable"], outside_of_jobs(os.environ), text=script).split(";")[0].strip()
        ids = [f"{job}_{index}" for index in range(len(attempts))] if many else [job]
        for job_id, attempt in zip(ids, attempts, strict=True):
            write_json_atomic(_call_path(self.folder, job_id), {"attempt": str(attempt.root)})
        self.script(ids[0]).write_text(script, encoding="utf-8")
        return ids

    def script(self, job: str) -> Path:
        return JobPaths(self.folder, job).submission_file

    def log(self, job: str) -> Path:
        """The file with the output of SLURM and the setup lines for a job."""
        return JobPaths(self.folder, job).stdout


def _call_path(folder: Path, job: str) -> Path:
    """The file that says which attempt a job runs."""
    return folder / f"{job}_submitted.json"


def main(folder: str, entry: str) -> None:
    environment = submitit.JobEnvironment()
    path = _call_path(Path(folder), environment.job_id)
    deadline = time.monotonic() + CALL_S
    while (call := read_json(path)) is None:  # the job may start before its submission has written the file
        if time.monotonic() > deadline:
            raise RuntimeError(f"{path}: expected the call of this job within {CALL_S:g} s; is it on a shared drive?")
        time.sleep(0.2)
    slurm_rank.say_place(os.environ, environment.hostnames)
    slurm_rank.run_in_job(AttemptPaths(Path(call["attempt"])), entry)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
