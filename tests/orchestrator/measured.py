"""Measurements that are made up, in place of those of `zlab calibrate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from orchestrator.wings.predict import memory_cache, speed
from orchestrator.wings.predict.speed import TimingJob

SEGMENT_S = 1e-3  # of each segment at each micro-batch: a larger one is faster for a token
UPDATE_S = 1e-6  # for an element: a rank with a shard is faster


class Measured:
    """Takes the place of ranks that measure; notes the kinds of the jobs. factor: of all times."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.factor = 1.0

    def __call__(self, jobs: Sequence[TimingJob], hardware: str, told: Callable[[str], None], **_: Any) -> int:
        self.kinds += [job.kind for job in jobs]
        speed.store(hardware, [(job, self._answer(job)) for job in jobs])
        return len(jobs)

    def _answer(self, job: TimingJob) -> dict[str, Any]:
        if job.kind == "links":
            return {}
        if job.kind != "segments":
            return {"points": [[0.0, 0.0], [1.0, self.factor * UPDATE_S if job.kind == "update" else 0.0]]}
        trace = next(value for key, value in self._traces(job).items())
        marks = [[kind, unit] for _, kind, unit in trace["linear"]["trace"]["marks"]]
        found: dict[tuple[int, int], int] = {}
        for kind, unit in marks:
            found[kind, unit] = found.get((kind, unit), 0) + 1
        table = [[kind, unit, [self.factor * SEGMENT_S] * count] for (kind, unit), count in found.items()]
        table.append([4, -1, [self.factor * SEGMENT_S]])  # the end of the backward
        nothing = {"seconds": 0.0, "marks": [], "units": [], "segments": [0.0]}  # a real step without a surplus
        return {"table": table, "anchor": nothing}

    def _traces(self, job: TimingJob) -> dict[str, Any]:
        answers = memory_cache.answers([job.config], [job.config])
        return {key: answer for key, answer in answers.items() if key.startswith(memory_cache.TRACE)}
