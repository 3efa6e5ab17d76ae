"""Points of a sweep take turns: the order of their rounds, ranks that stay or are started again, and what ends it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from points import STUB
from sweep_runs import attempts, left_behind, points, states

from orchestrator.commands.sweep import SweepRequest, run_quietly
from orchestrator.config.schema import Checkpoint, CheckpointKind, to_dict
from orchestrator.launch import lane
from orchestrator.launch.lane import too_large_together
from orchestrator.machine import hardware
from orchestrator.planning.point import Point
from orchestrator.records import sweep_record
from orchestrator.records.record_file import EventTail, read_json, write_json_atomic
from orchestrator.records.record_shapes import SWEEP_EVENTS
from orchestrator.records.run_record import AttemptPaths
from orchestrator.records.run_state import RunState
from orchestrator.records.sweep_record import Planned, SweepPaths
from orchestrator.report import comparison, ranking
from orchestrator.rounds.recorded import in_turns
from orchestrator.wings.predict import prediction
from orchestrator.wings.predict.point_prediction import PointPrediction
from zero_runtime.predict.memory.step_memory import Peak
from zero_runtime.state_bytes import StateBytes

HERE = Path(__file__).parents[1]
NO_PEAK = Peak(0, {}, 0, 0, 0, 0, 0, "")
ROUNDS = 3


@pytest.fixture(autouse=True)
def scene(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parents[1])]))
    monkeypatch.setenv("ZLAB_LOCKS", str(tmp_path / "locks"))
    monkeypatch.setenv("STUB_STEP_S", "0.0")


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """All points need next to nothing."""
    known = PointPrediction(StateBytes(0, 0, 0, 0), None, peak=NO_PEAK)
    monkeypatch.setattr(prediction, "predictions", lambda found, *_, **__: {one.label: known for one in found})
    monkeypatch.setattr(prediction, "problems", lambda *_, **__: {})


def in_rounds(output: Path, micros: list[int]) -> tuple[Point, ...]:
    found = points(output, micros)
    return tuple(
        replace(one, config=replace(one.config, measure=replace(one.config.measure, steps=6, rounds=ROUNDS)))
        for one in found
    )


def run(found: tuple[Point, ...], *, predicts: bool) -> SweepPaths:
    request = SweepRequest("batch", found, ("sweeps=batch",), predicts=predicts, entry=STUB)
    return run_quietly(request, hardware.detect())


def result_of(sweep: SweepPaths, label: str) -> dict[str, Any]:
    standing = next(one for one in sweep_record.standings(sweep) if one.label == label)
    assert standing.result is not None
    return standing.result


def order_of_rounds(sweep: SweepPaths, labels: Sequence[str] = ()) -> list[tuple[int, str]]:
    """The rounds of these points, or of all, in the order of their beginnings."""
    labels = labels or [one.label for one in sweep_record.standings(sweep)]
    found = [(one["began"], one["number"], label) for label in labels for one in result_of(sweep, label)["rounds"]]
    return [(number, label) for _, number, label in sorted(found)]


def warnings_of(sweep: SweepPaths) -> list[str]:
    events = EventTail(sweep.events, SWEEP_EVENTS).read_new()
    return [event["text"] for event in events if event["event"] == "warning"]


@pytest.mark.usefixtures("predicted")
def test_points_take_turns_in_a_rotated_order_and_their_ranks_stay_alive(tmp_path: Path) -> None:
    sweep = run(in_rounds(tmp_path, [1, 2, 4]), predicts=True)
    assert states(sweep) == ["ok"] * 3
    assert len(attempts(tmp_path)) == 3, "one start for each point"
    a, b, c = "micro1", "micro2", "micro4"
    # The warm-up is turn 0, so the first round begins with the second point.
    assert order_of_rounds(sweep) == [
        *[(1, b), (1, c), (1, a)],
        *[(2, c), (2, a), (2, b)],
        *[(3, a), (3, b), (3, c)],
    ]
    assert len({result_of(sweep, label)["session"] for label in (a, b, c)}) == 1
    assert warnings_of(sweep) == []
    assert ranking.conclusion(comparison.ranked(sweep)).startswith("fastest: a tie of ")
    assert left_behind(tmp_path) == []


@pytest.mark.full
def test_ranks_that_may_not_fit_together_are_started_again_for_each_round(tmp_path: Path) -> None:
    sweep = run(in_rounds(tmp_path, [1, 2]), predicts=False)
    assert states(sweep) == ["ok"] * 2
    assert len(attempts(tmp_path)) == 2 * ROUNDS
    a, b = "micro1", "micro2"
    assert order_of_rounds(sweep) == [(1, a), (1, b), (2, b), (2, a), (3, a), (3, b)]
    told = "the ranks of 2 points are started again for each round, because the memory of micro1 is not predicted"
    assert warnings_of(sweep) == [told]
    assert in_turns(result_of(sweep, a), result_of(sweep, b))
    again = run(in_rounds(tmp_path, [1, 2]), predicts=False)
    assert states(again) == ["cached"] * 2


def test_a_result_with_some_of_its_rounds_is_measured_again(tmp_path: Path) -> None:
    found = in_rounds(tmp_path, [1])
    run(found, predicts=False)
    (attempt,) = attempts(tmp_path)
    result = read_json(AttemptPaths(attempt).result)
    assert result is not None
    assert len(result["rounds"]) == ROUNDS
    write_json_atomic(AttemptPaths(attempt).result, result | {"rounds": result["rounds"][:2]})
    assert states(run(found, predicts=False)) == ["ok"]
    assert len(attempts(tmp_path)) == 2


def test_points_that_save_checkpoints_and_cannot_stay_alive_take_no_turns(tmp_path: Path) -> None:
    saving = tuple(
        replace(one, config=replace(one.config, checkpoint=Checkpoint(CheckpointKind.sharded)))
        for one in in_rounds(tmp_path, [1, 2])
    )
    sweep = run(saving, predicts=False)
    assert states(sweep) == ["ok"] * 2
    assert len(attempts(tmp_path)) == 2
    assert warnings_of(sweep)[0].startswith("micro1 takes no turns with other points, because it saves checkpoints and")


@pytest.mark.full
@pytest.mark.usefixtures("predicted")
def test_a_point_that_fails_leaves_the_others_their_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_ODD_MICRO", "2")
    sweep = run(in_rounds(tmp_path, [1, 2, 4]), predicts=True)
    assert states(sweep) == ["ok", "error", "ok"]
    assert [number for number, _ in order_of_rounds(sweep, ["micro1", "micro4"])] == [1, 1, 2, 2, 3, 3]


@pytest.mark.full
@pytest.mark.usefixtures("predicted")
def test_a_point_out_of_memory_beside_others_is_measured_once_more_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_LACKING_MICRO", "4")
    sweep = run(in_rounds(tmp_path, [1, 4]), predicts=True)
    assert states(sweep) == ["ok", "oom"]
    assert len(attempts(tmp_path)) == 3
    assert any("measured once more without them" in text for text in warnings_of(sweep))


def planned(point: Point, **predicted: object) -> Planned:
    return Planned(point.label, (), RunState.queued, config=to_dict(point.config), predicted=dict(predicted))


def test_points_stay_alive_together_only_if_all_of_them_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = in_rounds(tmp_path, [1, 2])
    monkeypatch.setattr(lane.hardware, "free_bytes", lambda: 8 << 30)
    small, large = planned(one, at_most=1 << 30), planned(other, at_most=4 << 30)
    assert too_large_together([small, small]) == ""
    assert too_large_together([small, large]) == "together they need 6.17 GiB of this machine's free 8.00 GiB"
    assert "not predicted" in too_large_together([small, planned(other)])
