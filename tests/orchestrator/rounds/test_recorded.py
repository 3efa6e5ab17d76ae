"""What the rounds of a result say: which of them count, and whether two results were measured in the same ones."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from orchestrator.rounds import recorded
from orchestrator.rounds.intervals import CONTROLLED
from orchestrator.rounds.recorded import Round


def of(number: int, ms: float, share: float | None = 0.0, *, used: bool = True) -> Round:
    return Round(number, 0.0, [ms, ms], share, used)


def result(*rounds: Round, session: str | None = "s") -> dict[str, Any]:
    return {"rounds": [asdict(one) for one in rounds], "session": session, "batch": {"tokens_per_step": 100}}


def test_a_loaded_round_is_measured_again_and_the_one_with_less_load_counts_whatever_its_speed() -> None:
    rounds = [of(1, 10.0), of(2, 30.0, 0.5), of(3, 11.0, None)]
    assert recorded.to_repeat(rounds) == [2]
    calmer = recorded.with_repeated(rounds, of(2, 40.0, 0.2))
    assert recorded.to_repeat(calmer) == [2], "it is loaded still"
    assert recorded.step_medians_ms(result(*calmer)) == [10.0, 40.0, 11.0]
    assert recorded.to_repeat(recorded.with_repeated(calmer, of(2, 41.0, 0.0))) == []
    rounds = [of(1, 10.0), of(2, 30.0, 0.5)]
    assert recorded.step_medians_ms(result(*recorded.with_repeated(rounds, of(2, 5.0, 0.9)))) == [10.0, 30.0]


def test_rounds_that_stay_loaded_do_not_count_if_enough_others_do() -> None:
    calm = [of(number, 10.0) for number in range(1, CONTROLLED + 1)]
    loaded = [of(8, 90.0, 0.4), of(8, 80.0, 0.5, used=False), of(9, 70.0, None)]
    left = recorded.without_loaded([*calm, *loaded])
    assert [one.number for one in left if one.used] == [*range(1, CONTROLLED + 1), 9], "an unknown load is none"
    fewer = [*calm[1:], *loaded[:2]]
    assert recorded.without_loaded(fewer) == fewer


def test_points_that_took_turns_are_compared_in_the_rounds_that_both_have() -> None:
    faster = result(*(of(number, float(number)) for number in (1, 2, 3, 4)))
    slower = result(of(4, 8.0, 0.5, used=False), of(4, 7.0), *(of(number, 2.0 * number) for number in (2, 1)))
    pair = recorded.in_turns(faster, slower)
    assert pair is not None
    assert list(map(recorded.step_medians_ms, pair[:2])) == [[1.0, 2.0, 4.0], [2.0, 4.0, 7.0]]
    assert pair.reference is None, "rounds without reference work"


def with_reference(number: int, steps: list[float], reference: list[float]) -> recorded.Round:
    return recorded.Round(number, 0.0, steps, others_share=0.0, reference_ms=reference)


def test_rounds_with_reference_work_count_by_geometric_means() -> None:
    one = result(*(with_reference(number, [1.0, 1.0, 8.0], [2.0, 2.0, 16.0]) for number in range(6)))
    other = result(*(with_reference(number, [3.0], [1.0]) for number in range(6)))
    pair = recorded.in_turns(one, other)
    assert pair is not None
    assert pair.reference == pytest.approx([4.0] * 6)
    assert recorded.step_medians_ms(pair.one) == pytest.approx([2.0] * 6)
    fewer = recorded.in_turns({**one, "rounds": one["rounds"][:5]}, other)
    assert fewer is not None
    assert fewer.reference is None, "too few rounds for it"
    assert recorded.step_medians_ms(fewer.one) == [1.0] * 5
    earlier = {**one, "rounds": [{**each, "reference_work": 1} for each in one["rounds"]]}
    another = recorded.in_turns(earlier, other)
    assert another is not None
    assert another.reference is None, "two versions of the code, with other work"


def test_points_without_a_common_session_or_with_too_few_common_rounds_took_no_turns() -> None:
    one = result(of(1, 1.0), of(2, 1.0), of(3, 1.0))
    assert recorded.in_turns(one, one) is not None
    assert recorded.in_turns(one, result(of(1, 1.0), of(2, 1.0))) is None
    assert recorded.in_turns(one, {**one, "session": "t"}) is None
    alone = {**one, "session": None}
    assert recorded.in_turns(alone, alone) is None


def test_a_result_without_rounds_is_readable_and_not_ranked() -> None:
    earlier = {"batch": {"tokens_per_step": 100}}
    assert (recorded.ms_per_token(earlier), recorded.is_ranked(earlier)) == ([], False)
    assert not recorded.is_ranked(result(of(1, 1.0), of(2, 1.0)))
    assert recorded.is_ranked(result(of(1, 1.0), of(2, 1.0), of(3, 1.0)))
    assert recorded.ms_per_token(result(of(1, 5.0))) == [0.05]


def test_the_first_step_of_a_round_is_counted_only_if_it_is_the_only_one_or_the_round_is() -> None:
    assert recorded.counted([9.0, 1.0, 2.0], rounds=2) == [1.0, 2.0]
    assert recorded.counted([9.0], rounds=2) == [9.0]
    assert recorded.counted([9.0, 1.0], rounds=1) == [9.0, 1.0]


def test_a_round_of_another_version_is_read_without_what_only_that_version_recorded() -> None:
    assert Round.of({**asdict(of(1, 10.0)), "stalled": {"cpu": 0.5}}) == of(1, 10.0)
