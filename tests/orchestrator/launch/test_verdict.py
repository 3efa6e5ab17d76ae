"""The verdict on an attempt names the rank that caused a failure and decides between conflicting records."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from orchestrator.launch.verdict import GRACE_S, STRAGGLER_S, Sight, Watch, excerpt, judge
from orchestrator.records.record_file import write_json_atomic
from orchestrator.records.run_record import AttemptPaths
from orchestrator.records.run_state import RunState

KILLED = -int(signal.SIGKILL)
RUNNING = RunState.running
ERROR = RunState.error


def decide(*sights: Sight, result: bool = False, controller: bool = True) -> tuple[str, int, str]:
    verdict = judge(sights, has_result=result, controller_alive=controller)
    return ("none", 0, "") if verdict is None else (verdict.state.value, verdict.rank, verdict.message)


def test_there_is_no_verdict_while_no_rank_has_ended() -> None:
    assert decide(Sight(0, RUNNING), Sight(1)) == ("none", 0, "")


def test_the_rank_that_raised_first_is_the_cause_not_the_lowest_rank() -> None:
    effect = Sight(0, ERROR, 10.2, "Connection closed by peer", exit_code=1, exit_time=10.3)
    cause = Sight(1, ERROR, 10.0, "ValueError: bad", exit_code=1, exit_time=10.5)
    assert decide(effect, cause) == ("error", 1, "rank 1: ValueError: bad")


def test_a_killed_rank_is_the_cause_even_if_others_raised_before_its_death_was_seen() -> None:
    effect = Sight(0, ERROR, 10.01, "Connection closed by peer", exit_code=1, exit_time=10.1)
    state, rank, message = decide(effect, Sight(1, RUNNING, 9.0, exit_code=KILLED, exit_time=10.05))
    assert (state, rank) == ("error", 1)
    assert "SIGKILL" in message


def test_an_abort_after_the_error_of_another_rank_is_not_the_cause() -> None:
    aborted = Sight(0, RUNNING, 9.0, exit_code=-int(signal.SIGABRT), exit_time=10.2)
    assert decide(aborted, Sight(1, ERROR, 10.0, "ValueError: bad"))[:2] == ("error", 1)


def test_a_rank_that_exits_with_code_0_before_it_has_finished_is_a_failure() -> None:
    state, rank, message = decide(Sight(0, RUNNING), Sight(1, RUNNING, exit_code=0))
    assert (state, rank, message) == ("error", 1, "rank 1 ended without finishing (exit code 0)")


def test_a_process_that_has_ended_with_an_unknown_exit_code_is_a_failure() -> None:
    assert decide(Sight(0, RUNNING), Sight(1, RUNNING, alive=False))[:2] == ("error", 1)


def test_a_written_result_outweighs_the_error_record_of_a_rank() -> None:
    torn_down_badly = Sight(1, ERROR, 10.0, "hung up", exit_code=1)
    verdict = judge([Sight(0, RunState.ok, exit_code=0), torn_down_badly], has_result=True, controller_alive=True)
    assert verdict is not None
    assert verdict.state is RunState.ok
    assert "rank 1: hung up" in verdict.note


def test_ranks_that_succeed_without_writing_a_result_are_an_error() -> None:
    done = [Sight(rank, RunState.ok, exit_code=0) for rank in range(2)]
    assert decide(*done)[0] == "error"
    assert decide(*done, result=True)[0] == "ok"


def test_a_dead_controller_gives_the_state_lost() -> None:
    assert decide(Sight(0), Sight(1), controller=False)[0] == "lost"


def test_ranks_that_end_with_the_killed_process_that_started_them_are_not_blamed() -> None:
    gone = [Sight(rank, RUNNING, alive=False, exit_time=9.0) for rank in range(2)]
    state, rank, message = decide(*gone, controller=False)
    assert (state, rank) == ("lost", 0)
    assert "the process that starts and holds the ranks was killed" in message
    assert decide(gone[0], Sight(1, ERROR, 1.0, "ValueError: bad"), controller=False)[:2] == ("error", 1)
    assert decide(gone[0], Sight(1, RUNNING, exit_code=KILLED, exit_time=8.0), controller=False)[:2] == ("error", 1)


def test_an_error_record_with_an_outcome_determines_the_state() -> None:
    hung = Sight(0, ERROR, 10.0, "RankError: rank 1 has not come to it", blamed=(1,), outcome=RunState.hang)
    assert decide(hung, Sight(1, RUNNING))[:2] == ("hang", 1)
    lacking = Sight(1, ERROR, 10.0, "rank 1: out of memory in forward of step 2", outcome=RunState.oom)
    assert decide(Sight(0, RUNNING), lacking) == ("oom", 1, "rank 1: out of memory in forward of step 2")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptPaths:
    return AttemptPaths(tmp_path)


def write_rank(attempt: AttemptPaths, rank: int, state: RunState, **facts: object) -> None:
    record = {"rank": rank, "pid": 1, "started": "0@", "state": state.value, "time": 1.0, "monotonic": 1.0, **facts}
    write_json_atomic(attempt.rank_record(rank), record)


def test_a_failure_is_reported_after_a_grace_period_in_which_its_cause_may_appear(attempt: AttemptPaths) -> None:
    clock = Clock()
    watch = Watch(attempt, 1, 100.0, lambda: True, clock)
    write_rank(attempt, 0, ERROR, error="ValueError: bad")
    assert watch.look() is None
    clock.now = GRACE_S
    verdict = watch.look()
    assert verdict is not None
    assert verdict.state is ERROR


def test_a_run_past_its_limit_times_out(attempt: AttemptPaths) -> None:
    clock = Clock()
    watch = Watch(attempt, 1, 30.0, lambda: True, clock)
    assert watch.look() is None
    clock.now = 30.1
    verdict = watch.look()
    assert verdict is not None
    assert verdict.state is RunState.timeout
    assert "resources.time_limit_min=0.5" in verdict.message


def test_the_time_in_which_a_run_waits_for_its_turn_is_not_in_its_limit(attempt: AttemptPaths) -> None:
    clock = Clock()
    watch = Watch(attempt, 1, 30.0, lambda: True, clock)
    for now, waits in ((10.0, False), (90.0, True), (109.9, False)):
        clock.now = now
        assert watch.look(waits=waits) is None
    clock.now = 110.1
    verdict = watch.look()
    assert verdict is not None
    assert verdict.state is RunState.timeout


def test_once_a_result_exists_the_wait_for_the_ranks_is_bounded(attempt: AttemptPaths) -> None:
    clock = Clock()
    watch = Watch(attempt, 1, 3.0, lambda: True, clock)
    write_json_atomic(attempt.result, {})
    assert watch.look() is None
    clock.now = STRAGGLER_S
    verdict = watch.look()
    assert verdict is not None
    assert verdict.state is RunState.ok
    assert "busy" in verdict.note


def test_a_kill_by_the_kernels_oom_killer_is_distinguished_from_other_kills(
    attempt: AttemptPaths, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    counter = tmp_path / "vmstat"
    counter.write_text("pgfault 7\noom_kill 3\n")
    monkeypatch.setattr("orchestrator.launch.verdict.VMSTAT", counter)
    write_json_atomic(attempt.exits, {"1": {"code": KILLED, "time": 1.0, "monotonic": 1.0}})
    for kills, state in ((3, RunState.error), (4, RunState.oom_host)):
        counter.write_text("oom_kill 3\n")
        watching = Watch(attempt, 2, 60.0, lambda: False)
        counter.write_text(f"oom_kill {kills}\n")
        verdict = watching.look()
        assert verdict is not None
        assert (verdict.state, verdict.rank) == (state, 1)


def test_an_excerpt_is_the_end_of_a_log_or_the_innermost_calls_of_a_dumped_stack(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    assert excerpt(log) == []
    assert excerpt(log.parent) == [], "a folder cannot be read"
    log.write_text("".join(f"line {number}\n" for number in range(40)))
    assert excerpt(log) == [f"line {number}" for number in range(25, 40)]
    stack = ["Stack (most recent call first):", *(f'  File "f.py", line {number} in f' for number in range(30))]
    log.write_text("before\n" + "\n".join(stack) + "\n")
    assert excerpt(log) == stack[:15]


# ---- ranks that blame another rank ----------------------------------------------------------------------------------

SKIPPED = "RankError: the ranks differ in collective 7: rank 1 issued all_gather\n--- rank 1: step 3"


def test_a_blamed_rank_is_the_cause_even_if_the_others_failed_first() -> None:
    blaming = Sight(0, ERROR, 10.0, SKIPPED, blamed=(1,))
    message = "the ranks differ in collective 7: rank 1 issued all_gather"
    assert decide(blaming, Sight(1, RUNNING)) == ("error", 1, message)
    assert decide(blaming, Sight(1, ERROR, 10.1, SKIPPED, blamed=(1,))) == ("error", 1, message)


def test_an_aborted_rank_is_not_the_cause_if_another_rank_is_blamed() -> None:
    aborted = Sight(0, RUNNING, 9.0, exit_code=-int(signal.SIGABRT), exit_time=9.9)
    assert decide(aborted, Sight(1, ERROR, 10.0, SKIPPED, blamed=(1,)))[:2] == ("error", 1)


def test_the_own_error_of_a_blamed_rank_is_reported_if_it_has_one() -> None:
    blaming = Sight(0, ERROR, 10.0, "RankError: rank 1 failed: KeyError: 'x'", blamed=(1,))
    assert decide(blaming, Sight(1, ERROR, 10.4, "KeyError: 'x'")) == ("error", 1, "rank 1: KeyError: 'x'")


def test_a_killed_rank_is_reported_with_the_place_where_the_others_saw_it_last() -> None:
    blaming = Sight(0, ERROR, 10.0, "RankError: rank 1 is gone; seen last in step 3, forward", blamed=(1,))
    state, rank, message = decide(blaming, Sight(1, RUNNING, exit_code=KILLED, exit_time=10.2))
    assert (state, rank) == ("error", 1)
    assert message.startswith("rank 1 was killed by SIGKILL")
    assert message.endswith("seen last in step 3, forward")
