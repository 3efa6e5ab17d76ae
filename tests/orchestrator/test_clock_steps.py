"""Setting the machine's clock during a run or a sweep ends nothing, loses nothing and repeats nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.patience import HANG_S, wait_until
from sweep_runs import COMMAND, attempts, left_behind, states, the_sweep

from orchestrator.records.record_file import EventTail
from orchestrator.records.run_record import AttemptPaths
from orchestrator.records.run_state import RunState
from orchestrator.records.sweep_record import controller_pid

HERE = Path(__file__).parent
HOOK = HERE.parent / "harness" / "clock_steps"
STEPS_S = (2, -2, 7200, -7200)
SINGLE = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from orchestrator.commands.run import run_point
from points import STUB
from sweep_runs import points
raise SystemExit(run_point(points(Path({output!r}), {micros})[0], entry=STUB))
"""


def start(text: str, output: Path, micros: list[int], clock: Path) -> subprocess.Popen[str]:
    path = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
    found = {"PYTHONPATH": os.pathsep.join([str(HOOK), *path]), "ZLAB_CLOCK": str(clock), "STUB_STEP_S": "0.25"}
    found["ZLAB_LOCKS"] = str(output.parent / "locks")
    return subprocess.Popen(
        [sys.executable, "-c", text.format(path=path, output=str(output), micros=micros, detach=False)],
        text=True,
        env={**os.environ, **found},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def steps_of(output: Path) -> int:
    """The number of steps that all attempts together have recorded."""
    tails = [EventTail(AttemptPaths(attempt).metrics) for attempt in attempts(output)]
    return sum(event["event"] == "step" for tail in tails for event in tail.read_new())


def test_the_hook_moves_the_clock_that_time_and_psutil_report(tmp_path: Path) -> None:
    """Without this, the test below would prove nothing."""
    clock = tmp_path / "clock"
    clock.write_text("7200")
    ask = "import os, psutil, time; print(time.time(), psutil.Process(os.getpid()).create_time())"
    env = {**os.environ, "PYTHONPATH": str(HOOK)}
    before, after = (
        [float(word) for word in subprocess.check_output([sys.executable, "-c", ask], env=one, text=True).split()]
        for one in (env, {**env, "ZLAB_CLOCK": str(clock)})
    )
    assert after[0] - before[0] > 7000
    assert after[1] - before[1] > 7000 or not Path("/proc/stat").exists()


@pytest.mark.full
@pytest.mark.parametrize("text", [SINGLE, COMMAND], ids=["run", "sweep"])
def test_setting_the_clock_forward_and_back_ends_no_run_and_repeats_no_point(text: str, tmp_path: Path) -> None:
    output, clock = tmp_path / "outputs", tmp_path / "clock"
    micros = [1] if text is SINGLE else [1, 2]
    command = start(text, output, micros, clock)
    for number, step_s in enumerate(STEPS_S):
        wait_until(lambda number=number: steps_of(output) > number or command.poll() is not None)
        clock.write_text(str(step_s))
        if text is COMMAND and command.poll() is None:
            assert controller_pid(the_sweep(output)) is not None
    shown, _ = command.communicate(timeout=HANG_S)
    assert command.returncode == 0, shown
    assert len(attempts(output)) == len(micros), "no point was run twice"
    if text is COMMAND:
        assert states(the_sweep(output)) == [RunState.ok.value] * len(micros)
    assert left_behind(output) == []
