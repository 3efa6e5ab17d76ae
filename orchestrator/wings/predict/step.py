"""The predicted memory of a configuration's step for any micro-batch, from the answers of memory_cache.py."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrator.config.schema import Device, RunConfig
from orchestrator.wings.kinds.kind import sample_of
from orchestrator.wings.predict.memory_cache import activations_key, hash_of, recalled, trace_prefix, units_key
from orchestrator.wings.predict.tensor_messages import TensorMessages, TensorSent, messages_in
from orchestrator.wings.predict.transport import SHM, transport
from zero_runtime.flat_layout import FlatLayout, LayoutRules
from zero_runtime.offload.memory import Moves, host_bytes, nvme_bytes
from zero_runtime.offload_plan import OffloadBytes, Tier
from zero_runtime.optim.configs import STATE_ITEMSIZE_BYTES, whole_itemsize
from zero_runtime.optim.matrix_owners import OwnedMatrix, most_sent_elements, owned_matrices, working_bytes
from zero_runtime.precision import ITEMSIZE_BYTES, MixedPrecision
from zero_runtime.predict.memory.activation_count import LinearTrace
from zero_runtime.predict.memory.counted_unit import CountRules
from zero_runtime.predict.memory.reserved import Reserved, reserved_peak
from zero_runtime.predict.memory.step_memory import (
    Peak,
    StatesReplay,
    StepMemory,
    StepPeaks,
    replay_states,
)
from zero_runtime.predict.messages import CollectiveCounts, exchanged, gathered, reduced, signs_bytes
from zero_runtime.predict.timing.segments import SegmentTable
from zero_runtime.predict.timing.work import LinearWork, Work
from zero_runtime.state_bytes import ElementBytes, StateBytes, UnitSize, element_bytes, model_state_bytes

MICRO = "batch.micro"
Answers = Mapping[str, Mapping[str, Any]]
Units = list[tuple[UnitSize, MixedPrecision]]


def with_micro(config: RunConfig, micro: int) -> RunConfig:
    """The configuration with another micro-batch and the same accumulation."""
    accumulation = config.batch.accumulation
    global_size = micro * accumulation * config.batch_ranks
    batch = replace(config.batch, micro=micro, accumulation=accumulation, global_size=global_size)
    return replace(config, batch=batch)


def given_micro(config: RunConfig, words: Sequence[str]) -> int:
    """The micro-batch that the words of a line give; 0 if they leave it open."""
    return config.batch.micro if any(word.partition("=")[0].lstrip("+") == MICRO for word in words) else 0


def with_share(config: RunConfig, micro: int) -> RunConfig:
    """The configuration with another micro-batch, which divides a rank's share of the same global batch."""
    share = config.batch.micro * config.batch.accumulation
    return replace(config, batch=replace(config.batch, micro=micro, accumulation=share // micro))


def units_of(config: RunConfig, shapes: Mapping[str, Any]) -> Units:
    """The sizes of the units on a rank, with their dtypes, from the shapes that a child process has found."""
    on_cuda = config.resources.device is Device.cuda
    away = (Tier.HOST, Tier.NVME) if on_cuda else (Tier.NVME,)
    units = []
    for unit in shapes["units"]:
        size = UnitSize.of(
            _layout(config, shapes, unit),
            trainable=unit["trainable"],
            state_bytes=config.optimizer.rule.matrix_state_bytes if unit.get("matrices") else None,
            is_root=unit["is_root"],
            params_offloaded=unit["offloaded"] and config.offload.params in away,
            optimizer_offloaded=unit["offloaded"] and config.offload.optimizer in away,
            separate_memory=on_cuda,
        )
        units.append((size, MixedPrecision(**unit["precision"])))
    return units


def _layout(config: RunConfig, shapes: Mapping[str, Any], unit: Mapping[str, Any]) -> FlatLayout:
    shards = config.zero.plan.shard_count(config.data_ranks)
    aligned = config.zero.wire.aligned_numel(config.parallel.tp)
    rules = LayoutRules(shards, config.data_ranks, int(shapes["block_numel"]), aligned)
    named = [(name, tuple(shape)) for name, shape in unit["shapes"]]
    coded = unit["precision"].get("weights") is not None
    return rules.layout(named, trainable=unit["trainable"], coded=coded)


def matrices_of(config: RunConfig, shapes: Mapping[str, Any]) -> list[OwnedMatrix]:
    """The matrices that the optimizer updates whole, with the ranks that own them."""
    layouts = [_layout(config, shapes, unit) for unit in shapes.get("units", ()) if unit.get("matrices")]
    full_shapes = {name: tuple(shape) for name, shape in shapes.get("full_shapes", {}).items()}
    return owned_matrices(layouts, config.zero.plan.shard_count(config.data_ranks), full_shapes)


@dataclass(frozen=True)
class ConfigMemory:
    """The memory of one configuration's step on a rank. parts: for the micro-batches of each trace, in their order.
    works: of the same traces, read when one is needed. largest_numels: elements of the largest parameter of each unit.
    matrices: those that are updated whole. name: under which results of it are kept in the cache; empty if they are
    not. full_numels: elements of each unit in the full
    model, of which a rank of a tensor-parallel group has a slice; empty: the same. tensor: the messages of that
    group."""

    config: RunConfig
    units: Units
    rules: CountRules
    parts: tuple[StepMemory, ...]
    works: tuple[Callable[[], LinearWork], ...] = field(default=(), kw_only=True)
    largest_numels: tuple[int, ...] = field(default=(), kw_only=True)
    matrices: tuple[OwnedMatrix, ...] = field(default=(), kw_only=True)
    name: str = field(default="", kw_only=True)
    full_numels: tuple[int, ...] = field(default=(), kw_only=True)
    tensor: TensorMessages = field(default=TensorMessages(), kw_only=True)

    def full_numel(self, *, trainable: bool) -> int:
        """The number of trained, or of frozen, parameters of the full model."""
        numels = self.full_numels or tuple(size.numel for size, _ in self.units)
        pairs = zip(numels, self.units, strict=True)
        return sum(numel for numel, (size, _) in pairs if size.trainable == trainable)

    @property
    def flops_per_token(self) -> int:
        """Operations that a token needs by the usual convention: 6 for each trained parameter, 4 for each frozen one,
        whatever attention and recomputation add."""
        return 6 * self.full_numel(trainable=True) + 4 * self.full_numel(trainable=False)

    def part(self, micro: int) -> StepMemory | None:
        """The memory of the trace that has this micro-batch; None if none has."""
        place = self._place(micro)
        return None if place is None else self.parts[place]

    def _place(self, micro: int) -> int | None:
        """Which of the traces has this micro-batch."""
        ranges = (part.peaks for part in self.parts)
        return next((place for place, one in enumerate(ranges) if one.low <= micro <= one.high), None)

    def work(self, micro: int) -> SegmentTable[Work] | None:
        """The work of the segments of a micro-batch; None if it was not traced."""
        place = self._place(micro)
        return None if place is None else self.works[place]().at(micro)

    def peak(self, micro: int) -> Peak | None:
        """The worst moment of a step; None for a micro-batch that was not traced."""
        part = self.part(micro)
        return None if part is None else part.peak(micro)

    def reserved(self, micro: int, at_most: int | None = None) -> Reserved | None:
        """Bytes that torch's caching allocator reserves at the peak on a GPU; None if the micro-batch was not traced.

        at_most: more need not be counted to its end.
        """
        part = self.part(micro)
        if part is None:
            return None

        def replayed() -> list[int]:
            found = reserved_peak(
                part.linear.at(micro),
                self.units,
                self.rules,
                prefetch=self.config.zero.prefetch,
                other=(part.buffers, *(size * micro for size in part.inputs)),
                at_most=math.inf if at_most is None else at_most,
            )
            return [found.allocated, found.reserved]

        key = f"reserved-{self.name}-{micro}-{at_most}"
        return Reserved(*(recalled(key, replayed) if self.name else replayed()))

    def largest(self, limit_bytes: int) -> int:
        """The largest traced micro-batch whose peak is at most the limit; 0 if none is."""
        return next(filter(None, (part.largest(limit_bytes) for part in reversed(self.parts))), 0)

    @property
    def highest_traced(self) -> int:
        return max((part.peaks.high for part in self.parts), default=0)

    def away(self, *, stepped: bool = True) -> OffloadBytes:
        """The bytes that a rank offloads to host memory and to the scratch file. stepped: False before the first
        step."""
        return nvme_bytes(self.units, self.moves, stepped=False) if self._in_file and not stepped else self._away

    @property
    def _in_file(self) -> bool:
        return self.config.offload.uses_nvme

    @functools.cached_property
    def _away(self) -> OffloadBytes:
        """The bytes that it offloads in steps."""
        if self._in_file:
            return nvme_bytes(self.units, self.moves)
        separate = any(size.separate_memory for size, _ in self.units)
        return host_bytes(self.units, self.moves) if separate else OffloadBytes()

    @property
    def moves(self) -> Moves:
        """What decides the sizes of offloaded shards, and how many are in transfer together."""
        config, plan = self.config, self.config.offload.plan()
        return Moves(
            config.zero.plan.shard_count(config.data_ranks),
            config.zero.prefetch,
            config.batch.accumulation,
            tuple(STATE_ITEMSIZE_BYTES[held.dtype] / held.per for held in config.optimizer.rule.held_states),
            1 if plan.scratch is None else plan.scratch.ahead,
            config.offload.params is Tier.NVME,
        )

    def host_bytes(self, micro: int) -> int:
        """Host memory of a rank for what it offloads, activations (`recompute.offload`) included."""
        part = None if self.config.recompute.offload == "none" else self.part(micro)
        if part is None or not any(part.linear.trace.on_host):
            return self.away().host
        return self.away().host + part.linear.at(micro).total().host

    def sent_bytes(self) -> int:
        """The bytes of data that a rank sends in one steady step (arXiv 1910.02054, section 7, in the dtypes used).

        How often a unit is gathered is read from the replayed schedule: a backward may need frozen parameters several
        times, and small units (`zero.unit_numel`) may be gathered more often than twice. If no micro-batch was traced,
        trained units count as in the closed form and frozen ones are left out. With matrices that are updated whole,
        the most of any rank. With tensor parallelism, the messages of one group in addition.
        """
        config, ranks, plan = self.config, self.config.data_ranks, self.config.zero.plan
        group_ranks, groups = plan.group_ranks(ranks), ranks // plan.group_ranks(ranks)
        counts = self.collective_counts()
        wire, splits, total = config.zero.wire, plan.outer_sharding is not None, self.gathered_bytes()
        for size, kind in self.units:
            held, train = size.padded_numel // group_ranks, size.trainable
            total += exchanged(held, groups, kind.stored_bytes).nbytes * (counts.exchanges or 0) * train
            if config.optimizer.rule.compresses_in(sys.maxsize):
                total += signs_bytes(size.padded_numel, ranks) * train
                continue
            one = reduced(wire, held, group_ranks, groups, ITEMSIZE_BYTES[kind.reduce], stays_split=splits)
            total += one.nbytes * counts.reductions * train
        total += self.tensor_sent().nbytes * config.batch.accumulation
        return total + most_sent_elements(self.matrices, plan.shard_count(ranks)) * whole_itemsize(
            config.optimizer.rule
        )

    def gathered_bytes(self, *, at_most: int | None = None) -> int:
        """The bytes that a rank sends in a step to gather parameters within its group. at_most: gathers of each unit
        that count."""
        wire, plan = self.config.zero.wire, self.config.zero.plan
        ranks, total = plan.group_ranks(self.config.data_ranks), 0
        for (size, kind), gathers in zip(self.units, self._gathers(), strict=True):
            held = size.padded_numel // ranks
            one = gathered(wire, plan, held, ranks, kind.stored_bytes, trainable=size.trainable)
            total += one.nbytes * (gathers if at_most is None else min(gathers, at_most))
        return total

    def collective_counts(self) -> CollectiveCounts:
        """How often the closed form gathers and reduces each trained element in a step."""
        config = self.config
        return CollectiveCounts.of(
            config.zero.plan, config.batch.accumulation, reduces_at_boundary=config.zero.reduce_at_boundary
        )

    def tensor_sent(self) -> TensorSent:
        """What a rank sends to its tensor-parallel group in one micro-batch."""
        return messages_in(self.config, self.tensor)

    def gathered_again(self, *, trainable: bool) -> int:
        """The elements of trained, or of frozen, parameters that the replayed schedule gathers in a step beyond the
        closed form, each as often as it does."""
        closed = self.collective_counts().gathers if trainable else 0
        units = zip(self.units, self._gathers(), strict=True)
        return sum((gathers - closed) * size.numel for (size, _), gathers in units if size.trainable == trainable)

    def _gathers(self) -> Sequence[int]:
        """How often the replayed schedule gathers each unit in a step; without a trace as in the closed form."""
        if self.parts:
            return (self.part(self.config.batch.micro) or self.parts[0]).peaks.gathers
        closed = self.collective_counts().gathers
        return [closed * size.trainable for size, _ in self.units]


class Memories:
    """The memory of configurations from the answers of memory_cache.answers. What several share is computed once.

    recalls: the answers are those of the cache, unchanged, so that what follows from them is kept there too.
    """

    def __init__(self, answers: Answers, *, recalls: bool = False) -> None:
        self._answers, self._recalls = answers, recalls
        self._linear: dict[str, LinearTrace] = {}
        self._peaks: dict[tuple[object, ...], StepPeaks] = {}
        self._replayed: dict[tuple[object, ...], StatesReplay] = {}

    def of(self, config: RunConfig) -> ConfigMemory | None:
        """The memory of a configuration; None if the model cannot be built. Without a trace it has no parts."""
        key = units_key(config)
        shapes = self._answers.get(key)
        if shapes is None or "units" not in shapes:
            return None
        units, rules = units_of(config, shapes), rules_of(config, shapes)
        prefix = trace_prefix(config)
        traces = [name for name in self._answers if name.startswith(prefix)]
        memory = ConfigMemory(
            config,
            units,
            rules,
            (),
            largest_numels=tuple(max(math.prod(shape) for _, shape in unit["shapes"]) for unit in shapes["units"]),
            matrices=tuple(matrices_of(config, shapes)),
            name=hash_of(key, sorted(traces), rules, *_deciding(config)) if self._recalls else "",
            full_numels=tuple(unit["numel"] for unit in shapes["units"]),
            tensor=TensorMessages.of_plain(shapes["tensor"]),
        )
        read, labels = (one * config.batch.accumulation for one in sample_of(config).nbytes)
        found = [
            (
                StepMemory(
                    functools.partial(self._linear_of, trace),
                    self._peaks_of(memory, trace, shapes),
                    (read, labels),
                    shapes["buffer_bytes"],
                ),
                functools.partial(self._work_of, trace),
            )
            for trace in traces
        ]
        found.sort(key=lambda one: (one[0].peaks.low, one[0].peaks.high))
        return replace(memory, parts=tuple(part for part, _ in found), works=tuple(work for _, work in found))

    def _peaks_of(self, memory: ConfigMemory, trace: str, shapes: Mapping[str, Any]) -> StepPeaks:
        """The peaks of the micro-batches of one trace, which is only read if they are not in the cache."""

        def computed() -> dict[str, Any]:
            linear = self._linear_of(trace)
            names = [unit["name"] for unit in shapes["units"]]
            return StepPeaks.of(linear, self._replay(memory, linear), names).plain()

        same = (trace, *self._same(memory))  # points of a sweep may differ in nothing that counts here
        if same not in self._peaks:
            key = f"peaks-{memory.name}-{trace.removeprefix(trace_prefix(memory.config))}"
            self._peaks[same] = StepPeaks.of_plain(recalled(key, computed) if memory.name else computed())
        return self._peaks[same]

    def unknown(self, config: RunConfig) -> str:
        """Why there is no trace of the configuration; empty if there is one."""
        return str(self._answers.get(activations_key(config), {}).get("unknown", ""))

    def _linear_of(self, trace: str) -> LinearTrace:
        if trace not in self._linear:
            self._linear[trace] = LinearTrace.of_plain(self._answers[trace]["linear"])
        return self._linear[trace]

    def _work_of(self, trace: str) -> LinearWork:
        return LinearWork.of_plain(self._answers[trace]["work"])

    def _replay(self, memory: ConfigMemory, linear: LinearTrace) -> StatesReplay:
        # The runtime's half of a step depends on the order of the marks alone: see step_memory.py.
        key = (*self._same(memory), tuple((kind, unit) for _, kind, unit in linear.trace.marks))
        if key not in self._replayed:
            prefetch = memory.config.zero.prefetch
            self._replayed[key] = replay_states(linear.trace, memory.units, memory.rules, prefetch=prefetch)
        return self._replayed[key]

    def _same(self, memory: ConfigMemory) -> tuple[object, ...]:
        return units_key(memory.config), memory.rules, *_deciding(memory.config)


def _deciding(config: RunConfig) -> tuple[object, ...]:
    """What a replay depends on next to its units, rules and marks: prefetches, and where shards are stored."""
    return config.zero.prefetch, config.offload.params, config.offload.optimizer, config.resources.device


def bytes_of_element(config: RunConfig) -> ElementBytes:
    """Bytes of the optimizer, and of error feedback, for each trained element."""
    return element_bytes(config.zero.plan, config.optimizer.rule, config.zero.wire, world=config.data_ranks)


def states_of(config: RunConfig, units: Units) -> StateBytes:
    """The model states of a rank by the closed forms."""
    ranks, micro_batches = config.data_ranks, config.batch.accumulation
    return model_state_bytes(
        config.zero.plan, units, world=ranks, micro_batches=micro_batches, **bytes_of_element(config)
    )


def rules_of(config: RunConfig, shapes: Mapping[str, Any]) -> CountRules:
    """By which the runtime allocates the tensors of the units."""
    ranks, plan = config.data_ranks, config.zero.plan
    shard_count = plan.shard_count(ranks)
    matrices, rule = matrices_of(config, shapes), config.optimizer.rule
    return CountRules(
        plan,
        shard_count,
        replica_count=ranks // shard_count,
        micro_batches=config.batch.accumulation,
        state_bytes=shapes["state_bytes"],
        by_messages=config.resources.device is not Device.cuda and ranks > 1,
        reads_peers=ranks > 1 and transport(config) == SHM,
        params_in_file=config.offload.params is Tier.NVME,
        reduces_at_boundary=config.zero.reduce_at_boundary,
        wire=config.zero.wire,
        kept_bytes=bytes_of_element(config)["kept_bytes"],
        updating_bytes=working_bytes(matrices, shard_count, whole_itemsize(rule)),
    )


def traced(configs: Sequence[RunConfig], micros: Sequence[int]) -> list[RunConfig]:
    """The configurations to ask memory_cache.answers for, so that these micro-batches are traced for all of them."""
    return [with_micro(config, micro) for config in configs for micro in micros]
