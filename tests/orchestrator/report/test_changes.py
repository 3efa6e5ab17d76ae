"""Two sweeps are compared point by point: which points are the same, what differs, and what became slower."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from points import make_config
from stub_worker import make_result

from orchestrator.config.schema import to_dict
from orchestrator.report import changes
from orchestrator.report.changes import Changes, Judgement, Measured

CONFIG = make_config(Path("outputs"))
THRESHOLD = 0.05
ROUNDS = 6  # of measure=standard
TRIES = 40
# Relative standard deviations of a round's median, and of the speed between two sweeps, up to which the promise holds;
# benchmarks/rank_repeats.py measures those of a machine.
BETWEEN_ROUNDS, BETWEEN_SWEEPS = 0.015, 0.005


def measured(label: str, medians: list[float], *, point: str = "", config: Any = CONFIG, **more: Any) -> Measured:
    """A point whose rounds have these medians in milliseconds."""
    result = make_result(config) | more
    result["rounds"] = [{"number": number, "began": 0.0, "step_ms": [ms]} for number, ms in enumerate(medians, start=1)]
    return Measured(label, point, to_dict(config), result, "ok")


def compared(before: list[Measured], after: list[Measured], threshold: float = THRESHOLD) -> Changes:
    return changes.changes(before, after, threshold, ("A", "B"))


def judgement(before: Measured, after: Measured) -> Judgement:
    (only,) = compared([before], [after]).points
    return only.judgement


def with_stage(label: str, medians: list[float], stage: int, micro: int = 2) -> Measured:
    config = replace(CONFIG, zero=replace(CONFIG.zero, stage=stage), batch=replace(CONFIG.batch, micro=micro))
    return measured(label, medians, config=config, session="together")


def test_points_of_one_sweep_are_compared_by_a_setting_in_their_turns() -> None:
    moments = [10.0, 20.0, 14.0, 30.0]  # of a machine whose speed changes by far more than the points differ
    points = [
        with_stage("1-2", moments, 1),
        with_stage("3-2", [1.06 * ms for ms in moments], 3),
        with_stage("1-4", [30.0] * 4, 1, micro=4),
        with_stage("2-2", [*(1.001 * ms for ms in moments), 99.0], 2),
        with_stage("3-8", [50.0] * 4, 3, micro=8),
    ]
    refused = [Measured(label, "", {}, None, "refused") for label in ("no", "none")]
    for key in ("zero.stage", "zero"):
        found = changes.by_setting([*refused, *points], key, THRESHOLD)
        pairs = [(one.before.label, one.after.label, one.judgement) for one in found.points]
        assert pairs == [("1-2", "3-2", Judgement.slower), ("1-2", "2-2", Judgement.same)]
        assert [one.settings for one in found.points] == [("zero.stage: 1 -> 3",), ("zero.stage: 1 -> 2",)]
        assert found.alone == ("no", "none", "1-4", "3-8")
        assert changes.notes(found)[-1] == "compared with no other: no, none, 1-4, 3-8"
    found = changes.by_setting(points, "batch", THRESHOLD)
    assert [(one.before.label, one.after.label) for one in found.points] == [("1-2", "1-4"), ("3-2", "3-8")]
    alone = changes.by_setting(points[:1], "zero", THRESHOLD)
    assert changes.conclusion(alone) == "no two points differ in that alone"
    assert changes.has_setting(points[0], "batch")
    assert not changes.has_setting(points[0], "bat")


def noisy(generator: random.Random, slower: float = 1.0) -> list[float]:
    sweep = 100 * slower * (1 + generator.gauss(0, BETWEEN_SWEEPS))
    return [sweep * (1 + generator.gauss(0, BETWEEN_ROUNDS)) for _ in range(ROUNDS)]


def test_a_slowdown_of_five_percent_is_found_and_none_is_not_reported() -> None:
    generator = random.Random(5)
    pairs = [(measured("a", noisy(generator)), measured("a", noisy(generator, 1.05))) for _ in range(TRIES)]
    assert sum(judgement(*pair) is Judgement.slower for pair in pairs) >= 0.95 * TRIES
    pairs = [(measured("a", noisy(generator)), measured("a", noisy(generator))) for _ in range(TRIES)]
    assert sum(judgement(*pair) is Judgement.slower for pair in pairs) <= 0.05 * TRIES


def test_points_are_matched_by_id_then_by_settings_then_by_label() -> None:
    other = replace(CONFIG, seed=7)
    before = [
        measured("a", [1.0] * 3, point="1"),
        measured("b", [1.0] * 3, point="2", config=other),
        measured("c", [1.0] * 3, point="3"),
        measured("gone", [1.0] * 3, point="4"),
    ]
    after = [
        measured("c", [1.0] * 3, point="9", config=replace(CONFIG, seed=8)),
        measured("renamed", [1.0] * 3, point="8", config=other),
        measured("x", [1.0] * 3, point="1"),
        measured("new", [1.0] * 3, point="5", config=replace(CONFIG, seed=9)),
    ]
    found = compared(before, after)
    assert [(one.before.label, one.after.label, one.matched) for one in found.points] == [
        ("a", "x", "id"),
        ("b", "renamed", "settings"),
        ("c", "c", "label"),
    ]
    assert (found.only_before, found.only_after) == (("gone",), ("new",))
    assert found.points[2].settings == ("seed: 1234 -> 8",)
    assert "only in A: gone" in changes.notes(found)


def test_what_all_points_share_is_said_once() -> None:
    environment = {**make_result(CONFIG)["environment"], "torch": "2.14.0"}
    before = [measured(label, [1.0] * 3, environment={**environment, "torch": "2.13.0"}) for label in "ab"]
    after = [measured(label, [1.0] * 3, environment=environment) for label in "ab"]
    assert changes.notes(compared(before, after)) == [
        "memory/rank: counted tensors of a rank",
        "versions and machine: torch: 2.13.0 -> 2.14.0",
    ]


def test_more_memory_and_a_lost_result_are_regressions() -> None:
    before = measured("a", [1.0] * 3)
    result = copy.deepcopy(before.result)
    assert result is not None
    result["memory"]["states"][0]["measured_bytes"] *= 2
    result["memory"]["peak_rss_bytes"] //= 2  # of the process, whose allocator keeps what was freed: not judged
    (found,) = compared([before], [replace(before, result=result)]).points
    assert found.judgement is Judgement.larger
    cells = dict(zip(changes.HEADER, changes.table(compared([before], [found.after])).rows[0], strict=True))
    assert float(cells["its change"].removesuffix(" %")) > 100 * THRESHOLD, "the table shows what is judged"
    allocated = copy.deepcopy(result)
    allocated["memory"]["peak_allocated_bytes"] = 1
    assert judgement(found.after, replace(before, result=allocated)) is Judgement.same, "two kinds of bytes"
    assert judgement(before, replace(before, result=None, state="oom")) is Judgement.lost
    assert judgement(replace(before, result=None, state="oom"), before) is Judgement.unjudged
    for state in ("queued", "cancelled"):
        assert judgement(before, replace(before, result=None, state=state)) is Judgement.unjudged
    found = compared([before], [replace(before, result=None, state="oom")])
    assert changes.conclusion(found) == "worse: a (no result)"
    assert changes.table(found).rows == (("a", "9,412", "oom", "-", "-", "-", "-", "no result"),)


def test_fewer_than_three_rounds_are_not_judged() -> None:
    found = compared([measured("a", [1.0] * 6)], [measured("a", [2.0])])
    assert not found.is_judged
    assert changes.conclusion(found) == "not judged: both sides need at least 3 rounds (measure=standard)"


def test_the_document_has_the_ratio_with_its_interval() -> None:
    found = compared([measured("a", [1.0] * 3)], [measured("a", [1.1] * 3)])
    content = changes.document(found)
    assert content["regressions"] == ["a"]
    assert content["points"][0]["judgement"] == "slower"
    assert content["points"][0]["time_per_token_ratio"] == pytest.approx({"low": 1.1, "middle": 1.1, "high": 1.1})
    (row,) = changes.table(found).rows
    assert row == ("a", "9,412", "9,412", "+10.0 %", "+10.0 % to +10.0 %", "23.8 MiB", "0.0 %", "slower")
