"""The memory of a step by another engine's byte rules: of a point that it trains, and of the rows of `zlab fit --as
ENGINE`.

The engine's own terms are those of its `memory_of` (orchestrator/wings/engines/contract.py), from the rules of
zero_runtime/predict/memory/peers.py. The activations are those that are counted for the same model here, since they
belong to the model's code and not to the engine.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from orchestrator import wings
from orchestrator.config.schema import Device, RunConfig
from orchestrator.planning.point import Point
from orchestrator.wings.predict.fit_rows import Fit
from orchestrator.wings.predict.memory_cache import hash_of, recalled
from orchestrator.wings.predict.peer_limits import limits
from orchestrator.wings.predict.step import ConfigMemory, given_micro
from orchestrator.wings.predict.target import Target
from zero_runtime.optim.config_base import OptimizerConfig
from zero_runtime.optim.groups import goes_without_decay
from zero_runtime.predict.memory.activation_count import LinearTrace
from zero_runtime.predict.memory.device_overhead import DeviceOverhead
from zero_runtime.predict.memory.peer_reserved import peer_reserved
from zero_runtime.predict.memory.peers import Moment, PeerMemory, PeerModel, PeerParam
from zero_runtime.predict.memory.reserved import Reserved
from zero_runtime.predict.memory.step_memory import Peak


@dataclass(frozen=True, kw_only=True)
class PeerFit(Fit):
    """A row by the rules of its point's engine. params: elements of each parameter of its units."""

    rules: PeerMemory
    params: tuple[tuple[int, ...], ...]

    @property
    def resting_bytes(self) -> int:
        """Bytes between the last backward and the step, without activations."""
        return self.rules.resting

    @property
    def activations(self) -> int:
        """The most bytes of activations in one micro-batch."""
        part = self.memory.part(self.counted)
        assert part is not None, "a row has the trace of its micro-batch"
        return _highest(part.linear, self.counted)[1]

    @cached_property
    def reserved(self) -> Reserved | None:
        """Bytes that torch's allocator reserves on a GPU with its default segments; None on a CPU."""
        return self.replayed(expandable=False)

    def replayed(self, *, expandable: bool) -> Reserved | None:
        """Replay every tensor of three steps: the bytes reserved with either kind of segments."""
        part, micro = self.memory.part(self.counted), self.counted
        if self.config.resources.device is not Device.cuda or part is None:
            return None

        def numbers() -> list[int]:
            found = peer_reserved(
                part.linear.at(micro),
                self.rules,
                self.params,
                micro_batches=self.config.batch.accumulation,
                other=(part.buffers, *(size * micro for size in part.inputs)),
                expandable=expandable,
            )
            return [found.allocated, found.reserved]

        key = f"reserved-{hash_of(self.memory.name, self.rules)}-{micro}-{expandable}"
        return Reserved(*(recalled(key, numbers) if self.memory.name else numbers()))

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for other programs."""
        point = {"label": self.label, "overrides": list(self.overrides), "ranks": self.config.resources.ranks}
        micro = {"micro": self.micro, "micro_capped": self.capped, "micro_counted": self.counted}
        sizes = {"limit_bytes": self.limit_bytes, "resting_bytes": self.resting_bytes}
        sizes |= {"activations_bytes": self.activations, "peak_bytes": self.peak.total}
        given: dict[str, Any] = {}
        if self.given:
            given = {"fits": self.verdict, "reserved_bytes": self.reserved and self.reserved.reserved}
        host = {"host_bytes_per_rank": self.host_bytes, "host_bytes_per_node": self.host_of_node}
        terms = [[term.what, term.moment.value, term.nbytes] for term in self.rules.terms]
        limit = {"host_limit_bytes_per_node": self.host_limit_bytes, "terms": terms}
        return {"engine": self.rules.engine, **point, **micro, **sizes, **given, **host, **limit}


def peer_model(shapes: Mapping[str, Any], rule: OptimizerConfig) -> PeerModel:
    """The parameters, from the shapes that a child process has found. A block has its frozen parameters too, whatever
    units they are in."""
    params = {
        name: PeerParam(tuple(shape), unit["trainable"], not (rule.no_decay and goes_without_decay(name, shape)))
        for unit in shapes["units"]
        for name, shape in unit["shapes"]
    }
    blocks = tuple(tuple(params.pop(name) for name in names) for names in shapes["blocks"])
    return PeerModel(blocks, tuple(params.values()), rule.state_bytes)


def rules_for(config: RunConfig, shapes: Mapping[str, Any], *, by_default: bool = False) -> PeerMemory | None:
    """The bytes of the point's engine on a rank; None if its rules do not know these settings (peer_limits.py says
    which). by_default: with torch's default form of the optimizer, which most scripts have; our runs have the fused
    one."""
    model = replace(peer_model(shapes, config.optimizer.rule), by_default=by_default)
    found: PeerMemory | None = wings.load(wings.ENGINES[config.engine.kind]).memory_of(model, config)
    if found is None or config.resources.device is Device.cuda:
        return found
    # Ranks on a CPU compute in the host's memory.
    return replace(found, terms=tuple(replace(term, on_host=False) for term in found.terms))


def peak_of(rules: PeerMemory, memory: ConfigMemory, micro: int) -> Peak | None:
    """The worst moment of a step by an engine's rules; None for a micro-batch that was not traced. `states` of it are
    the engine's terms: by component, and in its own words what is none."""
    part = memory.part(micro)
    if part is None:
        return None
    count, activations = _highest(part.linear, micro)
    moments = rules.worst(activations, micro_batches=memory.config.batch.accumulation)
    states: dict[str, int] = {}
    for term in rules.terms:
        if term.moment in moments and not term.on_host:
            name = term.state or term.what
            states[name] = states.get(name, 0) + term.nbytes
    computes, more = Moment.COMPUTE in moments, micro - part.linear.low
    lines = part.linear.parts(count) if computes else ((0, 0),) * 3
    blocks, outside, backward = (base + slope * more for base, slope in lines)
    inputs = sum(part.inputs) * micro
    total = sum(states.values()) + blocks + outside + backward + inputs + part.buffers
    when = "in forward and backward" if computes else "in the optimizer's step"
    return Peak(total, states, blocks, outside, backward, inputs=inputs, buffers=part.buffers, when=when)


