"""If rows of an earlier day stand beside points that are measured today, one of them is measured once more."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from points import make_config
from stub_worker import make_result

from orchestrator.config.schema import RunConfig, to_dict
from orchestrator.planning import decision
from orchestrator.planning.point import Point, Wishes
from orchestrator.records.record_file import write_json_atomic
from orchestrator.records.run_record import Attempt, new_attempt
from orchestrator.records.run_state import RunState
from orchestrator.records.sweep_record import Planned

DAY_S = 86_400.0


def points(output: Path) -> list[Point]:
    plain = make_config(output)
    config = replace(plain, measure=replace(plain.measure, rounds=3))
    return [Point(f"seed{seed}", replace(config, seed=seed)) for seed in range(3)]


def measure(config: RunConfig, *, days_ago: float, rounds: int = 3) -> Attempt:
    attempt = new_attempt(config.output, to_dict(config), "x", "cpu")
    found = [{"number": number, "began": 0.0, "step_ms": [1.0]} for number in range(1, rounds + 1)]
    result = make_result(config) | {"rounds": found, "measured_at": time.time() - days_ago * DAY_S}
    write_json_atomic(attempt.paths.result, result)
    attempt.move(RunState.starting)
    attempt.move(RunState.ok)
    return attempt


def plan(found: list[Point], output: Path, anchor: str = "") -> list[Planned]:
    return decision.decide(found, output, lambda _: "cpu", Wishes(anchor=anchor), {})


def test_the_first_kept_point_of_an_earlier_day_is_measured_once_more(tmp_path: Path) -> None:
    one, other, new = points(tmp_path)
    old = measure(one.config, days_ago=2)
    measure(other.config, days_ago=2)
    planned = plan([new, one, other], tmp_path)
    assert [point.decision.value for point in planned] == ["queued", "queued", "cached"]
    assert planned[1].anchor == str(old.paths.root)
    assert planned[1].reason.startswith("the anchor: measured on ")
    assert [point.anchor for point in planned[::2]] == ["", ""]
    assert Planned.from_dict(planned[1].to_dict()) == planned[1]


def test_an_anchor_that_was_measured_today_is_kept_and_still_says_what_changed(tmp_path: Path) -> None:
    one, other, new = points(tmp_path)
    old = measure(one.config, days_ago=2)
    measure(other.config, days_ago=2)
    measure(one.config, days_ago=0)
    planned = plan([one, other, new], tmp_path)
    assert [point.decision.value for point in planned] == ["cached", "cached", "queued"]
    assert planned[0].anchor == str(old.paths.root)


def test_without_rows_of_an_earlier_day_or_without_points_to_measure_there_is_no_anchor(tmp_path: Path) -> None:
    one, other, new = points(tmp_path)
    measure(one.config, days_ago=0)
    assert [point.decision.value for point in plan([one, other], tmp_path)] == ["cached", "queued"]
    measure(other.config, days_ago=2)
    found = plan([one, other], tmp_path)
    assert [(point.decision.value, point.anchor) for point in found] == [("cached", ""), ("cached", "")]
    assert [point.decision.value for point in plan([one, other, new], tmp_path)] == ["cached", "queued", "queued"]


def test_a_point_without_enough_rounds_is_no_anchor(tmp_path: Path) -> None:
    one, _, new = points(tmp_path)
    quick = replace(one, config=replace(one.config, measure=replace(one.config.measure, rounds=1)))
    measure(quick.config, days_ago=2, rounds=1)
    assert [point.decision.value for point in plan([quick, new], tmp_path)] == ["cached", "queued"]
    measure(one.config, days_ago=2, rounds=2)
    (found,) = plan([one], tmp_path)
    assert found.decision is RunState.queued, "a result with some of its rounds is no answer"


def test_a_named_anchor_is_measured_once_more_whenever_it_was_measured(tmp_path: Path) -> None:
    one, other, new = points(tmp_path)
    measure(one.config, days_ago=2)
    old = measure(other.config, days_ago=0)
    planned = plan([one, other, new], tmp_path, anchor="seed1")
    assert [point.decision.value for point in planned] == ["cached", "queued", "queued"]
    assert planned[1].anchor == str(old.paths.root)
    assert "named by --anchor" in planned[1].reason
    assert [point.anchor for point in plan([new], tmp_path, anchor="seed2")] == [""]  # there is nothing to compare with
