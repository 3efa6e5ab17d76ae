"""The progress of running points: phase, latest loss, pace, the time of own steps that is left; a line for a log."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stub_worker import step_event

from orchestrator.records.record_file import append_event
from orchestrator.records.run_record import AttemptPaths
from orchestrator.records.run_state import RunState
from orchestrator.records.sweep_record import Planned, Standing
from orchestrator.report.progress import progress
from orchestrator.report.sweep_table import left_text, running_text, standing_row
from orchestrator.text.units import duration

CONFIG = {"measure": {"warmup_steps": 2, "steps": 8, "rounds": 4}}

EXTENDING, REPEATING = {"event": "extending", "rounds": [5, 6]}, {"event": "repeating", "rounds": [1]}
WAITING = {"event": "waiting", "turn": 5}


def steps(last: int, **changed: Any) -> list[dict[str, Any]]:
    return [{"event": "ready"}, *({**step_event(step, 2), **changed} for step in range(1, last + 1))]


def test_a_running_point_shows_its_phase_loss_speed_and_the_time_of_its_steps_left() -> None:
    found = progress(steps(5, step_ms=1500.0), CONFIG)
    assert found.text == "measuring 3/8, loss 5.9500, 8 s of steps left"  # 5 steps of 1.5 s
    assert found.tokens_per_second == 9403.0


def test_one_slow_step_does_not_change_the_pace() -> None:
    events = steps(6, step_ms=100.0)
    events[4]["step_ms"] = 60_000.0
    assert progress(events, CONFIG).left_s == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([], "building"),
        ([{"event": "ready"}], "ready"),
        (steps(1), "warm-up 1/2"),
        ([*steps(4), {"event": "waiting", "turn": 2}], "waits for its turn, round 2/4"),
        ([*steps(10), EXTENDING], "measuring 2 further rounds"),
        ([*steps(10), EXTENDING, WAITING], "waits for its turn, round 5/6"),
        ([*steps(10), EXTENDING, WAITING, {"event": "turn", "turn": 5}], "measuring round 5/6"),
        ([*steps(10), EXTENDING, REPEATING], "measuring loaded rounds again"),
        ([*steps(10), REPEATING, WAITING, {"event": "turn", "turn": 5}], "measuring loaded rounds again"),
        ([*steps(10), REPEATING, WAITING], "waits for its turn, to measure a round again"),
        (steps(10), "ending"),
        (
            [*steps(10), {"event": "variant", "number": 2, "of": 3, "how": "in fp32"}],
            "training the reference again in fp32 (2 of 3), which bounds the difference",
        ),
    ],
)
def test_the_words_name_the_phase(events: list[dict[str, Any]], words: str) -> None:
    assert progress(events, CONFIG).words == words


def test_a_line_of_a_log_names_the_points_at_work_and_counts_those_that_wait(tmp_path: Path) -> None:
    running = []
    for number, events in enumerate([[*steps(5), WAITING], steps(5), [*steps(10), EXTENDING, WAITING]]):
        attempt = AttemptPaths(tmp_path / str(number))
        attempt.root.mkdir()
        for event in events:
            append_event(attempt.metrics, event)
        running.append(Standing(Planned(f"p{number}", (), RunState.queued, config=CONFIG), RunState.running, attempt))
    done = Standing(Planned("done", (), RunState.queued), RunState.ok)
    assert (
        running_text([*running, done])
        == "p1 measuring 3/8, loss 5.9500, 1 s of steps left, 9,403 tokens/s; 2 wait for their turns; "
        "2 s of steps left in all"  # five steps of each of two points
    )
    assert running_text([done]) == ""
    apart = [replace(point, slots=(point.label,)) for point in running]
    assert left_text(apart) == "1 s of steps left in all", "points on slots of their own run side by side"


def test_further_rounds_of_points_that_take_turns_are_time_that_is_left() -> None:
    """Eight steps of 1 s are counted, so that measure.min_s=20 leaves 12 s for two further rounds."""
    config = {"measure": {**CONFIG["measure"], "min_s": 20.0}}
    cases = [
        (steps(5, step_ms=1000.0), 5),  # it takes no turns, and has no further rounds
        ([*steps(5, step_ms=1000.0), WAITING], 5 + 12),
        ([*steps(10, step_ms=1000.0), EXTENDING, WAITING], 12),
        ([*steps(10, step_ms=1000.0), EXTENDING, WAITING, {"event": "round", "number": 5}], 6),
        ([*steps(10, step_ms=1000.0), EXTENDING, WAITING, *({"event": "round", "number": n} for n in (5, 6))], 0),
    ]
    assert [progress(events, config).left_s for events, _ in cases] == [pytest.approx(left) for _, left in cases]


def test_at_the_end_no_time_is_left() -> None:
    assert progress(steps(12), CONFIG).text == "ending, loss 5.8800"


def test_times_are_rounded_up_to_a_readable_unit() -> None:
    assert [duration(one) for one in (0.1, 99.0, 101.0, 5_000.0, 7_200.0)] == [
        "1 s",
        "99 s",
        "2 min",
        "84 min",
        "2.0 h",
    ]


@pytest.mark.parametrize(
    ("job", "message", "note"),
    [("17_0", "Resources, starts about 23:34", "job 17_0, Resources, starts about 23:34"), ("17_1", "", "job 17_1")],
)
def test_the_note_of_a_point_on_a_cluster_begins_with_its_job(job: str, message: str, note: str) -> None:
    point = Standing(Planned("p", (), RunState.queued), RunState.queued, message=message, job=job)
    assert standing_row(point)[-1] == note
