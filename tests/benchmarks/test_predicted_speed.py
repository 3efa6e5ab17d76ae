"""How the benchmark of predicted speed counts errors, order and regret; its measurements are not repeated here."""

from __future__ import annotations

import pytest

from benchmarks import predicted_speed
from benchmarks.predicted_speed import Compared, regret, report, tau
from orchestrator.plan.speed import Speed
from zero_runtime.timing.step_time import StepSeconds


def row(label: str, predicted_s: float, *rounds: float, space: str = "a", tokens: int = 1) -> Compared:
    time = StepSeconds(predicted_s, 0, 0, 0, 0, 0, 0)
    return Compared(space, label, Speed(time, tokens / predicted_s), list(rounds), tokens)


def test_an_error_is_that_of_the_median_of_the_rounds() -> None:
    assert row("a", 1.1, 0.5, 1.0, 9.0).error == pytest.approx(0.1)


def test_only_pairs_whose_ranges_do_not_overlap_have_an_order() -> None:
    fast, slow = row("fast", 1.0, 1.0, 1.1), row("slow", 2.0, 1.5, 1.6)
    near = row("near", 0.5, 1.05, 1.2)  # overlaps with fast
    assert tau([fast, slow]) == (1.0, 1)
    assert tau([fast, near]) == (0.0, 0)
    wrong = row("wrong", 3.0, 0.1, 0.2)
    assert tau([fast, slow, wrong]) == pytest.approx((-1 / 3, 3))
    assert tau([fast, row("elsewhere", 9.0, 0.1, space="b")]) == (0.0, 0)


def test_speeds_are_compared_by_the_token() -> None:
    small, large = row("small", 1.0, 1.0, tokens=1), row("large", 2.0, 2.0, tokens=4)
    assert tau([small, large]) == (1.0, 1)
    assert regret([small, large]).label == "large"


def test_what_is_chosen_is_the_fastest_first_round_of_those_that_are_near_by_prediction() -> None:
    best = row("best", 5.0, 1.0, 1.0, 1.0)  # predicted too slow to be run
    first = row("first", 1.0, 2.0, 1.5, 1.5)
    second = row("second", 1.2, 1.9, 1.8, 1.8)
    found = regret([best, first, second])
    assert found.label == "second"
    assert found.slower == pytest.approx(0.8)
    assert found.is_beaten
    assert not regret([first, second]).is_beaten  # in one round it is faster


def test_the_report_has_each_point_and_the_claims() -> None:
    text = "\n".join(report([row("x", 1.0, 1.0, 1.0), row("y", 2.0, 2.0, 2.0)], 3.0))
    assert "2 points in 1 spaces: median error 0.0%" in text
    assert "| a | y | 2000.0 | 2000.0 | 2000.0 | 2000.0 | +0.0% |" in text


def test_the_spaces_are_at_least_forty_points_of_both_models() -> None:
    lines = predicted_speed.SPACES.values()
    points = sum(_points(line) for line in lines)
    assert points >= 40
    assert {line.split()[0] for line in lines} == {"model=llama_tiny", "model=gpt2"}


def _points(line: str) -> int:
    count = 1
    for word in line.split():
        count *= len(word.partition("=")[2].split(","))
    return count
