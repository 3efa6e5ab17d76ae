"""The predicted time of a configuration's step: from what `zlab calibrate` measured on this machine, or, for described
hardware, from its data sheet."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from orchestrator.config.optimizer import Optimizer
from orchestrator.config.parts import plain
from orchestrator.config.schema import Device, RunConfig, to_dict
from orchestrator.config.state_groups import Offload
from orchestrator.machine.hardware import described_cpu
from orchestrator.records.cache import read_cached, write_cached
from orchestrator.text.units import ABSENT, digits
from orchestrator.wings.predict import memory_cache
from orchestrator.wings.predict.rough_time import offloads, outside, peak_flops_per_s, rough_time
from orchestrator.wings.predict.step import ConfigMemory, with_micro
from orchestrator.wings.predict.transport import transport
from zero_runtime.offload_plan import Tier
from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.memory.activation_count import Mark, Trace
from zero_runtime.predict.memory.counted_unit import CountRules
from zero_runtime.predict.timing.costs import FREE, CollectiveCost, Curve, StepCosts
from zero_runtime.predict.timing.data_sheet import LONGEST, SHORTEST
from zero_runtime.predict.timing.segments import SegmentTable
from zero_runtime.predict.timing.step_time import StepSeconds, step_time, surplus_s
from zero_runtime.state_bytes import UnitSize

# Variables that decide which kernels compute, or how memory is handed out.
CHOOSING = ("ZLAB_KERNELS", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "GLIBC_TUNABLES")
ROUGH, NOT_SHOWN = "~", "outside"
ROUNDS = 3  # of measuring, each with ranks of its own: what differs between two starts is in the range
ANCHOR_STAGE = 2  # of the real step that is measured next to the segments: each unit is gathered and reduced once


@dataclass(frozen=True)
class TimingJob:
    """Something to measure: its kind, the key of the answer, and a configuration that has it."""

    kind: str
    key: str
    config: RunConfig

    def plain(self) -> dict[str, Any]:
        return {"kind": self.kind, "key": self.key, "config": to_dict(self.config)}


@functools.cache
def _folder(hardware: str) -> str:
    """The folder of the cache for this hardware: answers also depend on the code, the versions of libraries, what
    chooses among their kernels, and the processor, more closely than the hardware's name says it."""
    chosen = [described_cpu(), *(os.environ.get(name) for name in CHOOSING)]
    text = f"{memory_cache.folder()} {hardware} {chosen}"
    return f"times-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _rounds(hardware: str, key: str) -> list[Any]:
    found: dict[str, list[Any]] = read_cached(_folder(hardware), key) or {"rounds": []}
    return found["rounds"]


def stored(hardware: str, key: str, number: int | None = None) -> Any | None:
    """The answer that all rounds together have measured, or that of one round (from 0); None if there is none."""
    if number is None:
        return (read_cached(_folder(hardware), key) or {}).get("typical")
    rounds = _rounds(hardware, key)
    return rounds[number] if number < len(rounds) else None


def store(hardware: str, measured: Iterable[tuple[TimingJob, Any]]) -> None:
    """Keeps measured answers, each as one more round of its job."""
    for job, answer in measured:
        rounds = [*_rounds(hardware, job.key), answer]
        write_cached(_folder(hardware), job.key, {"rounds": rounds, "typical": typical(rounds)})
        if job.kind == "segments":
            known = read_cached(_folder(hardware), _micros_key(job.config)) or ()
            write_cached(_folder(hardware), _micros_key(job.config), sorted({*known, job.config.batch.micro}))


def forget(configs: Iterable[RunConfig], hardware: str) -> None:
    """What was measured for these configurations does not count any longer."""
    for job in _wanted(configs):
        write_cached(_folder(hardware), job.key, {"rounds": [], "typical": None})


