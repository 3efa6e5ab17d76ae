"""Which settings the byte rules of a point's engine know, and by which name others are refused (`zlab fit --as`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from orchestrator import wings
from orchestrator.config.engine import EngineKind
from orchestrator.config.parallel import Parallel
from orchestrator.config.schema import Checkpoint, Loss, Measure, MeasureKind, RunConfig
from orchestrator.config.state_groups import Precision
from orchestrator.config.strict import Broken
from zero_runtime.activations.rule import RecomputeRule
from zero_runtime.offload_plan import Tier
from zero_runtime.optim.configs import AdamWConfig, SgdConfig
from zero_runtime.precision import MixedPrecision


def limits(config: RunConfig) -> list[Broken]:
    """What the rules of the engine do not know of these settings: each with the nearest setting that they do."""
    found = _own(config)
    fixed = {fix for one in found for fix in one.fix}
    return found + [one for one in _of_runs(config) if not fixed & set(one.fix)]


def _own(config: RunConfig) -> list[Broken]:
    engine, dtypes, offload, parallel = config.engine.kind, config.precision.dtypes, config.offload, config.parallel
    half_master, half_sum = dtypes.master != "fp32", dtypes.accumulate != "fp32" and config.batch.accumulation > 1
    states, recompute = getattr(config.optimizer.rule, "state_dtype", "fp32"), config.recompute.kind
    stage, away, by_deepspeed = config.zero.stage, offload.optimizer is not Tier.DEVICE, engine is EngineKind.deepspeed
    # Masters, sums of gradients and moments in 16 bits: DeepSpeed has them by bf16_master_weights_and_grads with
    # bf16_optimizer_states, torch's engines by a model in bf16.
    in_half = half_master and not away and (stage > 0 or not by_deepspeed)
    shards = engine in (EngineKind.deepspeed, EngineKind.fsdp2)
    least, zero = 1 if engine is EngineKind.fsdp2 or (by_deepspeed and away) else 0, f"zero=stage{stage}"
    on_device = not away and offload.params is Tier.DEVICE
    whole_bf16 = (not half_master and not half_sum) or (in_half and states == "bf16")
    moments = half_master or states == "fp32"
    masters = "optimizer.state_dtype=bf16" if in_half else "precision=bf16"
    has_tp = engine is EngineKind.fsdp2  # AutoTP keeps whole tokens, which are divided here
    blocks = recompute in ("none", "full", "by_operation")
    in_fp32 = dtypes.reduce == "fp32" or engine is not EngineKind.ddp or half_master
    asked = (
        (shards or stage == 0, "shard nothing", zero, "zero=stage0"),
        (stage >= least, "shard at these settings", zero, "zero=stage1"),
        (not offload.uses_nvme, "offload nothing to a disk", "offload to nvme", "offload=none"),
        (shards or on_device, "offload nothing", "offload to the host", "offload=none"),
        (parallel.sp == 1, "divide no sequences", f"parallel.sp={parallel.sp}", "parallel=none"),
        (has_tp or parallel.tp == 1, "divide no layers", f"parallel.tp={parallel.tp}", "parallel=none"),
        (blocks, "know no such recomputation", f"recompute={recompute}", "recompute=full"),
        (config.recompute.offload == "none", "keep activations", "recompute.offload=cpu", "recompute.offload=none"),
        (whole_bf16, "keep fp32 masters", f"precision.master={dtypes.master}", masters),
        (moments, "keep fp32 moments", f"optimizer.state_dtype={states}", "optimizer.state_dtype=fp32"),
        (in_fp32, "reduce in fp32", f"precision.reduce={dtypes.reduce}", "precision.reduce=fp32"),
    )  # fmt: skip
    return [Broken(f"the rules of {engine} {rule}", found, (fix,)) for holds, rule, found, fix in asked if not holds]


def _of_runs(config: RunConfig) -> Iterator[Broken]:
    """List what the engine's runs refuse, and the keys of the group zero that they ignore, where its rules know no more
    than its runs."""
    weights, rule = config.precision.dtypes.weights, config.optimizer.rule
    if isinstance(rule, AdamWConfig | SgdConfig):
        rule = replace(rule, state_dtype="fp32")
    known = replace(
        config,
        loss=Loss(),
        parallel=Parallel(),
        checkpoint=Checkpoint(),
        recompute=RecomputeRule(),
        measure=Measure() if config.measure.kind is MeasureKind.train else config.measure,
        precision=Precision(MixedPrecision("bf16", weights=weights), keep_dtype=config.precision.keep_dtype),
        optimizer=replace(config.optimizer, rule=rule),
        resources=replace(config.resources, ranks=1) if config.engine.kind is EngineKind.plain else config.resources,
    )
    module = wings.load(wings.ENGINES[config.engine.kind])
    yield from module.problems_of(known)
    read = vars(module.meaning(known).zero)
    unread = f"the rules of {config.engine.kind} do not read zero."
    for key, value in vars(config.zero).items():
        if value != read[key]:
            yield Broken(f"{unread}{key}", str(value), (f"zero.{key}={read[key]}",))