def peer_fit(
    point: Point, memory: ConfigMemory, shapes: Mapping[str, Any], target: Target, overhead: DeviceOverhead
) -> PeerFit | None:
    """How large a micro-batch fits, or whether the given one does; None if the rules of the point's engine do not know
    the settings, or nothing was counted. target.device_bytes must be known."""
    assert target.device_bytes is not None
    if limits(point.config):
        return None
    fused, rules = (rules_for(point.config, shapes, by_default=one) for one in (False, True))
    if rules is None or fused is None or not memory.parts:
        return None
    limit, given = target.device_bytes // target.ranks_share, given_micro(point.config, point.overrides)
    host = target.host_bytes if target.device is Device.cuda else None
    micro, most = largest(rules, memory, limit - overhead.most), largest(fused, memory, limit - overhead.least)
    if host is not None and rules.host_bytes * target.ranks_per_node > host:
        micro = most = 0
    if given:
        micro, most = (given if one >= given else 0 for one in (micro, most))
    peak = peak_of(rules, memory, given or max(micro, 1))
    assert peak is not None, "the micro-batch was traced"
    fits = (micro, most, not given and micro == memory.highest_traced, peak, rules.host_bytes, 0, 0)
    params = tuple(tuple(math.prod(shape) for _, shape in unit["shapes"]) for unit in shapes["units"])
    row = (point.label, point.overrides, (), memory, limit, overhead, *fits, target.ranks_per_node, host, given)
    return PeerFit(*row, rules=rules, params=params)


def largest(rules: PeerMemory, memory: ConfigMemory, room: int) -> int:
    """The largest traced micro-batch whose peak is at most `room` bytes; 0 if none is."""

    def total(micro: int) -> int:
        peak = peak_of(rules, memory, micro)
        assert peak is not None, "the micro-batch was traced"
        return peak.total

    spans = [range(part.linear.low, part.linear.high + 1) for part in memory.parts]
    return max((span[count - 1] for span in spans if (count := bisect_right(span, room, key=total))), default=0)


def _highest(linear: LinearTrace, micro: int) -> tuple[int, int]:
    """The number of events after which the most bytes of activations exist, and these bytes."""
    more = micro - linear.low
    levels = ((base + slope * more, count) for segment in linear.segments for count, (base, slope) in segment)
    nbytes, count = max(levels)
    return count, nbytes
