"""The rounds in a result: written by the ranks of a point, read by everything that compares points. Pure.

[Note: a loaded round]
A run that wants all cores gets 1 - s of them if other processes take the share s, so their load alone can make one
point slower than another. Rounds with a share of at least NOTABLE_SHARE are measured again after all others, in passes:
at most PASSES of them, and none after one that made no round calm, as next to a load that does not end. Of the
measurements of a round the one with the smallest share counts. A round that was loaded each time does not count, as
long as at least CONTROLLED others do. All of this depends on the load alone, never on the speed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from orchestrator.rounds.intervals import CONTROLLED, LEAST

# Up to a tenth, a load is within the range of most rows' steps; a larger share could decide the order.
NOTABLE_SHARE = 0.1
PASSES = 3
REFERENCE_WORK = 2  # the version of the work in worker/core_speed.py


@dataclass
class Round:
    """One round of a point. number: from 1. began: seconds since the epoch. step_ms: of each counted step.

    others_share: the share of the cores that other processes took; None if unknown. used: whether it counts.
    joules_per_step: energy of all ranks' devices, over all steps of the round; None if it was not measured.
    reference_ms: for each counted step the time of the reference work next to it, the geometric mean over the ranks;
    empty where there is none. reference_work: which work that was: times of different work, as two versions of the code
    may have, are not compared.
    """

    number: int
    began: float
    step_ms: list[float]
    others_share: float | None = None
    used: bool = True
    joules_per_step: float | None = None
    reference_ms: list[float] = field(default_factory=list)
    reference_work: int = REFERENCE_WORK

    @property
    def median_ms(self) -> float:
        return statistics.median(self.step_ms)

    @property
    def is_loaded(self) -> bool:
        """See [Note: a loaded round]."""
        return self.others_share is not None and self.others_share >= NOTABLE_SHARE

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Round:
        """The round that a result records. What another version of the code has recorded besides is left out."""
        return cls(**{one.name: record[one.name] for one in fields(cls) if one.name in record})


def counted(steps: Sequence[float], rounds: int) -> Sequence[float]:
    """The steps of a round that count, of a measurement in this many."""
    # Between its rounds a point waits while others run, and its first step finds the caches and the queues of its
    # updates as they left them.
    return steps[1:] if rounds > 1 and len(steps) > 1 else steps


def with_repeated(rounds: Sequence[Round], again: Round) -> list[Round]:
    """The rounds with one that was measured again. See [Note: a loaded round]."""
    before = next(one for one in rounds if one.number == again.number and one.used)
    better = _share(again) < _share(before)
    before.used, again.used = not better, better
    return [*rounds, again]


def to_repeat(rounds: Sequence[Round]) -> list[int]:
    """The numbers of the rounds of which no measurement is calm. See [Note: a loaded round]."""
    return [one.number for one in rounds if one.used and one.is_loaded]


def without_loaded(rounds: Sequence[Round]) -> list[Round]:
    """The rounds, of which loaded ones no longer count, if enough others do. See [Note: a loaded round]."""
    calm = sum(one.used and not one.is_loaded for one in rounds)
    return [replace(one, used=one.used and not (one.is_loaded and calm >= CONTROLLED)) for one in rounds]


def _share(one: Round) -> float:
    return 1.0 if one.others_share is None else one.others_share


def used_rounds(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rounds of a result that count, by number; none in a result of an evaluation."""
    rounds: Sequence[Mapping[str, Any]] = result.get("rounds") or []
    return sorted((one for one in rounds if one.get("used", True)), key=lambda one: int(one["number"]))


def step_medians_ms(result: Mapping[str, Any]) -> list[float]:
    """The median step of each round in milliseconds."""
    return [statistics.median(one["step_ms"]) for one in used_rounds(result)]


def ms_per_token(result: Mapping[str, Any]) -> list[float]:
    """The same for one token."""
    tokens = result["batch"]["tokens_per_step"]
    return [one / tokens for one in step_medians_ms(result)]


def is_ranked(result: Mapping[str, Any]) -> bool:
    """Whether there are enough rounds to compare its speed with another's."""
    return len(used_rounds(result)) >= LEAST


class InTurns(NamedTuple):
    """Two results with the rounds that both have. reference: by round, the time of the reference work next to the steps
    of `one`, divided by that of `other`; None if a round has none, if it is other work, or if there are too few rounds
    for it."""

    one: dict[str, Any]
    other: dict[str, Any]
    reference: list[float] | None


def in_turns(one: Mapping[str, Any], other: Mapping[str, Any]) -> InTurns | None:
    """The rounds that two results share, of which the faster point may have more; None if they took no turns or share
    too few rounds. With reference work the steps of a round count by their geometric mean, as the reference does.
    """
    if not one.get("session") or one["session"] != other.get("session"):
        return None
    numbers = [{each["number"] for each in used_rounds(result)} for result in (one, other)]
    shared = numbers[0] & numbers[1]
    if len(shared) < LEAST:
        return None
    mine, theirs = ([each for each in used_rounds(result) if each["number"] in shared] for result in (one, other))
    work = {each.get("reference_work") for each in (*mine, *theirs)}
    if len(shared) < CONTROLLED or len(work) > 1 or not all(each.get("reference_ms") for each in (*mine, *theirs)):
        return InTurns({**one, "rounds": mine}, {**other, "rounds": theirs}, None)
    reference = [
        statistics.geometric_mean(my["reference_ms"]) / statistics.geometric_mean(their["reference_ms"])
        for my, their in zip(mine, theirs, strict=True)
    ]
    return InTurns({**one, "rounds": _by_means(mine)}, {**other, "rounds": _by_means(theirs)}, reference)


def _by_means(rounds: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    # A median of steps at two speeds is one of the two.
    return [{**each, "step_ms": [statistics.geometric_mean(each["step_ms"])]} for each in rounds]
