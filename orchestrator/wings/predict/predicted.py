"""What was predicted of the memory of the run that a rank measures, to be shown beside what is measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.config.schema import RunConfig
from orchestrator.wings.predict import activations, memory_cache, shapes
from orchestrator.wings.predict.step import Memories

Numbers = dict[str, Any]


def planned(config: RunConfig) -> Numbers:
    """Predicted bytes, if an earlier plan or run counted them: counting now would affect the measurement."""
    counted, units = memory_cache.Question.of([config]).read(), memory_cache.stored(memory_cache.units_key(config))
    return _numbers(config, {**counted, memory_cache.units_key(config): units}) if counted and units else {}


def known(config: RunConfig) -> Numbers:
    """Predicted bytes, from the cache that plans fill; otherwise counted here and added to the cache."""
    key = memory_cache.units_key(config)
    counted = activations.known(config)
    return _numbers(config, {**counted, key: memory_cache.stored(key) or shapes.units_of(config)})


def _numbers(config: RunConfig, counted: Mapping[str, Mapping[str, Any]]) -> Numbers:
    """The activations that a forward keeps and the peak of a step, on a rank; or why they are unknown."""
    answer = counted[memory_cache.activations_key(config)]
    if "bytes" not in answer:
        return {"activations_unknown": answer["unknown"]}
    memory = Memories(counted).of(config)
    peak = None if memory is None else memory.peak(config.batch.micro)
    numbers = {"activations_predicted_bytes": answer["bytes"]["kept"]}
    return numbers if peak is None else {**numbers, "peak_predicted_bytes": peak.total}
