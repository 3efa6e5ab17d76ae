"""Explains term by term why a run with ZeRO-3 has a higher peak than the same run with ZeRO-2 (DeepSpeed issue 3734).

The issue prints resting and peak bytes of both runs, and neither batch nor sequence. So activations, which both runs
have in common, are computed from the peak of one run and inserted into the other: no number is fitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.published_cases import GIB, Comparison, table
from benchmarks.published_peak import peer_model
from zero_runtime.plan import ZeroPlan
from zero_runtime.predict.memory.peer_deepspeed import DeepSpeedSettings, deepspeed
from zero_runtime.predict.memory.peers import Moment, PeerMemory, PeerTerm

MODEL, WORLD = "llama_13b", 8  # the issue says 13B; the resting bytes are those of 13,015,864,320 parameters
RESTING_TOLERANCE = 0.01


@dataclass(frozen=True)
class StagePair:
    """Published and predicted bytes of both runs; `activations` are the least and most that the ZeRO-2 row allows."""

    two: PeerMemory
    three: PeerMemory
    published: dict[str, dict[str, float]]
    activations: tuple[float, float]

    def three_peak(self, activations: float, *, built_sharded: bool) -> float:
        """GiB at the peak of forward and backward with ZeRO-3; gradients have a permanent buffer."""
        memory = self.three if not built_sharded else _three(memory_efficient_linear=True)
        return memory.at(Moment.ALWAYS, Moment.COMPUTE) / GIB + activations


def stage_pair() -> StagePair:
    """Activations follow from ZeRO-2's peak: parameters, optimizer states, the reduce bucket, activations, and between
    none and all of the gradients' shard, which grows while activations shrink."""
    published = {row["zero"]: {key: float(row[key]) for key in ("resting_gib", "peak_gib")} for row in _rows()}
    two = deepspeed(peer_model(MODEL), ZeroPlan.from_stage(2), WORLD)
    peak = published["2"]["peak_gib"]
    most = peak - two.at(Moment.ALWAYS, Moment.COMPUTE) / GIB
    least = most - two.at(Moment.GRADIENTS) / GIB
    return StagePair(two, _three(memory_efficient_linear=False), published, (least, most))


def _rows() -> list[dict[str, str]]:
    return table("stage_against_stage.csv")


def _three(*, memory_efficient_linear: bool) -> PeerMemory:
    settings = DeepSpeedSettings(memory_efficient_linear=memory_efficient_linear)
    return deepspeed(peer_model(MODEL), ZeroPlan.from_stage(3), WORLD, settings)


def comparisons(pair: StagePair) -> Iterator[Comparison]:
    """Resting bytes of both runs, and the peak of ZeRO-3 with the activations of ZeRO-2 (the middle of their range)."""
    for zero, memory in (("2", pair.two), ("3", pair.three)):
        resting = memory.resting / GIB
        published = pair.published[zero]["resting_gib"]
        yield Comparison(f"ZeRO-{zero}, resting", resting, published, abs(resting / published - 1) <= RESTING_TOLERANCE)
    least, most = (pair.three_peak(one, built_sharded=False) for one in pair.activations)
    published = pair.published["3"]["peak_gib"]
    yield Comparison("ZeRO-3, peak", (least + most) / 2, published, least <= published <= most)


def terms(memory: PeerMemory) -> Iterator[PeerTerm]:
    """The terms of forward and backward."""
    return (term for term in memory.terms if term.moment is not Moment.STEP)
