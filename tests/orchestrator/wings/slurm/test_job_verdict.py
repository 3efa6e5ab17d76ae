"""A SLURM job's outcome is taken from its result, then its ranks' records, then the scheduler, never from silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.launch.verdict import Verdict
from orchestrator.records.record_file import write_json_atomic
from orchestrator.records.run_record import AttemptPaths
from orchestrator.records.run_state import RunState
from orchestrator.wings.slurm.tools import DENIED, UNSEEN, JobPhase, JobSight
from orchestrator.wings.slurm.verdict import GRACE_S, LOST_S, decide, verdict, verdict_or_lost

NOW = 1000.0
BEGAN = 900.0
RUNNING = JobSight(JobPhase.running, "RUNNING", nodes="node[1-2]", began=BEGAN)
PENDING = JobSight(JobPhase.pending, "PENDING", "BeginTime")


def ended(state: str, code: str = "0:0", reason: str = "") -> JobSight:
    return JobSight(JobPhase.ended, state, reason, code, "node[1-2]", began=BEGAN)


def record(state: str, time: float = NOW - 1, **facts: Any) -> dict[str, Any]:
    return {"state": state, "time": time, "pid": 1, "started": "", **facts}


def error(text: str, time: float = NOW - 1, **facts: Any) -> dict[str, Any]:
    return record("error", time, error=text, **facts)


def told(
    sight: JobSight, *records: dict[str, Any] | None, result: bool = False, error_s: float = 0.0
) -> tuple[str, int, str] | None:
    found = decide(records, sight, has_result=result, error_s=error_s)
    return None if found is None else (found.state.value, found.rank, found.message)


OK, GOING = record("ok"), record("running")
STOPPED = record("preempted", message="stopped by a signal after step 7, saved; job 9 is FAILED")
BLAMES = error("RankError: rank 1 is gone; seen last in step 3, forward", blamed=[1])


@pytest.mark.parametrize("sight", [PENDING, RUNNING, UNSEEN, DENIED])
def test_nothing_is_decided_while_ranks_may_still_run(sight: JobSight) -> None:
    assert told(sight, GOING, GOING) is None
    assert told(sight, None, None) is None


def test_a_job_that_no_tool_knows_is_not_considered_ended() -> None:
    assert told(UNSEEN, GOING, record("ok")) is None
    assert told(UNSEEN, STOPPED, STOPPED) is None


def test_the_result_takes_precedence_over_the_scheduler() -> None:
    assert told(ended("TIMEOUT"), OK, GOING, result=True) == ("ok", 0, "")
    assert told(UNSEEN, OK, OK, result=True) == ("ok", 0, "")
    assert told(RUNNING, OK, GOING, result=True) is None  # the other rank is still exiting
    note = decide([OK, error("hung up")], ended("FAILED"), has_result=True, error_s=0.0)
    assert note is not None
    assert "rank 1: hung up" in note.note


def test_the_rank_that_raised_is_the_cause_whatever_the_scheduler_calls_it() -> None:
    cause = error("ValueError: bad")
    for state in ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"):
        assert told(ended(state, "1:0"), GOING, cause) == ("error", 1, "rank 1: ValueError: bad")


def test_an_error_counts_before_the_job_has_ended_once_a_grace_period_is_over() -> None:
    late = error("ValueError: bad", NOW)
    assert told(RUNNING, GOING, late) is None
    assert told(RUNNING, GOING, late, error_s=GRACE_S + 0.1) == ("error", 1, "rank 1: ValueError: bad")
    assert told(UNSEEN, GOING, late, error_s=GRACE_S + 0.1) == ("error", 1, "rank 1: ValueError: bad")


def test_the_outcome_recorded_with_an_error_is_the_outcome_of_the_job() -> None:
    memory = error("rank 1: out of memory in step 2", outcome="oom")
    assert (told(ended("FAILED", "1:0"), BLAMES, memory) or ())[:2] == ("oom", 1)
    stuck = error("RankError: rank 0 has not come to it for 60 s", outcome="hang", blamed=[0])
    assert (told(ended("FAILED", "1:0"), GOING, stuck) or ())[:2] == ("hang", 0)


def test_a_killed_rank_is_identified_by_the_ranks_that_blame_it() -> None:
    state, rank, message = told(ended("FAILED", "137:0"), BLAMES, GOING) or ("", 0, "")
    assert (state, rank, message) == ("error", 1, "rank 1 is gone; seen last in step 3, forward")


@pytest.mark.parametrize(
    ("state", "outcome", "words"),
    [
        ("TIMEOUT", "timeout", "at its time limit"),
        ("DEADLINE", "timeout", "at its time limit"),
        ("CANCELLED", "cancelled", "it was cancelled in SLURM"),
        ("OUT_OF_MEMORY", "oom_host", "out of memory on node[1-2]"),
        ("NODE_FAIL", "error", "a node failed on node[1-2]"),
        ("BOOT_FAIL", "error", "a node failed"),
        ("PREEMPTED", "preempted", "SLURM took its nodes"),
    ],
)
def test_rank_errors_are_effects_if_the_scheduler_ended_the_job(state: str, outcome: str, words: str) -> None:
    for ranks in ((GOING, GOING), (BLAMES, GOING), (STOPPED, STOPPED)):
        found = told(ended(state, "0:15"), *ranks)
        assert found is not None
        assert found[0] == outcome
        assert words in found[2]


def test_a_job_that_stopped_and_was_not_requeued_is_preempted() -> None:
    assert told(ended("COMPLETED"), STOPPED, STOPPED) == ("preempted", 0, STOPPED["message"])
    assert told(PENDING, STOPPED, STOPPED) is None
    assert told(RUNNING, STOPPED, STOPPED) is None


def test_records_from_before_a_requeue_are_ignored() -> None:
    old = error("ValueError: bad", BEGAN - 60)
    assert told(PENDING, GOING, old) is None
    assert told(RUNNING, GOING, old) is None
    assert told(ended("TIMEOUT"), old, old) == ("timeout", 0, "SLURM ended it at its time limit")


@pytest.mark.parametrize(
    ("sight", "ranks", "words"),
    [
        (ended("FAILED", "127:0"), (None, None), "exit code 127, and ranks [0, 1] never started"),
        (ended("FAILED", "0:9"), (GOING, GOING), "rank 0 ended without finishing: the job ended as FAILED, signal 9"),
        (ended("COMPLETED"), (OK, OK), "yet rank 0 wrote no result"),
        (ended("COMPLETED"), (OK, GOING), "rank 1 ended without finishing"),
    ],
)
def test_an_end_that_no_rank_explains_is_an_error(sight: JobSight, ranks: tuple, words: str) -> None:
    state, _, message = told(sight, *ranks) or ("", 0, "")
    assert state == "error"
    assert words in message


def test_an_out_of_memory_kill_is_recognized_in_the_jobs_log(tmp_path: Path) -> None:
    attempt = AttemptPaths(tmp_path)
    log = tmp_path / "log"
    write_json_atomic(attempt.job, {"job": "7", "log": str(log)})
    write_json_atomic(attempt.rank_record(0), record("running", NOW))
    killed = ended("FAILED", "137:0")
    found = verdict(attempt, 1, killed, NOW)
    assert found is not None
    assert found.state is RunState.error
    log.write_text("hello\nslurmstepd-node1: error: StepId=8.0 exceeded memory limit (42 > 41), being killed\n")
    found = verdict(attempt, 1, killed, NOW)
    assert found is not None
    assert found.state is RunState.oom_host
    assert "exceeded memory limit (42 > 41)" in found.message
    assert verdict(attempt, 1, RUNNING, NOW) is None
    log.write_text("slurmstepd-node1: error: Exceeded job memory limit\nsrun: error: node2: task 1: Killed\n")
    found = verdict(attempt, 1, killed, NOW)  # another node exceeded the limit first
    assert found is not None
    assert found.state is RunState.oom_host


def test_a_job_whose_ranks_never_started_reports_the_end_of_its_log(tmp_path: Path) -> None:
    attempt = AttemptPaths(tmp_path)
    write_json_atomic(attempt.job, {"job": "7", "log": str(tmp_path / "log")})
    (tmp_path / "log").write_text("slurmstepd: error: execve(): python: No such file or directory\n\n")
    found = verdict(attempt, 2, ended("FAILED", "2:0"), NOW)
    assert found is not None
    assert "ranks [0, 1] never started; the job's log ends: slurmstepd: error: execve()" in found.message


@pytest.mark.parametrize("clock", [0.0, 1e12])
def test_the_age_of_an_error_does_not_depend_on_the_clock_of_the_rank(tmp_path: Path, clock: float) -> None:
    attempt = AttemptPaths(tmp_path)
    write_json_atomic(attempt.rank_record(0), error("ValueError: bad", clock))
    sight = JobSight(JobPhase.running, "RUNNING")
    assert verdict(attempt, 1, sight, NOW) is None
    assert verdict(attempt, 1, sight, NOW + GRACE_S - 0.1) is None
    found = verdict(attempt, 1, sight, NOW + GRACE_S + 0.1)  # as another command on this machine would ask
    assert found is not None
    assert found.message == "rank 0: ValueError: bad"


@pytest.mark.parametrize("clock", [0.0, 1e12])
def test_a_changing_heartbeat_is_a_sign_of_life_whatever_time_it_contains(tmp_path: Path, clock: float) -> None:
    attempt = AttemptPaths(tmp_path)
    for beat in range(5):
        write_json_atomic(attempt.heartbeat, {"time": clock - 3600 * beat, "node": "node1"})
        assert verdict_or_lost(attempt, 1, DENIED, NOW + LOST_S * beat) is None
    assert verdict_or_lost(attempt, 1, DENIED, NOW + LOST_S * 5) is not None


def test_a_job_is_lost_when_slurm_keeps_denying_it_and_there_is_no_sign_of_life(tmp_path: Path) -> None:
    attempt = AttemptPaths(tmp_path)
    write_json_atomic(attempt.heartbeat, {"time": NOW, "node": "node1"})

    def look(sight: JobSight, now: float) -> Verdict | None:
        return verdict_or_lost(attempt, 1, sight, now)

    assert look(DENIED, NOW) is None
    assert look(UNSEEN, NOW + LOST_S / 2) is None  # a missing answer proves nothing
    assert look(DENIED, NOW + LOST_S - 1) is None
    found = look(DENIED, NOW + LOST_S)
    assert found is not None
    assert found.state is RunState.lost
    assert "rank 0 has been silent for 2 min" in found.message


@pytest.mark.parametrize("sign", ["heartbeat", "queue"])
def test_a_job_with_one_sign_of_life_is_not_lost(sign: str, tmp_path: Path) -> None:
    attempt = AttemptPaths(tmp_path)
    assert verdict_or_lost(attempt, 1, DENIED, NOW) is None
    if sign == "heartbeat":
        write_json_atomic(attempt.heartbeat, {"time": NOW + LOST_S, "node": "node1"})
    assert verdict_or_lost(attempt, 1, RUNNING if sign == "queue" else UNSEEN, NOW + LOST_S) is None
    assert verdict_or_lost(attempt, 1, DENIED, NOW + LOST_S + 1) is None