def typical(answers: Sequence[Any]) -> Any:
    """The answers of several rounds as one: the median of each measured number. Where the rounds do not have numbers at
    the same places (dict keys, lengths of lists), the last round's."""
    last = answers[-1]
    if isinstance(last, dict) and all(isinstance(one, dict) and one.keys() == last.keys() for one in answers):
        return {key: typical([one[key] for one in answers]) for key in last}
    if isinstance(last, list) and all(isinstance(one, list) and len(one) == len(last) for one in answers):
        return [typical(list(ones)) for ones in zip(*answers, strict=True)]
    return statistics.median(answers) if all(isinstance(one, float) for one in answers) else last


def jobs(config: RunConfig) -> Iterator[TimingJob]:
    """What has to be measured for a prediction of this configuration's step, the cheapest first."""
    yield _copies(config)
    both = (config, anchored(config))
    if config.data_ranks > 1:
        yield from {job.key: job for job in map(_links, both)}.values()
    yield from {job.key: job for job in map(_update, both)}.values()
    yield _segments(config)


def _copies(config: RunConfig) -> TimingJob:
    return TimingJob("copies", _key("copies", _cores_of(config)), config)


def _segments(config: RunConfig, micro: int | None = None) -> TimingJob:
    config = config if micro is None else with_micro(config, micro)
    return TimingJob("segments", _key("segments", _of_model(config, memory_cache.activations_key(config))), config)


def _micros_key(config: RunConfig) -> str:
    """The key of the micro-batches at which the segments of a configuration were measured."""
    return _key("micros", _of_model(config, memory_cache.activations_key(config, any_micro=True)))


def _of_model(config: RunConfig, activations: str) -> dict[str, Any]:
    precision = config.precision
    return {
        "activations": activations,
        "dtypes": plain(precision.dtypes),  # those of the real step
        "tf32": precision.tf32,
        **place_of(config),
    }


def _links(config: RunConfig) -> TimingJob:
    shards = config.zero.plan.group_ranks(config.data_ranks)
    return TimingJob("links", _key("links", {"shards": shards, **place_of(config)}), config)


def anchored(config: RunConfig) -> RunConfig:
    """The configuration of the real step that is measured next to the segments: one micro-batch in which each unit is
    gathered and reduced once, updated by AdamW on the device, whatever the configuration's own step is. So what it
    takes in addition to its parts serves all stages, offloads and optimizers."""
    zero = replace(config.zero, stage=ANCHOR_STAGE, shard_ranks=None, outer_sharding=None, reduce_at_boundary=False)
    one = replace(config, zero=zero, optimizer=Optimizer(), offload=Offload())
    return replace(one, batch=replace(one.batch, accumulation=1))


def _update(config: RunConfig) -> TimingJob:
    groups = {name: plain(getattr(config, name)) for name in ("optimizer", "precision", "offload")}
    del groups["optimizer"]["lr"]  # a step takes as long with each
    return TimingJob("update", _key("update", {**groups, **_cores_of(config)}), config)


def place_of(config: RunConfig) -> dict[str, Any]:
    """The ranks that compute at the same time, with what, and what they communicate over."""
    return {**_cores_of(config), "comm": transport(config)}


def _cores_of(config: RunConfig) -> dict[str, Any]:
    """The same, without their communication, which no copy or update waits for."""
    resources = config.resources
    return {
        "ranks": resources.ranks,
        "nodes": resources.nodes,
        "threads": resources.threads,
        "device": str(resources.device),
    }


def _key(kind: str, parts: Mapping[str, Any]) -> str:
    return f"{kind}-" + hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def missing(configs: Iterable[RunConfig], hardware: str) -> list[TimingJob]:
    """What the next round has to measure for these configurations: each job once that has the fewest rounds, the
    cheapest kinds and small micro-batches first; empty if all have ROUNDS."""
    wanted = _wanted(configs)
    done = {job.key: len(_rounds(hardware, job.key)) for job in wanted}
    least = min(done.values(), default=ROUNDS)
    return [job for job in wanted if done[job.key] == least < ROUNDS]


def _wanted(configs: Iterable[RunConfig]) -> list[TimingJob]:
    """The jobs of configurations. Nothing is measured for described hardware, nor with tensor or sequence
    parallelism."""
    local = [config for config in configs if not config.hardware.is_described and config.parallel.group == 1]
    wanted = {job.key: job for config in local for job in jobs(config)}
    order = ("copies", "links", "update", "segments")
    return sorted(wanted.values(), key=lambda job: (order.index(job.kind), job.config.batch.micro))


