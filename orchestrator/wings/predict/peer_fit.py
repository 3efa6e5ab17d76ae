"""The memory of a step by another engine's byte rules: of a point that it trains, and of the rows of `zlab fit --as
ENGINE`.

The engine's own terms are those of its `memory_of` (orchestrator/wings/engines/contract.py), from the rules of
zero_runtime/predict/memory/peers.py. The activations are those that are counted for the same model here, since they
belong to the model's code and not to the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from orchestrator import wings
from orchestrator.config.engine import EngineKind
from orchestrator.config.schema import Device, RunConfig
from orchestrator.wings.predict.fit_rows import verdict_of
from orchestrator.wings.predict.memory_cache import hash_of, recalled
from orchestrator.wings.predict.peer_limits import limits
from orchestrator.wings.predict.step import ConfigMemory
from zero_runtime.optim.config_base import OptimizerConfig
from zero_runtime.optim.groups import goes_without_decay
from zero_runtime.plan import Partition
from zero_runtime.predict.memory import peers
from zero_runtime.predict.memory.activation_count import LinearTrace
from zero_runtime.predict.memory.device_overhead import DeviceOverhead
from zero_runtime.predict.memory.peer_reserved import peer_reserved
from zero_runtime.predict.memory.peers import Moment, PeerMemory, PeerModel, PeerParam
from zero_runtime.predict.memory.reserved import Reserved
from zero_runtime.predict.memory.step_memory import Peak


@dataclass(frozen=True)
class PeerFit:
    """One row. micro, most_micro, given: as those of `Fit`. activations: the most bytes of them in one micro-batch of
    the size `counted`; peak: with the engine's terms, as allocated. step: the counts of the point. params: elements of
    each parameter of its units. ranks_per_node, host_limit_bytes: ranks of a node, and host memory for what they
    offload; None if it is not known, or is what the ranks compute in."""

    label: str
    overrides: tuple[str, ...]
    config: RunConfig
    memory: PeerMemory
    limit_bytes: int
    overhead: DeviceOverhead
    micro: int
    capped: bool
    activations: int
    peak: int
    step: ConfigMemory
    params: tuple[tuple[int, ...], ...]
    most_micro: int
    given: int = 0
    ranks_per_node: int = 1
    host_limit_bytes: int | None = None

    @property
    def counted(self) -> int:
        """The micro-batch that the bytes are of."""
        return self.given or max(self.micro, 1)

    @property
    def host_of_node(self) -> int:
        return self.memory.host_bytes * self.ranks_per_node

    @property
    def verdict(self) -> str:
        """As `Fit.verdict`, with the segments that torch has by default."""
        return verdict_of(self.micro, self.most_micro, self.reserved(), self.overhead, self.limit_bytes)

    def reserved(self, *, expandable: bool = False) -> Reserved | None:
        """What torch's allocator reserves on a GPU; None on a CPU. It replays every tensor of three steps."""
        part = self.step.part(self.counted)
        if self.config.resources.device is not Device.cuda or part is None:
            return None

        def replayed() -> list[int]:
            found = peer_reserved(
                part.linear.at(self.counted),
                self.memory,
                self.params,
                micro_batches=self.config.batch.accumulation,
                other=(part.buffers, *(size * self.counted for size in part.inputs)),
                expandable=expandable,
            )
            return [found.allocated, found.reserved]

        key = f"reserved-{hash_of(self.step.name, self.memory)}-{self.counted}-{expandable}"
        return Reserved(*(recalled(key, replayed) if self.step.name else replayed()))

    def _given_dict(self) -> dict[str, Any]:
        found = self.reserved()
        return {"fits": self.verdict, "reserved_bytes": found and found.reserved}

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for other programs."""
        return {
            "engine": self.memory.engine,
            "label": self.label,
            "overrides": list(self.overrides),
            "ranks": self.config.resources.ranks,
            "micro": self.micro,
            "micro_capped": self.capped,
            "micro_counted": self.counted,
            "limit_bytes": self.limit_bytes,
            "resting_bytes": self.memory.resting,
            "activations_bytes": self.activations,
            "peak_bytes": self.peak,
            **(self._given_dict() if self.given else {}),
            "host_bytes_per_rank": self.memory.host_bytes,
            "host_bytes_per_node": self.host_of_node,
            "host_limit_bytes_per_node": self.host_limit_bytes,
            "terms": [[term.what, term.moment.value, term.nbytes] for term in self.memory.terms],
        }


def _megatron(model: PeerModel, config: RunConfig) -> PeerMemory:
    is_sharded = config.zero.plan.optimizer is Partition.SHARDED
    return peers.megatron(model, config.data_ranks, distributed_optimizer=is_sharded)


def _nanotron(model: PeerModel, config: RunConfig) -> PeerMemory:
    return peers.nanotron(model, config.zero.plan, config.data_ranks)


# Engines that no run has: their rules alone are known.
RULES_ONLY: dict[str, Callable[[PeerModel, RunConfig], PeerMemory]] = {"megatron": _megatron, "nanotron": _nanotron}
NAMES = tuple(sorted({*wings.ENGINES, *RULES_ONLY}))


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


def rules_for(
    engine: str, config: RunConfig, shapes: Mapping[str, Any], *, by_default: bool = False
) -> PeerMemory | None:
    """The engine's bytes on a rank of the configuration, whatever its own engine is; None if its rules do not know
    these settings (peer_limits.py says which). by_default: with torch's default form of the optimizer, which most
    scripts have; our runs have the fused one."""
    model = replace(peer_model(shapes, config.optimizer.rule), by_default=by_default)
    if engine in RULES_ONLY:
        return RULES_ONLY[engine](model, config)
    asked = replace(config, engine=replace(config.engine, kind=EngineKind(engine)))
    found: PeerMemory | None = wings.load(wings.ENGINES[engine]).memory_of(model, asked)
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
    engine: str,
    label: str,
    overrides: tuple[str, ...],
    memory: ConfigMemory,
    shapes: Mapping[str, Any],
    limit_bytes: int,
    overhead: DeviceOverhead,
    *,
    given: int = 0,
    ranks_per_node: int = 1,
    host_limit_bytes: int | None = None,
) -> PeerFit | None:
    """How large a micro-batch fits, or whether the given one does; None if the engine's rules do not know the settings,
    or nothing was counted."""
    if limits(engine, memory.config):
        return None
    fused, rules = (rules_for(engine, memory.config, shapes, by_default=one) for one in (False, True))
    if rules is None or fused is None or not memory.parts:
        return None
    micro = largest(rules, memory, limit_bytes - overhead.most)
    most = largest(fused, memory, limit_bytes - overhead.least)
    if host_limit_bytes is not None and rules.host_bytes * ranks_per_node > host_limit_bytes:
        micro = most = 0
    if given:
        micro, most = (given if one >= given else 0 for one in (micro, most))
    counted = given or max(micro, 1)
    part, peak = memory.part(counted), peak_of(rules, memory, counted)
    assert part is not None
    assert peak is not None
    return PeerFit(
        label,
        overrides,
        memory.config,
        rules,
        limit_bytes,
        overhead,
        micro,
        not given and micro == memory.highest_traced,
        _highest(part.linear, counted)[1],
        peak.total,
        memory,
        tuple(tuple(math.prod(shape) for _, shape in unit["shapes"]) for unit in shapes["units"]),
        most,
        given,
        ranks_per_node,
        host_limit_bytes,
    )


def largest(rules: PeerMemory, memory: ConfigMemory, room: int) -> int:
    """The largest traced micro-batch whose peak is at most `room` bytes; 0 if none is."""

    def fits(micro: int) -> bool:
        peak = peak_of(rules, memory, micro)
        return peak is not None and peak.total <= room

    return max((one for part in memory.parts for one in _bisected(part.linear, fits)), default=0)


def _bisected(linear: LinearTrace, fits: Callable[[int], bool]) -> list[int]:
    """The largest micro-batch of a trace that fits, as a list of at most one; larger ones need more."""
    if not fits(linear.low):
        return []
    low, high = linear.low, linear.high + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return [low]


def _highest(linear: LinearTrace, micro: int) -> tuple[int, int]:
    """The number of events after which the most bytes of activations exist, and these bytes."""
    more = micro - linear.low
    levels = ((base + slope * more, count) for segment in linear.segments for count, (base, slope) in segment)
    nbytes, count = max(levels)
    return count, nbytes
