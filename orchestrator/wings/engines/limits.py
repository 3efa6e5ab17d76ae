"""What none of the other engines does in these runs, as rules that a point breaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from orchestrator.config.engine import EngineChoice
from orchestrator.config.schema import CheckpointKind, LossKind, MeasureKind, RunConfig
from orchestrator.config.state_groups import Zero
from orchestrator.config.strict import Broken, Limits, nearest
from orchestrator.wings.kinds.kind import experts_of
from zero_runtime.limits import as_typed
from zero_runtime.offload_plan import Tier
from zero_runtime.wire import EXACT

OPTIMIZERS = ("adam", "adamw", "sgd", "torch")
SettingsOf = Callable[[RunConfig], Mapping[str, Any]]
# What a setting of an engine must be, by the type of its default.
VALUES: dict[type, tuple[str, Callable[[Any], bool]]] = {
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("a number above 0", lambda value: type(value) in (int, float) and value > 0),
}
EXACT_WORDS = "zero.gather_dtype=null zero.reduce_dtype=null zero.error_feedback=false"


def common_problems(config: RunConfig, engine: str) -> list[Broken]:
    """Rules that a point breaks by settings that only zero-lab's own runtime has. engine: the subject of the texts."""
    rule, recompute, measure = config.optimizer.rule, config.recompute, config.measure
    resumes = config.checkpoint.kind is not CheckpointKind.none or config.checkpoint.resume != "none"
    trains = measure.kind is MeasureKind.eval or config.trains_to_the_end
    on_disk = Tier.NVME in (config.offload.params, config.offload.optimizer)
    states = getattr(rule, "state_dtype", "fp32")
    experts = experts_of(str(config.model.model_type), config.model.config)
    blocks = recompute.kind in ("none", "full") and recompute.offload == "none"
    dtypes = config.precision.dtypes
    sums = dtypes.accumulate if config.batch.accumulation > 1 else "fp32"
    asked = (
        (rule.kind in OPTIMIZERS, "has torch.optim's optimizers", rule.kind, "optimizer=adamw"),
        (states == "fp32", "has fp32 moments", f"optimizer.state_dtype={states}", "optimizer.state_dtype=fp32"),
        (not experts, "trains no mixture of experts (MoE)", experts, "engine=zero"),
        (config.parallel.group == 1, "has no tensor or sequence parallelism", "a divided model", "parallel=none"),
        (config.loss.kind is LossKind.full, "wraps the head, which loss=tiled calls apart", "loss=tiled", "loss=full"),
        (not resumes, "saves no checkpoints", "group checkpoint", "checkpoint=none checkpoint.resume=none"),
        (not trains, "is measured for a number of steps", f"measure={measure.kind}", "measure=quick"),
        (not measure.profile, "is not profiled", "measure.profile=true", "measure.profile=false"),
        (dtypes.master == "fp32", "has fp32 masters", f"precision.master={dtypes.master}", "precision=bf16"),
        (sums == "fp32", "sums micro-batches in fp32", f"precision.accumulate={sums}", "precision.accumulate=fp32"),
        (not config.precision.keep_dtype, "casts all parameters", "precision.keep_dtype", "precision.keep_dtype=[]"),
        (dtypes.weights is None, "stores no codes", f"precision.weights={dtypes.weights}", "precision.weights=null"),
        (config.zero.outer_sharding is None, "has no outer sharding", "optim", "zero.outer_sharding=null"),
        (config.zero.unit_numel is None, "makes its own units", "zero.unit_numel", "zero.unit_numel=null"),
        (config.zero.wire == EXACT, "sends exact messages", "quantised ones", EXACT_WORDS),
        (blocks, "recomputes all blocks or none", f"recompute={recompute.kind}", "recompute=full"),
        (not on_disk, "offloads nothing to a disk", "offload to nvme", "offload=none"),
    )
    return [Broken(f"{engine} {rule}", found, (fix,)) for holds, rule, found, fix in asked if not holds]


def broken_keys(config: RunConfig, settings_of: SettingsOf, judged: str = "") -> list[Broken]:
    """A broken rule for each of the engine's own settings that is not one of those that it has without them, or whose
    value is of another kind than theirs. judged: a key whose values the engine judges itself."""
    kind, native = config.engine.kind, config.engine.native
    known = settings_of(replace(config, engine=EngineChoice(kind)))
    limits = Limits(native, f"engine.{kind}", known)
    for key in native.keys() - {judged}:
        if (needed := VALUES.get(type(known.get(key)))) is not None:
            limits.must(key, needed[1], needed[0])
    return limits.broken + [
        Broken(
            f"engine.{kind} has the settings {', '.join(known)}",
            key,
            (f"engine.{kind}.{near}={as_typed(native[key])}",) if (near := nearest(key, known)) else (),
        )
        for key in native
        if key not in known
    ]


def merged(given: Mapping[str, Any], native: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's settings, of which the native ones replace others of the same name, in sections too."""
    found = dict(given)
    for key, value in native.items():
        inner = found.get(key)
        found[key] = merged(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return found


def computed_as_param(config: RunConfig) -> RunConfig:
    """The point in which forward and backward run in the dtype of the parameters: only zero-lab's runtime converts
    16-bit parameters to fp32 on a processor without instructions for them."""
    return replace(config, precision=replace(config.precision, compute=config.precision.dtypes.param))


def replicated(config: RunConfig) -> RunConfig:
    """The point for an engine that shards nothing: all stages are one to it."""
    return computed_as_param(replace(config, zero=Zero(0)))