@dataclass(frozen=True)
class Speed:
    """The predicted time of a step, and tokens per second of all ranks.

    rough: estimated from a data sheet. mfu: by `flops_per_token`, the share of the peak on the data sheet; None without
    one. within: the least and the most tokens per second that single rounds of measuring predict, or of an
    estimate those between which 80 % of published runs are that were not used for it; None with one round, and for what
    no published run has. outside: why the estimate is not to be shown, only to be ordered by; empty if it is.
    """

    time: StepSeconds
    tokens_per_second: float
    rough: bool = False
    mfu: float | None = None
    within: tuple[float, float] | None = None
    outside: str = ""

    @property
    def shown(self) -> float | None:
        """Tokens per second, if they are to be shown."""
        return None if self.outside else self.tokens_per_second

    @property
    def text(self) -> str:
        """Tokens per second, marked if they are estimated: two digits, as the range that they are in where it is
        known."""
        if self.outside:
            return NOT_SHOWN
        ends = self.within or (self.tokens_per_second,)
        if not self.rough:
            return "-".join(dict.fromkeys(map(digits, ends)))
        return ROUGH + "-".join(f"{end:,.0f}" for end in dict.fromkeys(float(f"{end:.2g}") for end in ends))

    @property
    def mfu_text(self) -> str:
        """`mfu` at the middle of the range that is shown, in percent; ABSENT where no speed is, or no peak is known.

        MFU = model FLOP of the step / (ranks x peak FLOP/s x seconds of the step), where the model FLOP are those of
        `flops_per_token`: 6 for each trained parameter and token, 4 for each frozen one.
        """
        if self.mfu is None or self.outside:
            return ABSENT
        middle = sum(self.within) / 2 if self.within else self.tokens_per_second
        return f"{100 * self.mfu * middle / self.tokens_per_second:.0f} %"

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for records and other programs; without numbers that are not to be shown."""
        if self.outside:
            return {"tokens_per_second": None, "text": self.text, "rough": self.rough, "outside": self.outside}
        known = {"tokens_per_second": self.tokens_per_second, "step_s": self.time.total_s, "rough": self.rough}
        shown = {"text": self.text, "tokens_per_second_within": self.within}
        return {**known, "mfu": self.mfu, **asdict(self.time), **shown}


def interval(speed: Speed | None) -> tuple[float, float] | None:
    """The least and the most tokens per second that a row may have; None if its speed is not known."""
    if speed is None or speed.outside:
        return None
    if speed.within is not None:
        return speed.within
    tokens = speed.tokens_per_second
    return (tokens / LONGEST, tokens / SHORTEST) if speed.rough else (tokens, tokens)


def speed_of(memory: ConfigMemory, hardware: str) -> Speed | None:
    """The predicted speed of a configuration, on this machine or on its described hardware.

    None if something that it needs was not measured or is not on the data sheet, or is not predicted: here, parameters
    in a scratch file; on described hardware, activations on the host. Of tensor and sequence parallelism nothing is
    measured on this machine.
    """
    config = memory.config
    if not config.hardware.is_described:
        return _measured_speed(memory, hardware) if config.parallel.group == 1 else None
    found, peak = rough_time(memory), peak_flops_per_s(config)
    if found is None or peak is None:
        return None
    total_s, tokens = found.step.total_s, _tokens(config)
    mfu = memory.flops_per_token * tokens / (config.ranks * peak * total_s)
    within = None if offloads(config) else (tokens / (total_s * LONGEST), tokens / (total_s * SHORTEST))
    return Speed(found.step, tokens / total_s, True, mfu, within, outside(config, found))


def _tokens(config: RunConfig) -> int:
    """Tokens of a step of all ranks."""
    return config.batch.global_size * config.batch.seq


def _measured_speed(memory: ConfigMemory, hardware: str) -> Speed | None:
    time, tokens = _measured_time(memory, hardware), _tokens(memory.config)
    if time is None:
        return None
    alone = [tokens / one.total_s for number in range(ROUNDS) if (one := _measured_time(memory, hardware, number))]
    return Speed(time, tokens / time.total_s, within=(min(alone), max(alone)) if len(alone) > 1 else None)


def _measured_time(memory: ConfigMemory, hardware: str, number: int | None = None) -> StepSeconds | None:
    """From the answers of all rounds, or of one of them alone."""
    config = memory.config
    part = memory.part(config.batch.micro)
    if part is None or config.offload.params is Tier.NVME:
        return None
    answers: dict[str, Any] = {}
    for job in jobs(config):
        if job.kind != "segments" and answers.setdefault(job.key, stored(hardware, job.key, number)) is None:
            return None
    costs, of_anchor = (_costs(one, answers) for one in (config, anchored(config)))
    measured = _segments_at(config, hardware, of_anchor, number)
    if measured is None:
        return None
    table, costs = measured[0], replace(costs, surplus_s=measured[1])
    trace = part.linear.trace
    segments = table.in_order([(kind, unit) for _, kind, unit in trace.marks])
    if segments is None:
        return None
    return step_time(trace, memory.units, memory.rules, segments, costs, prefetch=config.zero.prefetch)


def _segments_at(
    config: RunConfig, hardware: str, of_anchor: StepCosts, number: int | None
) -> tuple[SegmentTable[float], float] | None:
    """The seconds of the segments, and `StepCosts.surplus_s`: measured at this micro-batch, or on a straight line
    between two others. of_anchor: the costs of the anchor's step."""

    def measured(micro: int) -> tuple[SegmentTable[float], float] | None:
        found = stored(hardware, _segments(config, micro).key, number)
        return None if found is None else (SegmentTable.of_plain(found["table"]), _surplus_s(config, found, of_anchor))

    micro = config.batch.micro
    exact = measured(micro)
    if exact is not None:
        return exact
    known = read_cached(_folder(hardware), _micros_key(config)) or []
    below, above = [one for one in known if one < micro], [one for one in known if one > micro]
    low, high = (measured(below[-1]), measured(above[0])) if below and above else (None, None)
    if low is None or high is None:
        return None
    share = (micro - below[-1]) / (above[0] - below[-1])

    def between(first: float, second: float) -> float:
        return first + (second - first) * float(share)

    table = low[0].combined(high[0], between)
    return None if table is None else (table, between(low[1], high[1]))


