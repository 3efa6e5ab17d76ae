"""Runs rows on the virtual GPU in one child process, and keeps their results for the tests of this process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from harness.helper_process import HelperProcess
from harness.virtual_gpu.build import build_guard
from harness.virtual_gpu.row import Row
from zero_runtime.kernels.cpu.build import BuildError

ROOT = Path(__file__).resolve().parents[3]
Result = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A row, and the faults that are injected into it: names of faults.FAULTS, and sites of waits that are left out.

    timed: follow time instead of accesses; the result is that of timed_rows.run_row.
    """

    row: Row
    faults: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    timed: bool = False

    def as_json(self) -> str:
        return json.dumps({**vars(self), "row": self.row.as_json()})


class VirtualGpu:
    """The child process, which starts with the first job."""

    def __init__(self, guard: Path) -> None:
        self._guard = guard
        self._process: HelperProcess | None = None
        self._results: dict[Job, Result] = {}

    def result(self, job: Job) -> Result:
        """What was recorded of the job, once for every job. AssertionError with the traceback if it failed."""
        if job not in self._results:
            self._results[job] = self._run(job)
        result = self._results[job]
        assert "error" not in result, f"{job}:\n{result['error']}"
        return result

    def _run(self, job: Job) -> Result:
        if self._process is None:
            folders = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
            command = [sys.executable, "-m", "harness.virtual_gpu.child", str(self._guard)]
            environment = {**os.environ, "PYTHONPATH": folders}
            self._process = HelperProcess("the process of the virtual GPU", command, environment)
        self._process.send(job.as_json().encode(), b"\n")
        return json.loads(self._process.read_line())

    def close(self) -> None:
        if self._process is not None:
            self._process.close()


@cache
def _guard() -> Path | str:
    """The compiled guard, or why there is none."""
    try:
        return build_guard()
    except BuildError as error:
        return str(error)


@pytest.fixture(scope="session")
def virtual_gpu() -> Iterable[VirtualGpu]:
    guard = _guard()
    if isinstance(guard, str):
        pytest.skip(f"the virtual GPU cannot be compiled: {guard}")
    machine = VirtualGpu(guard)
    yield machine
    machine.close()
