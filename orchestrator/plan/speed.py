"""The predicted time of a configuration's step: from what `zlab calibrate` measured on this machine, or, for described
hardware, from its data sheet."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.config.parts import plain
from orchestrator.config.schema import RunConfig, to_dict
from orchestrator.plan import memory_cache
from orchestrator.plan.rough_time import peak_flops_per_s, rough_time
from orchestrator.plan.step import ConfigMemory
from orchestrator.records.cache import read_cached, write_cached
from zero_runtime.offload.plan import Tier
from zero_runtime.timing.costs import FREE, Curve, StepCosts
from zero_runtime.timing.segments import SegmentTable
from zero_runtime.timing.step_time import StepTime, step_time


@dataclass(frozen=True)
class Job:
    """Something to measure: its kind, the key of the answer, and a configuration that has it."""

    kind: str
    key: str
    config: RunConfig

    def plain(self) -> dict[str, Any]:
        return {"kind": self.kind, "key": self.key, "config": to_dict(self.config)}


@functools.cache
def _folder(hardware: str) -> str:
    """The folder of the cache for this hardware: answers also depend on the code and the versions of libraries."""
    text = f"{memory_cache.folder()} {hardware}"
    return f"times-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def stored(hardware: str, key: str) -> Any | None:
    """The measured answer; None if there is none."""
    return read_cached(_folder(hardware), key)


def store(hardware: str, answers: Mapping[str, Any]) -> None:
    """Keeps measured answers."""
    for key, answer in answers.items():
        write_cached(_folder(hardware), key, answer)


def jobs(config: RunConfig) -> list[Job]:
    """What has to be measured for a prediction of this configuration's step, the cheapest first."""
    found = [Job("copies", _key("copies", place_of(config)), config)]
    if (config.resources.ranks or 1) > 1:
        found.append(_links(config))
    return [*found, _update(config), _segments(config)]


def _segments(config: RunConfig) -> Job:
    parts = {"activations": memory_cache.activations_key(config), "tf32": config.precision.tf32, **place_of(config)}
    return Job("segments", _key("segments", parts), config)


def _links(config: RunConfig) -> Job:
    shards = config.zero.plan.shard_count(config.resources.ranks or 1)
    return Job("links", _key("links", {"shards": shards, **place_of(config)}), config)


def _update(config: RunConfig) -> Job:
    groups = {name: plain(getattr(config, name)) for name in ("optimizer", "precision", "offload")}
    return Job("update", _key("update", {**groups, **place_of(config)}), config)


def place_of(config: RunConfig) -> dict[str, Any]:
    """The ranks that compute at the same time, and with what."""
    resources = config.resources
    return {
        "ranks": resources.ranks,
        "nodes": resources.nodes,
        "threads": resources.threads,
        "device": str(resources.device),
    }


def _key(kind: str, parts: Mapping[str, Any]) -> str:
    return f"{kind}-" + hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def missing(configs: Iterable[RunConfig], hardware: str) -> list[Job]:
    """What was not measured yet for these configurations, each once, the cheapest kinds first.

    Nothing is measured for described hardware.
    """
    wanted = {job.key: job for config in configs if not config.hardware.is_described for job in jobs(config)}
    order = ("copies", "links", "update", "segments")
    left = [job for job in wanted.values() if stored(hardware, job.key) is None]
    return sorted(left, key=lambda job: order.index(job.kind))


@dataclass(frozen=True)
class Speed:
    """The predicted time of a step, and tokens per second of all ranks.

    rough: estimated from a data sheet. mfu: model FLOPs utilization, see `model_flops`, of the peak on the data sheet;
    None without one.
    """

    time: StepTime
    tokens_per_second: float
    rough: bool = False
    mfu: float | None = None


def speed_of(memory: ConfigMemory, hardware: str) -> Speed | None:
    """The predicted speed of a configuration, on this machine or on its described hardware; None if something that it
    needs was not measured or is not on the data sheet, or is not predicted: parameters in a scratch file, and any
    offload on described hardware."""
    config = memory.config
    if not config.hardware.is_described:
        time = _measured_time(memory, hardware)
        return None if time is None else Speed(time, _tokens(config) / time.total_s)
    time, peak = rough_time(memory), peak_flops_per_s(config)
    if time is None or peak is None:
        return None
    per_second = (config.resources.ranks or 1) * peak * time.total_s
    return Speed(time, _tokens(config) / time.total_s, rough=True, mfu=model_flops(memory) / per_second)


def _tokens(config: RunConfig) -> int:
    """Tokens of a step of all ranks."""
    return (config.batch.global_size or 0) * config.batch.seq


def model_flops(memory: ConfigMemory) -> int:
    """Operations that a step needs by the usual convention: 6 for each trained parameter and token, 4 for each frozen
    one, whatever attention and recomputation add."""
    return sum((6 if size.trainable else 4) * size.numel for size, _ in memory.units) * _tokens(memory.config)


def _measured_time(memory: ConfigMemory, hardware: str) -> StepTime | None:
    config = memory.config
    part = memory.part(config.batch.micro)
    if part is None or config.offload.params is Tier.NVME:
        return None
    answers: dict[str, Any] = {job.kind: stored(hardware, job.key) for job in jobs(config)}
    if any(answer is None for answer in answers.values()):
        return None
    trace = part.linear.trace
    table: SegmentTable[float] = SegmentTable.of_plain(answers["segments"])
    segments = table.in_order([(kind, unit) for _, kind, unit in trace.marks])
    if segments is None:
        return None
    return step_time(trace, memory.units, memory.rules, segments, _costs(answers), prefetch=config.zero.prefetch)


def _costs(answers: Mapping[str, Any]) -> StepCosts:
    links: Mapping[str, Any] = answers.get("links") or {}

    def curve(data: Mapping[str, Sequence[tuple[float, float]]] | None) -> Curve:
        return FREE if data is None else Curve(data["points"])

    return StepCosts(
        gather=curve(links.get("gather")),
        reduce=curve(links.get("reduce")),
        replica=curve(links.get("replica")),
        control_s=links.get("control_s", 0.0),
        copy=curve(answers["copies"]),
        update=curve(answers["update"]),
        compute_slowdown=links.get("compute_slowdown", 0.0),
        link_slowdown=links.get("link_slowdown", 0.0),
    )
