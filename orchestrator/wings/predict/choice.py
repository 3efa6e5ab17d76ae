"""The candidates of `zlab choose`: rows that fit at a micro-batch, with their predicted speed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from orchestrator.config.schema import RunConfig
from orchestrator.text.units import size
from orchestrator.wings.predict.fit_rows import Fit, extra_work
from orchestrator.wings.predict.speed import Speed, interval, speed_of
from orchestrator.wings.predict.step import with_micro
from zero_runtime.predict.timing.step_time import StepSeconds

NEAR = 0.75  # of the highest predicted speed: what a prediction may be wrong by
EQUAL = 0.0005  # a smaller difference is shown as none
# The parts of a step's time in the words of a reason.
PARTS = {
    "model_s": "forward and backward",
    "slowed_s": "computing beside collectives",
    "runtime_s": "copies",
    "exposed_s": "waiting for collectives",
    "update_s": "the optimizer's step",
    "control_s": "sums over the ranks",
    "surplus_s": "what a real step takes besides",
}


@dataclass(frozen=True, eq=False)
class Candidate:
    """A row of `fit` at one micro-batch. speed: None if it is not predicted."""

    fit: Fit
    micro: int
    speed: Speed | None = None

    @property
    def label(self) -> str:
        return f"{self.fit.label}-micro{self.micro}"

    @property
    def config(self) -> RunConfig:
        return with_micro(self.fit.config, self.micro)

    @property
    def overrides(self) -> tuple[str, ...]:
        """The words of a run."""
        batch = self.config.batch
        kept = [word for word in self.fit.overrides if not word.startswith(("batch.micro=", "batch.accumulation="))]
        return (*kept, f"batch.micro={self.micro}", f"batch.accumulation={batch.accumulation}")

    @property
    def needs(self) -> int | None:
        """The memory of the device in use at the peak, with the least that libraries take; None if it is not known."""
        peak = self.fit.memory.peak(self.micro)
        return None if peak is None else peak.total + self.fit.overhead.least

    @property
    def tokens_per_second(self) -> float:
        return 0.0 if self.speed is None else self.speed.tokens_per_second


def candidates(fits: Sequence[Fit], micros: Iterable[int]) -> list[Candidate]:
    """Each row at each micro-batch that fits, without those that compute more than another with the same sharding and
    offload which fits as well: recomputation and a tiled loss save memory, not time."""
    found = [Candidate(one, micro) for micro in micros for one in fits if micro <= one.micro]
    return [one for one in found if not any(_does_less(other, one) for other in found)]


def _does_less(one: Candidate, other: Candidate) -> bool:
    mine, theirs = one.fit.config, other.fit.config
    if one.micro != other.micro or one.fit.group != other.fit.group:
        return False
    if (mine.zero, mine.offload) != (theirs.zero, theirs.offload):
        return False
    work, of_other = extra_work(mine), extra_work(theirs)
    return work != of_other and all(a <= b for a, b in zip(work, of_other, strict=True))


def with_speeds(found: Sequence[Candidate], hardware: str) -> list[Candidate]:
    """The candidates with their predicted speeds, the fastest first; those without a prediction last."""
    predicted = [replace(one, speed=speed_of(replace(one.fit.memory, config=one.config), hardware)) for one in found]
    return sorted(predicted, key=lambda one: -one.tokens_per_second)


def smallest_first(found: Sequence[Candidate]) -> list[Candidate]:
    """The candidate that needs the least memory of a rank first; of equals the faster."""
    return sorted(found, key=lambda one: (one.needs or 0, -one.tokens_per_second))


def larger(one: Candidate, smallest: Candidate) -> str:
    """By how much a candidate needs more memory than the smallest."""
    if one is smallest:
        return "the smallest by prediction"
    return f"{size((one.needs or 0) - (smallest.needs or 0))} more"


def shortlist(ranked: Sequence[Candidate], count: int) -> list[Candidate]:
    """The fastest that may be the best if predictions err by up to 1 - NEAR. ranked: the fastest first."""
    return [one for one in ranked if one.tokens_per_second >= NEAR * ranked[0].tokens_per_second][:count]


class ShortRun(NamedTuple):
    """Tokens per second of a candidate: predicted, and those of its short run."""

    predicted: float
    median: float


def best_run(runs: Mapping[str, ShortRun], fastest: Sequence[str]) -> str:
    """Of the runs that tie for the fastest the one with the highest prediction: between them a short run decides by
    chance."""
    return max(fastest, key=lambda label: (runs[label].predicted, runs[label].median))


def fastest_of_rows(ranked: Sequence[Candidate]) -> list[Candidate]:
    """Of each row its fastest micro-batch, in the same order."""
    seen: dict[str, Candidate] = {}
    for one in ranked:
        seen.setdefault(one.fit.label, one)
    return list(seen.values())


def reason(one: Candidate, best: Candidate) -> str:
    """Why a candidate is predicted to be slower than the best: what takes the most additional time for a token."""
    if one.speed is None or best.speed is None:
        return "not predicted"
    if one is best:
        return "the fastest by prediction"
    slower = 1 - one.tokens_per_second / best.tokens_per_second
    if slower < EQUAL:
        return "as fast by prediction"
    mine, theirs = (_per_token(each) for each in (one, best))
    name = max(PARTS, key=lambda part: mine[part] - theirs[part])
    return f"{slower:.1%} slower{', a tie' if is_tie(one, best) else ''}: {PARTS[name]}"


def is_tie(one: Candidate, best: Candidate) -> bool:
    """Whether the range of a candidate's predicted speed reaches that of a faster one."""
    ends = [interval(each.speed) for each in (one, best)]
    return ends[0] is not None and ends[1] is not None and ends[0][1] >= ends[1][0]


def _per_token(one: Candidate) -> dict[str, float]:
    assert one.speed is not None
    batch, time = one.config.batch, one.speed.time
    tokens = batch.micro * batch.accumulation * batch.seq
    return {name: getattr(time, name) / tokens for name in StepSeconds.__dataclass_fields__}
