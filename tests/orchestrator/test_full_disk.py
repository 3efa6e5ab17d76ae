"""On a full disk a command reports the error without a traceback and leaves no process; with space it resumes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.patience import HANG_S
from points import STUB
from sweep_runs import left_behind, points

from orchestrator.commands import sweep as sweep_command
from orchestrator.commands.sweep import SweepRequest
from orchestrator.launch import cluster
from orchestrator.machine import hardware
from orchestrator.records import sweep_record

HERE = Path(__file__).parent
COMMAND = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from orchestrator import cli
from orchestrator.machine import hardware
from orchestrator.planning.point import Wishes, retry_states
from orchestrator.commands.run import run_point
from orchestrator.commands.sweep import SweepRequest, run_sweep
from points import STUB
from sweep_runs import points

def sweep(words):
    found = points(Path({output!r}), [1, 2])
    wishes = Wishes(retry=retry_states("error"))
    request = SweepRequest("batch", found, ("sweeps=batch",), wishes, predicts=False, entry=STUB)
    return run_sweep(request, hardware.detect())

def single(words):
    return run_point(points(Path({output!r}), [1])[0], entry=STUB)

cli._carried_out = {what}
raise SystemExit(cli.main([]))
"""


class Disk:
    """A mounted file system whose size can be changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(folder)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"a file system of a small size cannot be mounted here: {done.stderr.strip()}")

    def resize(self, kib: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={kib}k", str(self.folder)], check=True)

    def close(self) -> None:
        subprocess.run(["umount", str(self.folder)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    (tmp_path / "disk").mkdir()
    found = Disk(tmp_path / "disk")
    yield found
    found.close()


def run(what: str, output: Path) -> tuple[int, str, str]:
    path = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "STUB_STEP_S": "0.01"}
    done = subprocess.run(
        [sys.executable, "-c", COMMAND.format(path=path, output=str(output), what=what)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=HANG_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def told_and_resumed(disk: Disk, what: str, kib: int) -> int:
    """Checks a command on a disk of `kib` KiB and, with more space, its repetition. Returns the first exit code."""
    output = disk.folder / "outputs"
    disk.resize(kib)
    code, shown, errors = run(what, output)
    assert code in (0, 1, 2, 3), shown + errors
    # stdout is left out: it may show the end of a rank's log, which contains the rank's own traceback.
    told = errors + "".join(log.read_text() for log in output.glob("sweeps/*/controller.log"))
    assert "Traceback" not in told, told
    if code:
        assert any(text in shown + errors for text in ("No space left on device", "ended early")), shown + errors
    assert not list(disk.folder.rglob(".*.tmp"))
    assert left_behind(output) == []
    disk.resize(64 << 10)
    again, shown, errors = run(what, output)
    assert again == 0, shown + errors
    if what == "sweep":
        (sweep, *_) = sweep_record.all_sweeps(output)
        assert all(one.state.measured for one in sweep_record.standings(sweep))
    return code


@pytest.mark.full
def test_a_sweep_on_a_full_disk_reports_the_error_and_resumes_with_space(disk: Disk) -> None:
    assert told_and_resumed(disk, "sweep", 60) != 0


def test_a_controller_whose_claim_cannot_be_written_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(path: Path, content: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parents[1])]))
    monkeypatch.setattr(cluster, "write_json_atomic", full_disk)
    request = SweepRequest("batch", points(tmp_path, [1]), ("sweeps=batch",), predicts=False, entry=STUB)
    with pytest.raises(OSError, match="No space left"):
        sweep_command.run_sweep(request, hardware.detect())
    assert left_behind(tmp_path) == []


@pytest.mark.full
@pytest.mark.parametrize("kib", [4, 8, 16, 24, 40, 80, 100, 120, 140])
@pytest.mark.parametrize("what", ["sweep", "single"])
def test_a_disk_that_fills_up_at_any_moment_is_reported_and_loses_no_result(disk: Disk, what: str, kib: int) -> None:
    told_and_resumed(disk, what, kib)
