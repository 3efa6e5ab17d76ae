"""Predicts the memory of points before they run, with zero_runtime's memory model and its counts of activations.

The module is the `Predictor` of plans (orchestrator/planning/predictor.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import yaml

from orchestrator.compose.folders import CONF
from orchestrator.config.parallel import Parallel
from orchestrator.config.schema import AdapterKind, Device, RunConfig
from orchestrator.machine import hardware
from orchestrator.planning.point import Point
from orchestrator.planning.predictor import NOT_ASKED, Prediction, Tell
from orchestrator.wings.predict import memory_cache, remedies
from orchestrator.wings.predict.counting_child import Answer
from orchestrator.wings.predict.memory_cache import activations_key, units_key
from orchestrator.wings.predict.moments import Met, met, on_device
from orchestrator.wings.predict.peer_fit import peak_of, rules_for
from orchestrator.wings.predict.point_prediction import PointPrediction
from orchestrator.wings.predict.remedies import PredictedPeak
from orchestrator.wings.predict.rough_time import offloads, without_offload
from orchestrator.wings.predict.speed import speed_of
from orchestrator.wings.predict.step import ConfigMemory, Memories, states_of
from orchestrator.wings.predict.target import Target, target_of
from zero_runtime.predict.memory.activation_count import ActivationBytes
from zero_runtime.predict.memory.device_overhead import NO_OVERHEAD, DeviceOverhead
from zero_runtime.state_bytes import StateBytes

EAGER = "the model has no attention of torch (sdpa): its own (eager) keeps the scores of all pairs of tokens"
ADVISED = 4  # most points for which remedies are searched: each needs further counts


def predict(points: Sequence[Point], tell: Tell | None = None, **settings: Any) -> dict[str, Prediction]:
    """`predictions`, with its settings, in brief."""
    return {label: one.brief() for label, one in predictions(points, tell, **settings).items()}


def fixes(config: RunConfig, memory: Mapping[str, Any]) -> str:
    return remedies.described(config, memory, needs)


def predictions(
    points: Sequence[Point],
    tell: Tell | None = None,
    *,
    within_s: float = math.inf,
    unknown: dict[str, str] | None = None,
) -> dict[str, PointPrediction]:
    """The predictions by label. A point whose model the child cannot build has none; `unknown` gets the reason.

    `tell` is called with messages about the progress. within_s: the most time that the child may take for the points,
    and again for the settings that would fit. What is not counted by then is not predicted.
    """
    named: dict[str, PointPrediction] = {}
    for point, found in zip(points, _predictions([point.config for point in points], tell, within_s), strict=True):
        if isinstance(found, PointPrediction):
            named[point.label] = found
        elif unknown is not None:
            unknown[point.label] = found
    not_fitting = [point for point in points if point.label in named and named[point.label].cannot_fit][:ADVISED]
    neighbours = [remedies.neighbours(point.config) for point in not_fitting]
    answers = iter(_predictions([neighbour.config for several in neighbours for neighbour in several], tell, within_s))
    for point, several in zip(not_fitting, neighbours, strict=True):
        tried = zip(several, islice(answers, len(several)), strict=True)
        fitting = [one for one, then in tried if isinstance(then, PointPrediction) and not then.cannot_fit]
        smaller = [one for one in fitting if one.config.batch != point.config.batch]
        # Of the smaller batches, only the largest that fits.
        chosen = tuple(one.overrides for one in fitting if one not in smaller[1:])
        named[point.label] = replace(named[point.label], remedies=chosen, advised=True)
    return named


def needs(configs: Sequence[RunConfig]) -> list[PredictedPeak | None]:
    """Lower bounds on the memory of a rank; None if the model cannot be built."""
    return [
        PredictedPeak(one.needed_bytes, one.activations is not None) if isinstance(one, PointPrediction) else None
        for one in _predictions(configs)
    ]


def problems(points: Sequence[Point], *, counting_within_s: float = 0.0) -> dict[str, str]:
    """By label, the problems of models that cannot be built, in the words that a job would use.

    Models that ship with zero-lab are known to be valid; if there are no others, no child process is started.
    counting_within_s: if it is positive, the child also counts what a prediction will ask for, so that it imports its
    libraries once, for at most this time.
    """
    if all(_ships(point.config) for point in points):
        return {}
    configs = [point.config for point in points]
    if counting_within_s > 0:
        answers = memory_cache.answers(configs, configs, within_s=counting_within_s)
    else:
        answers = memory_cache.answers(configs, [])
    texts = {point.label: answers.get(units_key(point.config), {}).get("problem") for point in points}
    return {label: text for label, text in texts.items() if text is not None}


def _ships(config: RunConfig) -> bool:
    """Whether the model is an unchanged one from conf/, without adapters and not divided."""
    if config.parallel != Parallel():
        return False
    return config.adapter.kind is AdapterKind.none and config.as_plain["model"] in _shipped_models()


@functools.cache
def _shipped_models() -> list[Any]:
    files = (CONF / "model").glob("*.yaml")
    return [{"adapter": None, **yaml.safe_load(file.read_text(encoding="utf-8"))} for file in files]


def _predictions(
    configs: Sequence[RunConfig], tell: Tell | None = None, within_s: float = math.inf
) -> list[PointPrediction | str]:
    """The prediction of each configuration, or why there is none."""
    if not configs:
        return []
    found = Predictions(configs, configs, tell, within_s)
    return [found.of(config) for config in configs]


class Predictions:
    """The predictions of configurations. units, activations: those whose models, and whose activations, are counted;
    together: also of the micro-batches between those that differ in them alone."""

    def __init__(
        self,
        units: Sequence[RunConfig],
        activations: Sequence[RunConfig],
        tell: Tell | None = None,
        within_s: float = math.inf,
        *,
        together: bool = False,
    ) -> None:
        self._answers = memory_cache.answers(units, activations, tell, within_s=within_s, together=together)
        need_gpus = any(one.resources.device is Device.cuda and not one.hardware.is_described for one in units)
        self._machine = gpu_bytes_here() if need_gpus else None, hardware.memory_bytes()  # once for all
        self._memories = Memories(self._answers)

    def of(self, config: RunConfig) -> PointPrediction | str:
        """The prediction, or why there is none."""
        return _prediction(config, self._answers, self._memories, *self._machine)

    def sent_bytes(self, config: RunConfig) -> int:
        """What our runtime would send in a step with these shards; 0 if the model cannot be built."""
        memory = self._memories.of(config)
        return 0 if memory is None else memory.sent_bytes()


def _prediction(
    config: RunConfig,
    answers: Mapping[str, Answer],
    memories: Memories,
    gpu_bytes: int | None,
    host_bytes: int | None = None,
) -> PointPrediction | str:
    shapes = answers.get(units_key(config), {"unknown": NOT_ASKED})
    if "units" not in shapes:
        return str(shapes.get("problem") or shapes["unknown"])
    memory, target = memories.of(config), target_here(config, gpu_bytes, host_bytes)
    assert memory is not None, "it has its units"
    on_gpus = target.device is Device.cuda
    counted = answers.get(activations_key(config), {"unknown": NOT_ASKED})
    told = PointPrediction(
        states_of(config, memory.units),
        target.device_bytes,
        target.ranks_share,
        ActivationBytes(**counted["bytes"]) if "bytes" in counted else None,
        counted.get("unknown", ""),
        overhead_of(config),
        on_host=not on_gpus,
        ranks_per_node=target.ranks_per_node,
        host_limit_bytes=target.host_bytes if on_gpus else None,
    )
    if not config.engine.is_own:
        return _of_engine(config, shapes, memory, told)
    peak = memory.peak(config.batch.micro)
    meets = Met() if peak is None else met(memory)
    return replace(
        told,
        peak=peak,
        speed=speed_of(memory, hardware_name(config)),
        host_bytes=0 if peak is None else memory.host_bytes(config.batch.micro) + meets.kept,
        outside=meets.outside,
        without_offload=_without_offload(config, memories) if on_gpus and offloads(config) else None,
        attention=attention_note(shapes),
    )


def attention_note(shapes: Answer) -> str:
    """What is to be said of a model's attention; empty for torch's. shapes: the answer about its units."""
    return EAGER if shapes.get("attention") == "eager" else ""


def _without_offload(config: RunConfig, memories: Memories) -> int | None:
    """The most bytes of a rank's device if nothing were offloaded; None if that is not known."""
    plain = without_offload(config)
    memory = memories.of(plain)
    peak = None if memory is None else memory.peak(plain.batch.micro)
    if memory is None or peak is None:
        return None
    outside = [on_device(one, shared=False) for one in met(memory).outside]
    return max(peak.total, *outside, 0) + overhead_of(plain).most


