"""What was predicted of the memory and the messages of a run, for its rank 0 to show beside what is measured.

It is read from the cache that plans fill. What a plan has not counted is counted here, after the measurement.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from orchestrator.config.schema import MeasureKind, RunConfig
from orchestrator.wings.predict import memory_cache
from orchestrator.wings.predict.peer_fit import peak_of, rules_for
from orchestrator.wings.predict.rough_time import dense_peak
from orchestrator.wings.predict.step import Memories
from orchestrator.wings.predict.theory import theory_of

Numbers = dict[str, Any]


def planned(config: RunConfig) -> Numbers:
    """Predicted bytes, if an earlier plan or run counted them: counting now would affect the measurement."""
    counted, units = memory_cache.Question.of([config]).read(), memory_cache.stored(memory_cache.units_key(config))
    return _numbers(config, {**counted, memory_cache.units_key(config): units}) if counted and units else {}


def known(config: RunConfig) -> Numbers:
    """Predicted bytes, from the cache that plans fill; otherwise counted here and added to the cache."""
    from orchestrator.wings.predict import activations  # here: most runs find all that they show in the cache

    return _numbers(config, {**activations.known(config), **_units(config)})


def theory(config: RunConfig, *, updates: int, unread: Collection[str]) -> Numbers:
    """What a rank sends in a step in theory. unread: the names of frozen units that no backward reads."""
    shapes = _units(config)
    memory = Memories(shapes).of(config)
    assert memory is not None
    names = [unit["name"] for unit in shapes[memory_cache.units_key(config)]["units"]]
    return theory_of(memory, updates=updates, unread=[place for place, name in enumerate(names) if name in unread])


def efficiency(config: RunConfig, tokens_per_second: float, gpu: str | None) -> Numbers:
    """The model's operations a second, and as a share of the dense peak of the GPUs (MFU) where that is known.

    Empty for an evaluation, and for a mixture of experts, whose tokens do not meet all parameters.
    """
    (units,) = (shapes := _units(config)).values()
    memory = Memories(shapes).of(config)
    if memory is None or config.measure.kind is MeasureKind.eval or units.get("experts"):
        return {}
    rate, (peak, _) = memory.flops_per_token * tokens_per_second, dense_peak(config, gpu)
    return {"model_flops_per_s": rate, "peak_flops_per_s": peak, "mfu": peak and rate / (peak * config.ranks)}


def engine_states(config: RunConfig) -> dict[str, int]:
    """Bytes of the model states on a rank by component, and `host`, by the rules of the engine that trains; empty if
    they do not know these settings."""
    rules = rules_for(config, _units(config)[memory_cache.units_key(config)])
    return {} if rules is None else {**rules.states, "host": rules.host_bytes}


def _units(config: RunConfig) -> dict[str, Mapping[str, Any]]:
    key = memory_cache.units_key(config)
    if (found := memory_cache.stored(key)) is None:
        from orchestrator.wings.predict import shapes

        found = shapes.units_of(config)
    return {key: found}


def _numbers(config: RunConfig, counted: Mapping[str, Mapping[str, Any]]) -> Numbers:
    """The activations that a forward keeps and the peak of a step, on a rank; or why they are unknown."""
    answer = counted[memory_cache.activations_key(config)]
    if "bytes" not in answer:
        return {"activations_unknown": answer["unknown"]}
    memory, peak = Memories(counted).of(config), None
    if memory is not None and config.engine.is_own:
        peak = memory.peak(config.batch.micro)
    elif memory is not None and (rules := rules_for(config, counted[memory_cache.units_key(config)])) is not None:
        peak = peak_of(rules, memory, config.batch.micro)
    numbers = {"activations_predicted_bytes": answer["bytes"]["kept"]}
    return numbers if peak is None else {**numbers, "peak_predicted_bytes": peak.total}
