"""Points take turns in a rotated order, and the steps of a run are divided among its rounds."""

from __future__ import annotations

import pytest

from orchestrator.rounds.order import TurnOrder, rotated, round_sizes


def test_each_turn_begins_with_the_next_point() -> None:
    assert [rotated("abc", turn) for turn in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]
    assert rotated([], 3) == []


@pytest.mark.parametrize(
    ("steps", "rounds", "sizes"), [(60, 6, [10] * 6), (7, 3, [2, 2, 3]), (25, 1, [25]), (2, 6, [1, 1])]
)
def test_rounds_have_equally_many_steps_but_for_one(steps: int, rounds: int, sizes: list[int]) -> None:
    assert round_sizes(steps, rounds) == sizes


def had(order: TurnOrder[str], turns: int) -> str:
    found = []
    for _ in range(turns):
        name = order.next()
        assert name is not None
        assert name == order.next(), "whose turn it is changes only when the turn ends"
        found.append(name)
        order.end_turn(name)
    return "".join(found)


def test_nobody_has_a_turn_before_all_had_the_one_before() -> None:
    assert had(TurnOrder("abc"), 9) == "abcbcacab"


def test_a_point_that_leaves_is_passed_over_and_those_with_more_to_do_come_last() -> None:
    order = TurnOrder("abc")
    assert had(order, 4) == "abcb"
    order.leave("c")
    order.end_turn("c")
    assert order.names == ["a", "b"]
    assert had(order, 3) == "aab"
    order.leave("a")
    assert had(order, 2) == "bb"
    order.leave("b")
    assert order.next() is None
