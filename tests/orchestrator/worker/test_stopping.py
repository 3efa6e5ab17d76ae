"""A signal to any rank stops all ranks after the same step with a checkpoint, and the next start resumes from it."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness.patience import HANG_S
from harness.ranks import fork_context
from points import config_of, make_config

from orchestrator.config.cluster import Cluster, ClusterKind
from orchestrator.config.schema import Checkpoint, CheckpointKind, RunConfig, to_dict
from orchestrator.launch.rank import STOP_SIGNAL, WHERE_SIGNAL, Stopped, rank_in_world, run_recorded
from orchestrator.launch.verdict import Verdict, judge, look_at_ranks
from orchestrator.records.record_file import EventTail, read_json, write_json_atomic
from orchestrator.records.run_record import AttemptPaths
from orchestrator.records.run_state import RunState
from orchestrator.worker.stopping import StopSignals

WORLD = 2
STEPS = 60


def _rank_main(root: Path, rank: int, life: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "SLURM_RESTART_COUNT": str(life)}
    place = rank_in_world(os.environ, root / f"life #{life}? 100%")  # as a URL, it would be `life ` for every life
    assert place is not None
    attempt = AttemptPaths(root)
    ended = run_recorded(attempt, place, "orchestrator.worker.train:run_rank")
    os._exit(1 if isinstance(ended, BaseException) else 0)


class Life:
    """One start of an attempt's ranks; an attempt has several lives if a scheduler requeues its job."""

    def __init__(self, attempt: AttemptPaths, number: int = 0) -> None:
        self.attempt = attempt
        context = fork_context()
        self.ranks = [context.Process(target=_rank_main, args=(attempt.root, rank, number)) for rank in range(WORLD)]
        for rank in self.ranks:
            rank.start()

    def signal_after(self, step: int, number: signal.Signals, *ranks: int) -> None:
        deadline = time.monotonic() + HANG_S
        while max(curve(self.attempt), default=0) < step:
            assert time.monotonic() < deadline
            assert all(rank.is_alive() for rank in self.ranks)
            time.sleep(0.002)
        for rank in ranks:
            os.kill(self.ranks[rank].pid or 0, number)

    def codes(self) -> list[int | None]:
        for rank in self.ranks:
            rank.join(HANG_S)
            rank.kill()
        return [rank.exitcode for rank in self.ranks]

    def verdict(self) -> Verdict | None:
        return judge(look_at_ranks(self.attempt, WORLD), has_result=False, controller_alive=False)


def attempt_at(root: Path, config: RunConfig) -> AttemptPaths:
    attempt = AttemptPaths(root / "attempts" / "01")
    attempt.root.mkdir(parents=True)
    write_json_atomic(attempt.config, to_dict(config))
    return attempt


def curve(attempt: AttemptPaths) -> dict[int, float]:
    events = EventTail(attempt.metrics).read_new()
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


def records(attempt: AttemptPaths) -> list[dict[str, Any]]:
    return [read_json(attempt.rank_record(rank)) or {} for rank in range(WORLD)]


@pytest.mark.full
def test_a_signal_to_one_rank_stops_all_and_the_resumed_run_has_the_uninterrupted_losses(tmp_path: Path) -> None:
    config = config_of(STEPS, every=None, resume="none")
    unbroken = attempt_at(tmp_path / "unbroken", config)
    assert Life(unbroken).codes() == [0, 0]
    broken = attempt_at(tmp_path / "broken", config)
    lives = [Life(broken)]
    lives[0].signal_after(5, STOP_SIGNAL, 1)
    assert lives[0].codes() == [0, 0]
    first, second = records(broken)
    assert first["state"] == second["state"] == "preempted"
    assert first["step"] == second["step"] == max(curve(broken))
    assert first["saved"] is True
    assert lives[0].verdict() == Verdict(RunState.preempted, 0, first["message"])
    assert f"after step {first['step']}, saved" in first["message"]
    # `resume=none` applies to checkpoints of other attempts: an attempt always resumes from its own.
    lives.append(Life(broken, 1))
    lives[1].signal_after(first["step"] + 5, signal.SIGTERM, 0, 1)
    assert lives[1].codes() == [0, 0]
    assert records(broken)[0]["step"] > first["step"]
    assert Life(broken, 2).codes() == [0, 0]
    assert list(curve(broken)) == list(range(1, STEPS + 1))
    assert curve(broken) == curve(unbroken)
    result, wanted = read_json(broken.result), read_json(unbroken.result)
    assert result is not None
    assert wanted is not None
    assert result["loss"] == wanted["loss"]
    assert result["checkpoints"]["resumed_from_step"] > first["step"]


def slurm_config(*, saves: bool, limit_min: float = 60.0) -> RunConfig:
    config = make_config(Path("nowhere"), limit_min=limit_min)
    kind = CheckpointKind.sharded if saves else CheckpointKind.none
    return replace(config, checkpoint=Checkpoint(kind), cluster=Cluster(ClusterKind.slurm))


@pytest.fixture(autouse=True)
def handlers_stay() -> Any:
    before = {one: signal.getsignal(one) for one in (STOP_SIGNAL, signal.SIGTERM)}
    yield
    for one, handler in before.items():
        signal.signal(one, handler)


def test_a_local_run_that_saves_nothing_installs_no_signal_handlers() -> None:
    before = signal.getsignal(STOP_SIGNAL)
    assert StopSignals.of(make_config(Path("nowhere"))) is None
    assert signal.getsignal(STOP_SIGNAL) is before


def test_a_run_that_saves_nothing_continues_when_its_time_limit_is_near() -> None:
    """A limit of 2 min, less the signal delay of 90 s and the 60 s that SLURM may be early, lies before the start."""
    for saves, limit_min, stops in ((False, 2.0, False), (True, 2.0, True), (False, 60.0, True)):
        signals = StopSignals.of(slurm_config(saves=saves, limit_min=limit_min))
        assert signals is not None
        assert not signals.asked()
        signal.raise_signal(STOP_SIGNAL)  # sent to this thread, so it is handled before the next line
        assert signals.asked() is stops
        signal.raise_signal(signal.SIGTERM)
        assert signals.asked()


def test_a_run_without_checkpoints_says_that_it_restarts_from_step_0() -> None:
    assert "starts again from step 0" in str(Stopped(7, saved=False))
    assert str(Stopped(7, saved=True)) == "stopped by a signal after step 7, saved"


def test_the_signals_for_a_stop_and_for_a_stack_trace_differ() -> None:
    assert STOP_SIGNAL != WHERE_SIGNAL
    assert signal.SIGUSR1 not in (STOP_SIGNAL, WHERE_SIGNAL)  # used by NCCL


def test_a_jump_of_the_clock_does_not_bring_the_time_limit_nearer(monkeypatch: pytest.MonkeyPatch) -> None:
    signals = StopSignals.of(slurm_config(saves=False))
    assert signals is not None
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 24 * 3600)
    signals.note(STOP_SIGNAL)
    assert signals.asked(), "the limit of an hour is not near"
