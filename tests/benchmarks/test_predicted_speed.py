"""How the benchmark of predicted speed counts errors, order and regret; its measurements are not repeated here."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from benchmarks import predicted_speed, timed_points
from benchmarks.predicted_speed import Compared, regret, report, tau, what_choose_takes
from orchestrator.wings.predict.speed import Speed
from zero_runtime.predict.timing.step_time import StepSeconds


def speed_of(seconds: float, tokens: int) -> Speed:
    return Speed(StepSeconds(seconds, 0, 0, 0, 0, 0, 0), tokens / seconds)


def row(
    label: str, predicted_s: float, *rounds: list[float], space: str = "a", tokens: int = 1, final: Sequence[float] = ()
) -> Compared:
    predicted = [speed_of(predicted_s, tokens)] * len(rounds)
    return Compared(space, label, predicted, list(rounds), tokens, list(final))


def test_an_error_is_the_median_of_those_of_the_rounds_with_their_own_predictions() -> None:
    """In the second round the machine is half as fast, for the parts and for the steps."""
    rounds = [[0.5, 1.0, 9.0], [2.0, 2.0, 2.0], [1.0, 1.0, 1.0]]
    one = Compared("a", "a", [speed_of(seconds, 1) for seconds in (1.1, 2.4, 1.3)], rounds, 1)
    assert one.error == pytest.approx(0.2)
    assert one.predicted_s == 1.3


def test_only_pairs_whose_ranges_do_not_overlap_have_an_order() -> None:
    fast, slow = row("fast", 1.0, [1.0, 1.1]), row("slow", 2.0, [1.5, 1.6])
    near = row("near", 0.5, [1.05], [1.2])  # overlaps with fast
    assert tau([fast, slow]) == (1.0, 1)
    assert tau([fast, near]) == (0.0, 0)
    wrong = row("wrong", 3.0, [0.1, 0.2])
    assert tau([fast, slow, wrong]) == pytest.approx((-1 / 3, 3))
    assert tau([fast, row("elsewhere", 9.0, [0.1], space="b")]) == (0.0, 0)
    outlier = row("outlier", 2.0, [*[1.5] * 20, 0.1])  # beyond the p10
    assert tau([fast, outlier]) == (1.0, 1)


def test_speeds_are_compared_by_the_token() -> None:
    small, large = row("small", 1.0, [1.0], tokens=1), row("large", 2.0, [2.0], tokens=4)
    assert tau([small, large]) == (1.0, 1)
    assert what_choose_takes([small, large]).label == "large"
    small, large = (replace(one, final=[one.seconds[0]] * 4) for one in (small, large))
    assert regret([small, large]).best == ("large",)


def test_what_is_chosen_is_the_fastest_in_the_first_round_of_those_that_are_near_by_prediction() -> None:
    best = row("best", 5.0, [1.0], [1.0])  # predicted too slow to be run
    first, second = row("first", 1.0, [2.0], [1.5]), row("second", 1.2, [1.9], [1.8])
    assert what_choose_takes([best, first, second]) is second


def test_what_is_chosen_of_a_tie_is_the_fastest_by_prediction() -> None:
    first, second = row("first", 1.0, [1.8, 2.2, 2.0], [1.5] * 3), row("second", 1.2, [1.9, 2.0, 1.9], [1.8] * 3)
    assert what_choose_takes([first, second]) is first


def test_what_is_chosen_is_judged_by_the_further_turns_alone() -> None:
    """In the rounds the other point seems a fifth faster; in the further turns both drift by a factor of eight, and in
    each turn the other takes a tenth longer."""
    other = [1.1, 2.2, 4.4, 8.8]
    chosen = row("chosen", 1.0, [1.0], [1.0], final=[1.0, 2.0, 4.0, 8.0])
    found = regret([chosen, row("other", 1.1, [1.2], [0.4], final=other), row("slow", 1.2, [3.0], [3.0])])
    assert (found.ratio, found.best) == (0.0, ("chosen",))
    chosen = replace(chosen, final=[1.1 * one for one in other])
    found = regret([chosen, row("other", 1.1, [1.2], [0.4], final=other)])
    assert (found.ratio, found.best) == (pytest.approx(0.1), ("other",))


def test_what_is_chosen_is_the_best_if_no_other_point_may_be() -> None:
    assert regret([row("only", 1.0, [1.0], [1.0]), row("slow", 2.0, [2.0], [2.0])]) == (0.0, 0.0, 0.0, ("only",))


def test_the_report_has_each_point_and_the_claims() -> None:
    rows = [row("x", 1.0, [1.0], [1.0], final=[1.1] * 4), row("y", 2.0, [2.0], [2.0], final=[1.0] * 4)]
    text = "\n".join(report(rows, 3.0))
    assert "2 points in 1 spaces: median error 0.0%" in text
    assert "within 3% of the best in 0 of 1 spaces" in text
    assert "| a | 2 | x | y | +10.0% | +10.0% to +10.0% | 2 (4) | 0.0% | 1.00 (1) |" in text
    assert "| a | y | 2000.0 | 2000.0 | 2000.0 | 2000.0 | 2 | +0.0% |" in text


def test_a_rank_that_fails_ends_the_wait_for_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ranks:
        def join(self, timeout: float) -> bool:
            raise RuntimeError(f"rank 0 has failed, seen in {timeout} s")

    monkeypatch.setattr(timed_points, "POLL_S", 0.0)
    found, _sender = multiprocessing.Pipe(duplex=False)
    with pytest.raises(RuntimeError, match="rank 0 has failed"):
        timed_points._received(found, cast(Any, Ranks()))


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
