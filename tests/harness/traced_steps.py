"""One micro-batch of a configuration as predictions trace it."""

from __future__ import annotations

from typing import NamedTuple

from orchestrator.config.schema import RunConfig
from orchestrator.wings.predict.activations import Tracing
from zero_runtime.predict.memory.activation_count import Trace
from zero_runtime.predict.timing.segments import SegmentTable
from zero_runtime.predict.timing.work import Work


class CountedStep(NamedTuple):
    """The storages of one micro-batch, and the work of its segments."""

    trace: Trace
    work: SegmentTable[Work]


def counted_step(config: RunConfig, *, whole: bool = False) -> CountedStep:
    """Traces one micro-batch and counts its work. Of blocks that repeat few are traced, unless `whole` is asked for."""
    micro = config.batch.micro
    found = Tracing(config, whole=whole).one(micro)
    assert not isinstance(found, dict), found
    linear, work = found
    return CountedStep(linear.trace, work.at(micro))


def trace_of(config: RunConfig, *, whole: bool = False) -> Trace:
    return counted_step(config, whole=whole).trace
