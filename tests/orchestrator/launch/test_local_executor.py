"""Submitted ranks of the stub worker get their place and environment, and no process is left if one of them dies."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness.patience import HANG_S, wait_until
from points import STUB, make_config, make_point
from rich.console import Console
from stub_worker import make_result

from orchestrator.commands import run as study
from orchestrator.commands.run import run_point
from orchestrator.config.schema import Checkpoint, CheckpointKind, Device, RunConfig, to_dict
from orchestrator.launch import environment, local_executor
from orchestrator.launch.local_run import PointRun
from orchestrator.machine.processes import is_alive, session_members
from orchestrator.records.record_file import read_json, write_json_atomic
from orchestrator.records.run_record import AttemptPaths, new_attempt
from orchestrator.records.run_state import RunState
from orchestrator.report.screen import Screen
from orchestrator.text.paths import CODE

HERE = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def stub_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The sessions of the jobs that the test starts; none may have a process left at the end."""
    seen: list[int] = []
    submit = local_executor.submit

    def watched(*arguments: Any) -> local_executor.Job:
        job = submit(*arguments)
        seen.append(job.session)
        return job

    monkeypatch.setattr(local_executor, "submit", watched)
    yield seen
    assert seen
    for session in seen:
        assert session_members(session) == []


def run(config: RunConfig, *, as_json: bool = False) -> tuple[int, str, AttemptPaths]:
    """Runs one point. Returns the exit code, the output and the only attempt."""
    out = io.StringIO()
    screen = Screen(Console(file=out, width=200))
    code = run_point(make_point(config), entry=STUB, screen=screen, as_json=as_json)
    (attempt,) = Path(config.output).glob("points/*/attempts/*")
    return code, out.getvalue(), AttemptPaths(attempt)


def assert_failed(attempt: AttemptPaths, state: str, rank: int) -> dict[str, Any]:
    found = read_json(attempt.state)
    assert found is not None
    assert (found["state"], found["rank"]) == (state, rank)
    assert not attempt.result.exists()
    for one in range(2):
        record = read_json(attempt.rank_record(one))
        assert record is not None
        assert not is_alive(record["pid"], record["started"])
    return found


def test_ranks_get_their_place_and_start_with_the_recommended_environment(tmp_path: Path, sessions: list[int]) -> None:
    code, shown, attempt = run(make_config(tmp_path))
    assert code == 0
    assert "9,812 median" in shown
    for rank in range(2):
        told = read_json(attempt.root / f"environment{rank}.json")
        assert told is not None
        assert (told["rank"], told["local_rank"], told["world"]) == (str(rank), str(rank), "2")
        at_exec = told["at_exec"]
        # The allocator reads the variable before Python starts, so setting it later has no effect. Up to version
        # 2.38, glibc replaces each colon that it has parsed by a zero byte, in the process's own environment.
        assert f"GLIBC_TUNABLES={environment.GLIBC}" in told["whole"].replace("\0glibc.", ":glibc.")
        assert at_exec["TOKENIZERS_PARALLELISM"] == "false"
        assert at_exec["OMP_NUM_THREADS"] == at_exec["MKL_NUM_THREADS"] == "1"
        assert at_exec["CUDA_VISIBLE_DEVICES"] == ""
        pid = (read_json(attempt.rank_record(rank)) or {})["pid"]
        assert attempt.rank_log(rank).read_text() == f"rank {rank} of 2, pid {pid}\nrank {rank} of 2 is here\n"
    state = read_json(attempt.state)
    assert state is not None
    assert state["state"] == "ok"


@pytest.mark.full
def test_any_character_may_be_in_the_path_and_no_pickle_is_written(tmp_path: Path, sessions: list[int]) -> None:
    output = tmp_path / "a#1?b=%20%d;\t\n'\"$(x) ünï"
    code, _, attempt = run(make_config(output))
    assert code == 0
    assert attempt.result.is_relative_to(output)
    assert [one.name for one in tmp_path.iterdir()] == [output.name]
    assert [one for one in tmp_path.rglob("*") if one.suffix in (".pkl", ".pickle")] == []