def _surplus_s(config: RunConfig, measured: Mapping[str, Any], costs: StepCosts) -> float:
    """From the real step that was measured next to the segments; see calibrate.py."""
    anchor, one = measured["anchor"], anchored(config)
    ranks = config.data_ranks
    on_cuda = config.resources.device is Device.cuda
    state_bytes = one.optimizer.rule.state_bytes
    return surplus_s(
        anchor["seconds"],
        Trace(marks=[(0, Mark(kind), unit) for kind, unit in anchor["marks"]]),
        [(UnitSize(**size), MixedPrecision(**precision)) for size, precision in anchor["units"]],
        CountRules(one.zero.plan, ranks, 1, 1, state_bytes, by_messages=not on_cuda),
        anchor["segments"],
        costs,
        prefetch=config.zero.prefetch,
    )


def _costs(config: RunConfig, answers: Mapping[str, Any]) -> StepCosts:
    """The costs of a configuration's step from the answers by key."""
    links: Mapping[str, Any] = answers.get(_links(config).key) or {}

    def curve(data: Mapping[str, Any] | None) -> Curve:
        return FREE if data is None else Curve(data["points"])

    def collective(name: str) -> CollectiveCost:
        found = links.get(name) or {}
        return CollectiveCost(curve(found.get("start")), curve(found.get("rest")))

    return StepCosts(
        gather=collective("gather"),
        reduce=collective("reduce"),
        replica=collective("replica"),
        control_s=links.get("control_s", 0.0),
        copy=curve(answers[_copies(config).key]),
        update=curve(answers[_update(config).key]),
        compute_slowdown=links.get("compute_slowdown", 0.0),
        link_slowdown=links.get("link_slowdown", 0.0),
    )
