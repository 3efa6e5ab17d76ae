"""Whether a point is slower than another: how often equal ones are called so, and how often slower ones are not."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from orchestrator.rounds.comparison import MISTAKEN, Comparison, SpeedVerdict, compare, of_turns

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
WEATHER = [1.0, 1.4, 0.8, 2.0, 1.1, 1.3]
TRIES = 300


def result(times: list[float], session: str = "one", reference: list[float] | None = None) -> dict[str, Any]:
    """A result whose rounds have these times, of one token a step."""
    rounds = [{"number": number, "step_ms": [ms]} for number, ms in enumerate(times)]
    for each, ms in zip(rounds, reference or (), strict=False):
        each |= {"reference_ms": [ms], "reference_work": 1}
    return {"rounds": rounds, "session": session, "batch": {"tokens_per_step": 1}}


def separate(one: list[float], other: list[float], **asked: Any) -> Comparison:
    return compare(result(one), result(other, "another"), **asked)


def test_what_both_points_met_in_a_round_is_not_in_their_ratio() -> None:
    one, other = [102 * each for each in WEATHER], [100 * each for each in WEATHER]
    shared = compare(result(one), result(other))
    assert shared[:3] == pytest.approx((1.02, 1.02, 1.02))
    apart = separate(one, other)
    assert apart.ratio == pytest.approx(1.02)
    assert apart.low < 0.8 < 1.2 < apart.high


def test_the_speed_of_the_cores_is_not_in_a_ratio_with_reference_work() -> None:
    generator = random.Random(4)
    reference = [generator.choice([0.7, 1.0, 1.4]) for _ in range(24)]
    one = [1.05 * each**0.9 for each in reference]
    found = compare(result(one, reference=reference), result([1.0] * 24, reference=[1.0] * 24))
    assert found[:3] == pytest.approx((1.05, 1.05, 1.05))
    assert found.verdict is SpeedVerdict.slower
    assert of_turns(one, [1.0] * 24).verdict is SpeedVerdict.unclear
    assert of_turns([1.1] * 6, [1.0] * 6, [1.0] * 6)[:3] == pytest.approx((1.1, 1.1, 1.1)), "cores at one speed"


def test_cores_that_kept_one_speed_cost_no_degree_of_freedom() -> None:
    reference = [1.001, 0.999, 1.002, 1.0, 0.998, 1.0]
    assert of_turns(WEATHER, [1.0] * 6, reference) == of_turns(WEATHER, [1.0] * 6)


def test_reference_work_that_tells_nothing_makes_no_equal_points_differ() -> None:
    generator = random.Random(5)
    wrong = 0
    for _ in range(TRIES):
        one, other, reference = ([math.exp(generator.gauss(0, 0.1)) for _ in range(6)] for _ in range(3))
        wrong += of_turns(one, other, reference).verdict is SpeedVerdict.slower
    # Four standard deviations above the probability MISTAKEN are not seen by chance.
    assert wrong <= MISTAKEN * TRIES + 4 * (MISTAKEN * TRIES) ** 0.5


@pytest.mark.parametrize("reference", [True, False])
def test_the_interval_contains_the_true_ratio_about_as_often_as_it_says(reference: bool) -> None:
    generator = random.Random(6)
    contained, share = 0, 1 - 2 * MISTAKEN
    for _ in range(TRIES):
        cores = [math.exp(generator.gauss(0, 0.2)) for _ in range(24)]
        one = [1.05 * each * math.exp(generator.gauss(0, 0.05)) for each in cores]
        found = of_turns(one, [1.0] * 24, cores) if reference else of_turns(one, cores)
        contained += found.low <= 1.05 <= found.high
    assert abs(contained - share * TRIES) <= 4 * (share * (1 - share) * TRIES) ** 0.5


def test_rounds_of_different_points_have_to_be_as_many_to_be_the_same_rounds() -> None:
    with pytest.raises(ValueError, match="shorter"):
        of_turns(WEATHER, WEATHER[:5])


def leaves_one_behind(generator: random.Random, speeds: list[float], noise: float) -> bool:
    """Whether a sweep of points with these speeds calls one of them slower than the best; each has six rounds."""
    points = [[math.exp(generator.gauss(0, noise)) / speed for _ in range(6)] for speed in speeds]
    best, *others = sorted(points, key=statistics.median)
    return any(of_turns(other, best, family=len(others)).verdict is SpeedVerdict.slower for other in others)


def test_equal_points_stay_a_tie_however_much_their_rounds_differ() -> None:
    generator = random.Random(2)
    broken = sum(leaves_one_behind(generator, [1.0] * 4, 0.14) for _ in range(TRIES))
    # Each rival of the best is called slower with a probability of MISTAKEN / 3, or of twice that because the best is
    # chosen after the measurement. Four standard deviations more are not seen by chance.
    expected = 2 * MISTAKEN * TRIES
    assert broken <= expected + 4 * expected**0.5


def test_a_point_that_is_slower_is_not_in_the_tie() -> None:
    generator = random.Random(3)
    assert all(leaves_one_behind(generator, [1.0, 0.95], 0.01) for _ in range(TRIES))


def test_more_rivals_ask_for_more_evidence() -> None:
    one, other = [1.030, 1.055, 1.025, 1.060, 1.040, 1.045], [1.0] * 6
    assert of_turns(one, other).verdict is SpeedVerdict.slower
    assert of_turns(one, other, family=200).verdict is SpeedVerdict.unclear


def test_rounds_that_were_not_shared_need_a_larger_difference_than_shared_ones() -> None:
    one, other = [103 * each for each in WEATHER], [100 * each for each in WEATHER]
    assert compare(result(one), result(other), family=3).verdict is SpeedVerdict.slower
    assert separate(one, other, family=3).verdict is SpeedVerdict.unclear
    assert separate([20 * each for each in one], other, family=3).verdict is SpeedVerdict.slower
    assert separate([2.0] * 3, [1.0] * 3).verdict is SpeedVerdict.slower, "rounds without any spread"


@pytest.mark.parametrize("more", [1.002, 0.998])
@pytest.mark.parametrize("noise", [0.05, 0.001])
def test_a_difference_above_the_hidden_one_shows_and_one_below_does_not(more: float, noise: float) -> None:
    generator = random.Random(11)
    one, other = [100 * math.exp(generator.gauss(0.0, noise)) for _ in range(12)], [100.0] * 12
    found = of_turns(one, other, family=3)
    scale = more * (1 + found.hidden) / found.ratio  # a common factor of all rounds changes no spread
    again = of_turns([scale * each for each in one], other, family=3)
    assert again.hidden == pytest.approx(found.hidden)
    assert (again.verdict is SpeedVerdict.slower) == (more > 1)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ((1.05, 1.04, 1.06), SpeedVerdict.slower),
        ((1.06, 0.99, 1.13), SpeedVerdict.unclear),  # as large, but rounds without a change are as likely
        ((1.02, 1.005, 1.03), SpeedVerdict.same),
        ((1.0, 0.99, 1.01), SpeedVerdict.same),
        ((1.0, 0.97, 1.06), SpeedVerdict.unclear),
        ((0.95, 0.90, 0.97), SpeedVerdict.faster),
    ],
)
def test_slower_is_what_the_rounds_show_and_what_is_more_than_equal(
    found: tuple[float, float, float], verdict: SpeedVerdict
) -> None:
    assert Comparison(*found, equal=0.025).verdict is verdict
    mirrored = Comparison(1 / found[0], 1 / found[2], 1 / found[1], equal=0.025).verdict
    opposite = {SpeedVerdict.slower: SpeedVerdict.faster, SpeedVerdict.faster: SpeedVerdict.slower}
    assert mirrored is opposite.get(verdict, verdict)


# ---- rounds that were recorded: benchmarks/rank_repeats.py -----------------------------------------------------------


def recorded_result(point: Mapping[str, Any]) -> dict[str, Any]:
    """A point of a repetition, as a result. Its load is not needed: left out rounds are not in the file."""
    made = result(point["rounds_ms"], reference=point["reference_ms"])
    for each, number in zip(made["rounds"], point["rounds"], strict=True):
        each["number"] = number
    return made


def repetitions(name: str) -> list[list[dict[str, Any]]]:
    kept = json.loads((RESULTS / name).read_text())
    return [[recorded_result(point) for point in one["points"].values()] for one in kept]


def test_recorded_sweeps_of_equal_points_are_ties_and_slower_points_are_behind() -> None:
    winners = Counter[tuple[int, ...]]()
    for points in repetitions("rank_repeats_cpu_2026-11-25.json"):
        best = min(points, key=lambda one: statistics.median(each["step_ms"][0] for each in one["rounds"]))
        verdicts = [one is not best and compare(one, best, family=3).verdict is SpeedVerdict.slower for one in points]
        winners[tuple(number for number, behind in enumerate(verdicts) if not behind)] += 1
    assert winners == {(1, 3): 20}


def test_recorded_slowdowns_of_five_percent_are_found_and_equal_code_is_never_called_slower() -> None:
    found = {"slower": Counter[SpeedVerdict](), "same": Counter[SpeedVerdict]()}
    for first, second, first_slower, second_slower in repetitions("slowdowns_found_cpu_2026-11-25.json"):
        for before, after in ((first, first_slower), (second, second_slower)):
            found["slower"][compare(after, before, equal=0.025).verdict] += 1
        for before, after in ((first, second), (first_slower, second_slower)):
            found["same"][compare(after, before, equal=0.025).verdict] += 1
    assert found["slower"] == {SpeedVerdict.slower: 40}
    assert not found["same"][SpeedVerdict.slower]


# ---- sweeps that are made of recorded rounds ----------------------------------------------------------------------

ROWS, ROUNDS = 4, 6
Step = tuple[float, float | None]  # logarithms: of a row's time in a round, and of the reference work next to it


def centred(values: list[float]) -> list[float]:
    mean = statistics.mean(values)
    return [value - mean for value in values]


def stages(name: str) -> list[list[list[Step]]]:
    """One sweep: its rounds, each with its rows, which are equal but for what they met."""
    seconds = json.loads((RESULTS / f"stages_cpu_{name}.json").read_text())["seconds"]
    rows = [centred(list(map(math.log, seconds[f"stage{stage}"]))) for stage in range(ROWS)]
    return [[[(value, None) for value in values] for values in zip(*rows, strict=True)]]


def shared_cores() -> list[list[list[Step]]]:
    found = []
    for points in json.loads((RESULTS / "slowdowns_found_cpu_2026-11-25.json").read_text()):
        rows = [
            list(zip(centred(list(map(math.log, one["rounds_ms"]))), map(math.log, one["reference_ms"]), strict=True))
            for one in points["points"].values()
        ]
        found.append([list(values) for values in zip(*rows, strict=True)])
    return found


RECORDED = {
    "quiet": (stages, "bf16_2026-11-26"),
    "loaded": (stages, "bf16_2026-11-22"),
    "drifting": (stages, "fp32_2026-11-22"),
    "shared cores": (shared_cores,),
}


def drawn(generator: random.Random, sweeps: list[list[list[Step]]]) -> list[list[Step]]:
    """The rows of an invented sweep of ROUNDS rounds in their order, in each of which the rows have changed places."""
    sweep = generator.choice(sweeps)
    start = generator.randrange(len(sweep) - ROUNDS + 1)
    rounds = [generator.sample(one, len(one)) for one in sweep[start : start + ROUNDS]]
    return [list(row) for row in zip(*rounds, strict=True)]


def compared(one: list[Step], other: list[Step], slower: float = 0.0) -> Comparison:
    """The rows, as if the first was slower by so much."""
    times = [[math.exp(value) for value, _ in row] for row in (one, other)]
    reference = [math.exp(mine - theirs) for (_, mine), (_, theirs) in zip(one, other, strict=True)
                 if mine is not None and theirs is not None]  # fmt: skip
    return of_turns([(1 + slower) * ms for ms in times[0]], times[1], reference or None, family=ROWS - 1)


@pytest.mark.parametrize("name", RECORDED)
def test_sweeps_of_recorded_rounds_have_no_false_first_and_the_power_that_is_told(name: str) -> None:
    """Equal rows: in fewer than 5 % of the sweeps one is called slower. Rows that are slower by what the rounds of
    another such sweep are told to show: half of them are found, and of those slower by half as much again 3 of 4."""
    read, *names = RECORDED[name]
    sweeps, generator = read(*names), random.Random(7)
    false, found, told = 0, Counter[float](), list[float]()
    for _ in range(TRIES):
        rows = drawn(generator, sweeps)
        best, *others = sorted(rows, key=lambda row: statistics.median(value for value, _ in row))
        false += any(compared(one, best).verdict is SpeedVerdict.slower for one in others)
        told.append(compared(rows[0], rows[1]).hidden)
    shown = statistics.median(told)
    for _ in range(TRIES):
        one, other, *_ = drawn(generator, sweeps)
        for times in (1.0, 1.5):
            found[times] += compared(one, other, times * shown).verdict is SpeedVerdict.slower
    print(
        name, f"false {false / TRIES:.1%}, shown {shown:.1%}, found {found[1.0] / TRIES:.0%} {found[1.5] / TRIES:.0%}"
    )
    assert false < 0.05 * TRIES
    assert found[1.0] >= 0.5 * TRIES - 4 * (0.25 * TRIES) ** 0.5
    assert found[1.5] >= 0.75 * TRIES