def _of_engine(config: RunConfig, shapes: Answer, memory: ConfigMemory, told: PointPrediction) -> PointPrediction | str:
    """The prediction of a point that another engine trains. Nothing predicts its speed, nor its moments outside of
    steps."""
    rules = rules_for(config, shapes)
    if rules is None:
        return f"the byte rules of engine={config.engine.kind} do not know these settings"
    states, peak = StateBytes(**rules.states, padding=0), peak_of(rules, memory, config.batch.micro)
    return replace(told, states=states, peak=peak, host_bytes=rules.host_bytes)


def hardware_name(config: RunConfig) -> str:
    """The name of this machine's hardware, under which measured times are kept."""
    return _detected().name(config.resources.device)


_detected = functools.cache(hardware.detect)


def overhead_of(config: RunConfig) -> DeviceOverhead:
    """What libraries take of a rank's GPU; nothing on a CPU."""
    if config.resources.device is not Device.cuda:
        return NO_OVERHEAD
    plan, parallel = config.zero.plan, config.parallel
    shards, across = plan.group_ranks(config.data_ranks), plan.outer_sharding is not None
    return DeviceOverhead.on_cuda(config.ranks, shards, parallel.tp, parallel.sp, gathers_across=across)


def gpu_bytes_here() -> int | None:
    """The memory of the smallest visible GPU; None if it is not known."""
    return min((gpu.memory_bytes for gpu in hardware.visible_gpus() if gpu.memory_bytes is not None), default=None)


def target_here(config: RunConfig, gpu_bytes: int | None = None, host_bytes: int | None = None) -> Target:
    """The machines of a point: the described ones, or this one, whose memory is read if it is not given."""
    return target_of(config, gpu_bytes, host_bytes or hardware.memory_bytes())
