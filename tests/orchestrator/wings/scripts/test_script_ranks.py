"""`zlab launch` gives a script torchrun's environment, and ends all ranks when one fails."""

from __future__ import annotations

import io
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.wings.scripts.script_ranks import WAIT_S, RankOutput

ROOT = Path(__file__).resolve().parents[4]
SCRIPT = r"""
import os, sys, time
import torch.distributed as dist
if sys.argv[1] == "meet":
    dist.init_process_group("gloo")
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, int(os.environ["LOCAL_RANK"]))
    sys.stdout.write(f"met {values} {sys.argv[2:]}\n")  # `print` writes word by word where nothing is buffered
    store = dist.distributed_c10d._get_default_store()
    if os.environ["RANK"] == "0":
        store.set("rank 0", str(os.getpid()))
        sys.exit()
    while os.path.exists(f"/proc/{store.get('rank 0').decode()}"):
        time.sleep(0.01)
    store.get("rank 0")  # as with torchrun, the store outlives rank 0
    dist.destroy_process_group()
elif os.environ["RANK"] == "1":
    print("the cause")
    sys.exit(3) if sys.argv[1] == "exit" else os.kill(os.getpid(), 9)
else:
    print(os.getpid(), flush=True)
    time.sleep(600)
"""


def launched(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "run.py", "launch", "--ranks", "2", "--device", "cpu", str(script), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=False)


def test_ranks_meet_over_the_variables_that_torchrun_sets(tmp_path: Path) -> None:
    done = launched(tmp_path, "meet", "--version", "--ranks")
    assert done.returncode == 0, done.stderr
    line = "met [0, 1] ['--version', '--ranks']"  # the words of the script are its own
    assert sorted(done.stdout.splitlines()) == [line, f"rank 1: {line}"]
    assert done.stderr.startswith("note: 2 ranks of ")
    assert "ended with exit code 0" in done.stderr


@pytest.mark.parametrize(
    ("how", "told"), [pytest.param("exit", "exit code 3", marks=pytest.mark.full), ("kill", "killed by SIGKILL")]
)
def test_a_rank_that_ends_badly_ends_all_and_is_named(tmp_path: Path, how: str, told: str) -> None:
    began = time.monotonic()
    done = launched(tmp_path, how)
    assert done.returncode == 1
    assert time.monotonic() - began < 300  # the other rank would sleep for 600 s
    assert "error: rank 1" in done.stderr
    assert told in done.stderr
    assert not Path("/proc", done.stdout.split()[0]).exists()


def test_a_script_that_is_missing_is_refused_before_anything_starts(tmp_path: Path) -> None:
    command = [sys.executable, "run.py", "launch", str(tmp_path / "none.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "expected a Python script, found no file" in done.stderr


def test_a_line_of_another_rank_comes_between_the_lines_of_rank_0() -> None:
    shown = io.StringIO()
    with RankOutput() as output:
        output.first(shown, b"loss")
        output.other(shown, b"rank 1: loss 2\n", now=0.0)
        output.look(WAIT_S / 2)
        output.first(shown, b" 2\n")
        assert shown.getvalue() == "loss 2\nrank 1: loss 2\n"
        output.other(shown, b"rank 1: done\n", now=1.0)
    assert shown.getvalue() == "loss 2\nrank 1: loss 2\nrank 1: done\n"


def test_a_line_of_another_rank_does_not_wait_long_for_a_progress_bar() -> None:
    shown = io.StringIO()
    with RankOutput() as output:
        output.first(shown, b"\r10%")
        output.other(shown, b"rank 1: a\n", now=5.0)
        output.look(5.0 + WAIT_S / 2)
        assert shown.getvalue() == "\r10%"
        output.look(5.0 + WAIT_S)
        assert shown.getvalue() == "\r10%\nrank 1: a\n"
        output.first(shown, b"\r20%")
        output.other(shown, b"rank 1: b\n", now=8.0)
    assert shown.getvalue() == "\r10%\nrank 1: a\n\r20%\nrank 1: b\n"  # nothing is lost at the end
