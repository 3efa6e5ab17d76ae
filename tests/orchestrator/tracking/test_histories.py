"""Which steps of a run are written to MLflow, and when: each once, and of fast ones most when the run has ended."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
from stub_worker import step_event

from orchestrator.records.record_file import append_event
from orchestrator.records.run_record import AttemptPaths
from orchestrator.tracking import followed_run
from orchestrator.tracking.followed_run import FollowedRun


class Kept:
    """A store that keeps what is logged."""

    def __init__(self, output: Path) -> None:
        self.logged: list[tuple[str, float, int, int]] = []
        self.client, self.output = Mock(), output

    def log_metrics(self, run: str, metrics: list[tuple[str, float, int, int]]) -> None:
        self.logged += metrics

    def steps(self, name: str = "train/loss") -> list[int]:
        return [step for logged, _, step, _ in self.logged if logged == name]


@pytest.fixture
def store(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


def followed(store: Kept) -> FollowedRun:
    return FollowedRun(store, "run", AttemptPaths(store.output))  # type: ignore[arg-type]


def add_step(store: Kept, step: int, time: float) -> None:
    append_event(AttemptPaths(store.output).metrics, {**step_event(step, 0), "time": time})


def test_histories_have_each_step_once_though_a_requeued_job_makes_some_twice(store: Kept) -> None:
    run = followed(store)
    for steps, begun in (((1, 2, 3), 0.0), ((3, 4), 4.0)):  # it was killed after step 3, and resumed after step 2
        for step in steps:
            add_step(store, step, begun + step)
        validation = {"event": "validation", "time": begun + steps[-1], "step": steps[-1], "loss": 5.0}
        append_event(AttemptPaths(store.output).metrics, validation)
        run.catch_up()
    run.catch_up()
    assert store.steps() == [1, 2, 3, 4]
    assert store.steps("validation/loss") == [3, 4]
    first, store.logged = store.logged, []
    followed(store).catch_up()  # of a tracker that replaces a killed one
    assert sorted(store.logged) == sorted(first)


def test_of_fast_steps_a_few_a_second_are_written_during_the_run_and_the_others_at_its_end(store: Kept) -> None:
    run = followed(store)
    half = 1.02 * followed_run.LIVE_GAP_MS / 2000  # seconds
    for step in range(1, 101):
        add_step(store, step, 50 + half * step)
        if step % 10 == 0:
            run.catch_up()
    assert store.steps() == list(range(1, 101, 2))
    run.finish()
    assert sorted(store.steps()) == list(range(1, 101))
    late = followed(store)
    store.logged = []
    late.finish()
    assert sorted(store.steps()) == list(range(1, 101)), "by a tracker that replaces a killed one"


def test_slow_steps_and_steps_after_the_clock_was_set_back_are_written_at_once(store: Kept) -> None:
    run = followed(store)
    for step, time in enumerate((50.0, 50.3, 51.0, 20.0, 20.5), start=1):
        add_step(store, step, time)
    run.catch_up()
    assert store.steps() == [1, 2, 3, 4, 5]


def test_the_end_of_a_run_is_written_after_its_last_steps(store: Kept) -> None:
    run = followed(store)
    for step in (1, 2):
        add_step(store, step, 50.0)
    written: list[list[int]] = []
    store.client.set_terminated.side_effect = lambda *_, **__: written.append(store.steps())
    run.finish()
    assert written == [[1, 2]]
