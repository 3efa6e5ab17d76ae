"""Which row `fit` takes of those that fit, and what it says of machines and of more ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest

from orchestrator.compose import arguments, compose
from orchestrator.config.schema import Device
from orchestrator.machine.hardware import Hardware
from orchestrator.planning.point import Point
from orchestrator.planning.points import checked_points
from orchestrator.planning.rules.scene import Scene
from orchestrator.wings.predict import fit_rows, more_ranks, take
from orchestrator.wings.predict.choice import Candidate
from orchestrator.wings.predict.fit_rows import Fit, fit_of
from orchestrator.wings.predict.speed import Speed
from orchestrator.wings.predict.step import ConfigMemory
from orchestrator.wings.predict.take import Taken
from orchestrator.wings.predict.target import Target
from zero_runtime.offload_plan import OffloadBytes
from zero_runtime.plan import ZeroPlan
from zero_runtime.predict.memory.counted_unit import CountRules
from zero_runtime.predict.memory.device_overhead import DeviceOverhead
from zero_runtime.predict.memory.reserved import Reserved
from zero_runtime.predict.memory.step_memory import Peak
from zero_runtime.predict.timing.step_time import StepSeconds

LIMIT, LEAST, MOST = 100, 5, 10  # bytes of a rank, and what libraries take of them
LINE = "--plan model=llama_tiny hardware=h100_80gb resources.ranks=8 batch.seq=16"
RULES = CountRules(ZeroPlan.from_stage(0), 1, 1, 1, 8.0, by_messages=False)
NO_TIME = StepSeconds(*[0.0] * 7)


@dataclass(frozen=True)
class Counted(ConfigMemory):
    """A stand-in for counted memory: `each` bytes of tensors for a sequence beside `states` that all ranks share,
    `slack` that the allocator reserves beside them, and `sent` in a step."""

    each: int = 0
    slack: int = 0
    sent: int = 0
    states: int = 0

    def peak(self, micro: int) -> Peak | None:
        held = self.each * micro + self.states // self.config.ranks
        return Peak(held, {}, held, 0, 0, inputs=0, buffers=0, when="in the forward") if 1 <= micro <= 64 else None

    def largest(self, limit_bytes: int) -> int:
        return max((limit_bytes - self.states // self.config.ranks) // self.each, 0)

    def reserved(self, micro: int, at_most: int | None = None) -> Reserved | None:
        held = self.peak(micro)
        return None if held is None else Reserved(held.total, held.total + self.slack)

    def away(self, *, stepped: bool = True) -> OffloadBytes:
        return OffloadBytes()

    def sent_bytes(self) -> int:
        return self.sent


def point(words: str = "zero=stage1", label: str = "row") -> Point:
    found, problems = checked_points(
        compose.compose(arguments.split(f"{LINE} {words}".split())), Scene(Hardware(4, "cpu"), plan_only=True)
    )
    assert problems == []
    return replace(found[0], label=label)


def counted(of: Point, each: int, slack: int = 0, sent: int = 0, states: int = 0) -> Fit:
    memory = Counted(of.config, [], RULES, (), each, slack, sent, states)
    group = [word for word in of.overrides if word.startswith("parallel")]
    target = Target(Device.cuda, LIMIT, 1, None, ranks_per_node=of.config.ranks // of.config.resources.nodes)
    found = fit_of(of.label, of.overrides, memory, target, DeviceOverhead(1, LEAST, MOST), group)
    assert found is not None
    return found


class Asked(NamedTuple):
    """A row of a question: its words, and what `counted` takes."""

    words: str
    each: int
    slack: int = 0
    sent: int = 0


PLAIN, TILED, AGAIN = "zero=stage1", "zero=stage1 loss=tiled", "zero=stage1 recompute=full"
TIGHT = Asked(PLAIN, 80, 15)  # 90 of 100 bytes by its tensors, 105 with what the allocator reserves
# Rows, what is taken with its micro-batch, the second row, and why that is not the first.
QUESTIONS = {
    "a tight row loses to one that computes again": ([TIGHT, Asked(AGAIN, 20, 5)], "row1, micro-batch 4,", None, ""),
    "a tight row hides no row that fits for sure": ([TIGHT, Asked(TILED, 80, 5)], "row1, micro-batch 1,", None, ""),
    "a tight row is taken, and called so, if there is no other": ([TIGHT], "row0, micro-batch 1 (tight),", None, ""),
    "the micro-batch is one for which the allocator has room": (
        [Asked(PLAIN, 20, 35)],
        "row0, micro-batch 2,",
        None,
        "",
    ),
    "rows are compared at the micro-batch that is taken": (
        [Asked(TILED, 40, 30), Asked(PLAIN, 60)],
        "row1, micro-batch 1,",
        "row0",
        "takes the loss in tiles",
    ),
    "bytes count for each token: slices send less in a step, of an eighth of the tokens": (
        [Asked("zero=stage1 parallel.tp=4", 50, 0, 15_700), Asked(PLAIN, 50, 0, 37_100)],
        "row1, micro-batch 1,",
        "row0",
        "sends 3.83 KiB a token, the first 2.26 KiB",
    ),
    "a tensor group over the network waits for a row with more to do that needs none": (
        [
            Asked("zero=stage1 parallel.tp=4 resources.nodes=8", 50, 0, 10),
            Asked(f"{AGAIN} resources.nodes=8", 50, 0, 99),
        ],
        "row1, micro-batch 1,",
        None,
        "",
    ),
    "and is taken if nothing else fits": (
        [Asked("zero=stage1 parallel.tp=4 resources.nodes=8", 50)],
        "row0, micro-batch 1,",
        None,
        "",
    ),
    "a larger batch sends less for a token": (
        [Asked(PLAIN, 80, 0, 3_000), Asked("zero=stage3", 40, 0, 4_500)],
        "row1, micro-batch 2,",
        "row0",
        "sends 188 B a token, the first 141 B",
    ),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_row_that_is_taken_is_one_to_defend(question: str) -> None:
    asked, first, second, why = QUESTIONS[question]
    rows = [counted(point(one.words, f"row{at}"), *one[1:]) for at, one in enumerate(asked)]
    for found in (fit_rows.settled(rows), fit_rows.all_settled(rows)):  # the table's rows, and those of --all
        (choice,) = take.of_machines(found)
        assert take.described(choice.first).startswith(first)
        assert (choice.second and choice.second.fit.label) == second
        assert why == (take.why_second(choice) if second else "")
        # One sum: what is taken is what the table shows and what `--explain` compares.
        assert choice.first.fit in found
        assert (choice.first.fit.used_bytes[1] <= LIMIT) != bool(choice.first.fit.tight)
        assert choice.first.fit.used_bytes[1] == choice.first.fit.reserved.reserved + MOST  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("speeds", "told"),
    [
        ({"a100": (26, 44), "h200": (19, 32)}, "a100 and h200 cannot be told apart: their ranges of speed overlap"),
        ({"a100": (33, 44), "h200": (19, 32)}, "a100: no other known range of speed reaches its own"),
        (
            {"a100": (26, 44), "h200": (19, 32), "h100": (40, 50)},
            "a100 and h100 cannot be told apart: their ranges of speed overlap",
        ),
        (
            {"a100": (26, 44), "h200": (19, 32), "a10": None},
            "a100 and h200 cannot be told apart: their ranges of speed overlap; the others cannot be compared",
        ),
        (
            {"a100": (26, 44), "a10": None},
            "a100: no other known range of speed reaches its own; the others cannot be compared",
        ),
        ({"a10": None, "t4": None}, "no machine is the first, because no speed is known"),
    ],
)
def test_machines_whose_speeds_overlap_cannot_be_told_apart(
    speeds: dict[str, tuple[int, int] | None], told: str
) -> None:
    choices = []
    for name, ends in speeds.items():
        speed = ends and Speed(NO_TIME, sum(ends) / 2, rough=True, within=ends)
        choices.append(Taken(Candidate(counted(point(label=name), 50), 1, speed), None, False))
    assert take.rows_of_machines(choices, None)[-1] == ("decided", told)


@pytest.mark.parametrize(
    ("states", "told"),
    [
        (40 * 24, ["without an offload it fits from 24 ranks on (row)"]),
        (41 * 32, ["without an offload it fits from 40 ranks on (row)"]),
        (10**9, ["without an offload it does not fit with 1,024 ranks either (large)"]),
        (40 * 16, []),
    ],
)
def test_the_number_of_ranks_is_named_from_which_on_no_offload_is_needed(states: int, told: list[str]) -> None:
    nodes = "resources.nodes=2 resources.ranks=16"
    points = [point(f"zero=stage3 {nodes}", "large"), point(f"zero=stage3 recompute=full {nodes}", "row")]

    def fits_of(points: list[Point], **_: object) -> list[Fit]:
        return [counted(one, 40 if one.label == "row" else 95, 10, states=states) for one in points]

    found = more_ranks.enough_ranks(points, fit_rows.all_settled(fits_of(points)), fits_of)
    assert [row.text for row in more_ranks.rows(found)] == told
