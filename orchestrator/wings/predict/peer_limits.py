"""Which settings the byte rules of each engine know, and by which name the others are refused (`zlab fit --as`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from orchestrator import wings
from orchestrator.config.engine import EngineKind
from orchestrator.config.parallel import Parallel
from orchestrator.config.schema import AdapterKind, Checkpoint, Loss, LossKind, Measure, MeasureKind, RunConfig
from orchestrator.config.state_groups import Precision
from orchestrator.config.strict import Broken
from orchestrator.wings.engines.limits import common_problems
from zero_runtime.activations.rule import RecomputeRule
from zero_runtime.offload_plan import Tier
from zero_runtime.optim.configs import AdamWConfig, SgdConfig
from zero_runtime.precision import MixedPrecision

ON_HOST = ("deepspeed", "fsdp2")
SHARDS_NOTHING, SHARDS_STATES = ("ddp", "plain"), ("megatron", "nanotron")
# Engines that keep masters, sums of gradients and moments in 16 bits: DeepSpeed by bf16_master_weights_and_grads with
# bf16_optimizer_states, torch's by a model in bf16. Megatron's precision-aware optimizer has moments in bf16 alone.
HALF_STATES = ("ddp", "deepspeed", "fsdp2", "plain")
HALF_MOMENTS = (*HALF_STATES, "megatron")


def limits(engine: str, config: RunConfig) -> list[Broken]:
    """What the rules of the engine do not know of these settings: each with the nearest setting that they do."""
    found = _own(engine, config)
    fixed = {fix for one in found for fix in one.fix}
    return found + [one for one in _of_runs(engine, config) if not fixed & set(one.fix)]


def _own(engine: str, config: RunConfig) -> list[Broken]:
    dtypes, offload, parallel = config.precision.dtypes, config.offload, config.parallel
    half_master, half_sum = dtypes.master != "fp32", dtypes.accumulate != "fp32" and config.batch.accumulation > 1
    states = getattr(config.optimizer.rule, "state_dtype", "fp32")
    recompute, stage, away = config.recompute.kind, config.zero.stage, offload.optimizer is not Tier.DEVICE
    # nanotron recomputes whole layers. Megatron's selective recomputation is of the attention's core alone, which the
    # attention kernels that are counted here never keep.
    blocks = recompute in ("none", "full") or (recompute == "by_operation" and engine not in SHARDS_STATES)
    can_half = engine in HALF_STATES and (stage > 0 or engine != "deepspeed") and not away
    most = 0 if engine in SHARDS_NOTHING else 1 if engine in SHARDS_STATES else 3
    least, zero = 1 if engine == "fsdp2" or (engine == "deepspeed" and away) else 0, f"zero=stage{stage}"
    on_device = not away and offload.params is Tier.DEVICE
    whole_bf16 = (not half_master and not half_sum) or (can_half and half_master and states == "bf16")
    moments = states == "fp32" or (engine in HALF_MOMENTS and (half_master or engine == "megatron"))
    masters = "optimizer.state_dtype=bf16" if can_half and half_master else "precision=bf16"
    has_tp = engine not in (*SHARDS_NOTHING, "deepspeed")  # AutoTP keeps whole tokens, which are divided here
    of_script = engine not in SHARDS_STATES  # a model and a loss of the user's own
    in_half = of_script or dtypes.param != "fp32"
    full_loss = of_script or config.loss.kind is LossKind.full
    in_fp32 = dtypes.reduce == "fp32" or engine in ("deepspeed", "fsdp2", "plain") or half_master
    groups = config.zero.shard_ranks is None or of_script
    asked = (
        (stage <= most, "shard nothing" if most == 0 else "shard the optimizer alone", zero, f"zero=stage{most}"),
        (stage >= least, "shard at these settings", zero, "zero=stage1"),
        (in_half, "train in 16 bits", "precision=fp32", "precision=bf16"),
        (full_loss, "are for full losses", "loss=tiled", "loss=full"),
        (not offload.uses_nvme, "offload nothing to a disk", "offload to nvme", "offload=none"),
        (engine in ON_HOST or on_device, "offload nothing", "offload to the host", "offload=none"),
        (parallel.sp == 1, "divide no sequences", f"parallel.sp={parallel.sp}", "parallel=none"),
        (has_tp or parallel.tp == 1, "divide no layers", f"parallel.tp={parallel.tp}", "parallel=none"),
        (blocks, "know no such recomputation", f"recompute={recompute}", "recompute=full"),
        (config.recompute.offload == "none", "keep activations", "recompute.offload=cpu", "recompute.offload=none"),
        (whole_bf16, "keep fp32 masters", f"precision.master={dtypes.master}", masters),
        (moments, "keep fp32 moments", f"optimizer.state_dtype={states}", "optimizer.state_dtype=fp32"),
        (in_fp32, "reduce in fp32", f"precision.reduce={dtypes.reduce}", "precision.reduce=fp32"),
        (of_script or config.adapter.kind is AdapterKind.none, "train all weights", "adapter=lora", "adapter=none"),
        (groups, "shard over all ranks", "zero.shard_ranks", "zero.shard_ranks=null"),
    )  # fmt: skip
    return [Broken(f"the rules of {engine} {rule}", found, (fix,)) for holds, rule, found, fix in asked if not holds]


def _of_runs(engine: str, config: RunConfig) -> Iterator[Broken]:
    """What the engine's runs refuse, and what they ignore of the group zero, in settings that its rules do not know
    better than its runs."""
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
        resources=replace(config.resources, ranks=1) if engine == "plain" else config.resources,
    )
    if engine not in wings.ENGINES:
        yield from common_problems(known, f"the engine {engine}")
        return
    module = wings.load(wings.ENGINES[engine])
    known = replace(known, engine=replace(config.engine, kind=EngineKind(engine)))
    yield from module.problems_of(known)
    read = vars(module.meaning(known).zero)
    for key, value in vars(config.zero).items():
        if value != read[key]:
            yield Broken(f"the rules of {engine} do not read zero.{key}", str(value), (f"zero.{key}={read[key]}",))