def test_a_rank_that_raises_ends_the_run_with_its_own_traceback(
    tmp_path: Path, sessions: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZLAB_FAULT", "raise@step3:rank1")
    code, shown, attempt = run(make_config(tmp_path), as_json=True)
    assert code == 1
    state = assert_failed(attempt, "error", rank=1)
    assert "ZLAB_FAULT raised on rank 1 at step 3" in state["message"]
    told = json.loads(capsys.readouterr().out)
    assert (told["state"], told["message"], told["result"]) == ("error", state["message"], None)
    assert told["attempt"] == str(attempt.root)
    assert state["log"][-1].endswith("ZLAB_FAULT raised on rank 1 at step 3")
    assert "stub_worker.py" in shown
    assert "rank1.log" in shown


def test_a_rank_that_is_killed_ends_the_run(
    tmp_path: Path, sessions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZLAB_FAULT", "sigkill@step3:rank1")
    code, shown, attempt = run(make_config(tmp_path))
    assert code == 1
    state = assert_failed(attempt, "error", rank=1)
    assert "rank 1 was killed by SIGKILL" in state["message"]
    assert "rank 1 was killed by SIGKILL" in shown
    assert state["log"][-1] == "rank 1 of 2 is here"
    assert state["message"].endswith("after step 2")


@pytest.mark.full
def test_a_rank_that_hangs_ends_at_the_time_limit_and_its_stack_is_shown(
    tmp_path: Path, sessions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZLAB_FAULT", "hang@step3:rank1")
    code, shown, attempt = run(make_config(tmp_path, limit_min=0.15))  # even a busy machine reaches step 3 in this time
    assert code == 1
    state = assert_failed(attempt, "timeout", rank=1)
    assert "the others waited for rank 1" in state["message"]
    assert "faults.py" in state["log"][1]
    assert "at_step" in shown


COMMAND = """
from points import *
from pathlib import Path
from orchestrator.commands.run import run_point
raise SystemExit(run_point(make_point(make_config(Path({output!r}))), entry=STUB))
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A command in the middle of a run that hangs."""
    monkeypatch.setenv("ZLAB_FAULT", "hang@step2:rank1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parents[1])]))
    text = COMMAND.format(output=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.DEVNULL)
    wait_until(lambda: len(list(tmp_path.glob("points/*/attempts/01/step1.*.here"))) == 2)
    yield process
    process.kill()
    process.wait()
    for pid in living(tmp_path):  # a failed test leaves no process either
        os.kill(pid, signal.SIGKILL)


def living(output: Path) -> list[int]:
    (attempt,) = output.glob("points/*/attempts/01")
    paths = AttemptPaths(attempt)
    records = [read_json(paths.rank_record(rank)) or {} for rank in range(2)]
    controller = (read_json(paths.state) or {}).get("controller")
    ranks = [record["pid"] for record in records if is_alive(record["pid"], record["started"])]
    return ranks + (session_members(controller) if controller else [])


def test_ctrl_c_ends_everything_and_the_run_is_recorded_as_cancelled(
    command: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    assert len(living(tmp_path)) > 2
    command.send_signal(signal.SIGINT)
    assert command.wait(timeout=HANG_S) == 130
    assert living(tmp_path) == []
    (state,) = tmp_path.glob("points/*/attempts/01/state.json")
    assert '"cancelled"' in state.read_text()


def test_a_stopped_run_prints_how_to_resume_if_it_saved_a_checkpoint(tmp_path: Path) -> None:
    config = replace(make_config(tmp_path), checkpoint=Checkpoint(CheckpointKind.sharded, resume="auto"))
    attempt = new_attempt(tmp_path, to_dict(config), "stage2", "cpu")
    attempt.move(RunState.cancelled)
    point = make_point(config)
    assert study.next_rows(point, attempt) == []
    (attempt.paths.checkpoints / "step-00000005").mkdir(parents=True)
    (row,) = study.next_rows(point, attempt)
    assert row.text.endswith("     # resumes from its last checkpoint")


@pytest.mark.full
def test_a_run_cancelled_after_its_result_was_written_counts_as_measured(tmp_path: Path, sessions: list[int]) -> None:
    point = make_point(make_config(tmp_path))
    attempt = new_attempt(tmp_path, to_dict(point.config), "a", "cpu")
    run = PointRun(point, attempt, STUB)
    wait_until(attempt.paths.result.exists)
    run.cancel("somebody stopped it")
    assert attempt.state is RunState.ok


def test_a_result_that_is_written_while_the_ranks_end_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that holds the ranks was killed when rank 0 was writing it."""
    point = make_point(make_config(tmp_path))
    attempt = new_attempt(tmp_path, to_dict(point.config), "a", "cpu")

    def end() -> None:
        write_json_atomic(attempt.paths.result, make_result(point.config))

    job = SimpleNamespace(session=0, controller_alive=lambda: False, end=end)
    monkeypatch.setattr(local_executor, "submit", lambda *others: job)
    verdict = PointRun(point, attempt, STUB).look()
    assert verdict is not None
    assert (verdict.state, attempt.state) == (RunState.ok, RunState.ok)
    assert verdict.note.startswith("after the result was written: the process that starts and holds the ranks ended")


def test_no_process_survives_a_killed_command(command: subprocess.Popen[bytes], tmp_path: Path) -> None:
    command.kill()
    command.wait()
    wait_until(lambda: living(tmp_path) == [])


def test_variables_of_the_user_are_kept_except_for_the_thread_count(tmp_path: Path) -> None:
    mine = {"TOKENIZERS_PARALLELISM": "true", "OMP_NUM_THREADS": "64", "CUDA_VISIBLE_DEVICES": "GPU-1234"}
    config = make_config(tmp_path)
    on_cuda = replace(config, resources=replace(config.resources, device=Device.cuda, threads=3))
    found = environment.job_environment(on_cuda, mine)
    assert found["TOKENIZERS_PARALLELISM"] == "true"
    assert found["OMP_NUM_THREADS"] == "3"
    assert found["CUDA_VISIBLE_DEVICES"] == "GPU-1234"
    assert found["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    own = environment.job_environment(on_cuda, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"})
    assert "PYTORCH_ALLOC_CONF" not in own


@pytest.mark.parametrize("code", [None, "/another/one"])
def test_ranks_run_from_the_checkout_that_the_configuration_names(
    code: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = list[str]()

    def start(executor: local_executor._SessionExecutor) -> SimpleNamespace:
        commands.append(executor.command())
        return SimpleNamespace(pid=1)

    monkeypatch.setattr(local_executor._SessionExecutor, "start", start)
    config = make_config(tmp_path)
    local_executor.submit(
        AttemptPaths(tmp_path), replace(config, resources=replace(config.resources, code=code)), "entry"
    )
    (command,) = commands
    assert shlex.split(command)[2] == f"{code or CODE}/orchestrator/machine/children.py"
