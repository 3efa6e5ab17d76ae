"""Ranks that another launcher started join one attempt; here two processes with the variables that torchrun sets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.patience import HANG_S
from points import make_config
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from orchestrator.config.schema import to_dict
from orchestrator.launch.rank import rank_in_world
from orchestrator.records.record_file import read_json, write_json_atomic
from orchestrator.records.run_record import new_attempt
from orchestrator.records.run_state import RunState
from orchestrator.wings.torchrun.join import verdict_of

HERE = Path(__file__).parents[2]
COMMAND = """
from points import *
from pathlib import Path
from orchestrator.wings.torchrun.join import join
raise SystemExit(join(make_point(make_config(Path({output!r}))), STUB))
"""


def join_two(output: Path, **environ: str) -> list[tuple[int, str]]:
    """Starts two ranks. Returns the exit code and the output of each, in order of rank."""
    path = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "PYTHONPATH": path}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", COMMAND.format(output=str(output))],
            env={**os.environ, **place, **environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (1, 0)
    ]
    told = [process.communicate(timeout=HANG_S)[0] for process in ranks]
    return [(process.returncode, text) for process, text in zip(ranks, told, strict=True)][::-1]


def test_ranks_meet_in_one_attempt_and_rank_0_shows_the_summary(tmp_path: Path) -> None:
    for number in ("01", "02"):  # files that the first run left in the meeting place must not mislead the second
        (lead, other) = join_two(tmp_path)
        assert (lead[0], other[0]) == (0, 0)
        assert "9,812 median" in lead[1]
        assert "9,812" not in other[1]
        (attempt,) = tmp_path.glob(f"points/*/attempts/{number}")
        assert (read_json(attempt / "state.json") or {})["state"] == "ok"
        assert {(read_json(attempt / f"rank{rank}.json") or {})["state"] for rank in range(2)} == {"ok"}


@pytest.mark.full
def test_a_stale_hello_of_a_dead_rank_does_not_disturb_the_next_run(tmp_path: Path) -> None:
    join_two(tmp_path)
    (folder,) = (tmp_path / "joins").iterdir()
    (folder / "hello_1.json").write_text('{"word": "stale"}')
    assert [code for code, _ in join_two(tmp_path)] == [0, 0]


@pytest.mark.full
def test_a_failure_is_recorded_and_every_rank_exits_with_1(tmp_path: Path) -> None:
    environ = {"STUB_FAILING_STAGE": "2"}
    (lead, other) = join_two(tmp_path, **environ)
    assert (lead[0], other[0]) == (1, 1)
    assert "stage 2 was told to fail" in lead[1]
    (state,) = tmp_path.glob("points/*/attempts/01/state.json")
    assert (read_json(state) or {})["state"] == "error"


def test_a_failure_is_recorded_said_once_and_left_for_torchrun_if_the_watch_ends_rank_0(tmp_path: Path) -> None:
    left = tmp_path / "error.json"
    (lead, other) = join_two(tmp_path, STUB_ENDED_BY_WATCH="1", TORCHELASTIC_ERROR_FILE=str(left))
    assert (lead[0], other[0]) == (1, 1)
    told = "rank 1: RuntimeError: rank 1 was told to fail"
    assert lead[1].count(f"error: {told}") == 1
    assert "records" in lead[1]
    (state,) = tmp_path.glob("points/*/attempts/01/state.json")
    known = read_json(state) or {}
    assert (known["state"], known["message"]) == ("error", told)
    assert ProcessFailure(0, 1, 1, str(left)).message["message"] == told


def test_the_rank_that_failed_first_is_named_even_if_it_made_rank_0_fail(tmp_path: Path) -> None:
    attempt = new_attempt(tmp_path, to_dict(make_config(tmp_path)), "a", "cpu")
    for rank, when, error in ((0, 2.0, "RuntimeError: connection closed"), (1, 1.0, "ValueError: bad")):
        record = {"rank": rank, "pid": 1, "started": "", "state": "error", "time": when, "error": error}
        write_json_atomic(attempt.paths.rank_record(rank), record)
    verdict = verdict_of(attempt, 2, RuntimeError("connection closed"))
    assert (verdict.state, verdict.rank, verdict.message) == (RunState.error, 1, "rank 1: ValueError: bad")


def test_a_rank_without_memory_is_named_even_if_rank_0_recorded_the_watchs_verdict_before(tmp_path: Path) -> None:
    attempt = new_attempt(tmp_path, to_dict(make_config(tmp_path)), "a", "cpu")
    told = "rank 1: out of memory in backward of step 3, unit blocks.1"
    for rank, when, error, outcome, blamed in (
        (0, 1.0, f"RankError: rank 1 failed: {told}", "error", [1]),
        (1, 2.0, told, "oom", []),
    ):
        record = {"rank": rank, "pid": 1, "started": "", "state": "error", "time": when}
        facts = {"error": error, "outcome": outcome, "blamed": blamed}
        write_json_atomic(attempt.paths.rank_record(rank), {**record, **facts})
    verdict = verdict_of(attempt, 2, RuntimeError("the watch's verdict"))
    assert (verdict.state, verdict.rank, verdict.message) == (RunState.oom, 1, told)


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, (3, 4, 1)),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}, (3, 4, 1)),
    ],
)
def test_the_rank_is_read_from_the_variables_of_torchrun_and_srun(
    environ: dict[str, str], place: tuple[int, int, int]
) -> None:
    found = rank_in_world(environ, "env://")
    assert found is not None
    assert (found.rank, found.world, found.local_rank) == place


def test_the_script_of_a_batch_job_is_not_a_rank() -> None:
    batch = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
    assert rank_in_world(batch, "env://") is None
