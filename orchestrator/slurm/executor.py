"""submitit's SLURM executor for our ranks, and the program of each of them: `slurm_executor FOLDER ENTRY`.

What travels to a rank is the entry, on its command line, and its attempt's folder, as JSON: no pickle, which would be
code for whoever may write where it lies.
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
from orchestrator.slurm import rank as slurm_rank
from orchestrator.slurm.tools import ask, outside_of_jobs

CALL_S = 60.0


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
        # `env` sets them last: glibc cuts GLIBC_TUNABLES short in each process that reads it, and srun is one
        # (see local_executor.py).
        settings = [f"{key}={value}" for key, value in sorted(self._settings.items())]
        program = children.words("orchestrator.slurm.executor", str(self.folder), self._entry, flags=("-u",))
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


def main(folder: str, entry: str) -> None:
    place = submitit.JobEnvironment()
    path = _call_path(Path(folder), place.job_id)
    deadline = time.monotonic() + CALL_S
    while (call := read_json(path)) is None:  # the job may start before its submission has written it
        if time.monotonic() > deadline:
            raise RuntimeError(f"{path}: expected the call of this job within {CALL_S:g} s; is it on a shared drive?")
        time.sleep(0.2)
    slurm_rank.say_place(os.environ, place.hostnames)
    slurm_rank.run_in_job(AttemptPaths(Path(call["attempt"])), entry)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
