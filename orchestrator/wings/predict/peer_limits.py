"""Which settings the byte rules of each engine know, and by which name the others are refused (`zlab fit --as`)."""

from __future__ import annotations

from orchestrator.config.schema import LossKind, RunConfig
from orchestrator.config.strict import Broken
from zero_runtime.offload_plan import Tier

# nanotron recomputes whole layers. Megatron's selective recomputation is of the attention's core alone, which the
# attention kernels that are counted here never keep.
WHOLE_BLOCKS = ("megatron", "nanotron")
ON_HOST = ("deepspeed", "fsdp2")
SHARDS_NOTHING, SHARDS_STATES = ("ddp", "plain"), ("megatron", "nanotron")
# Engines that keep masters, sums of gradients and moments in 16 bits: DeepSpeed by bf16_master_weights_and_grads with
# bf16_optimizer_states, FSDP2 by a model in bf16. Megatron's precision-aware optimizer has moments in bf16 alone.
HALF_STATES, HALF_MOMENTS = ("deepspeed", "fsdp2"), ("deepspeed", "fsdp2", "megatron")


def limits(engine: str, config: RunConfig) -> list[Broken]:
    """What the rules of the engine do not know of these settings: each with the nearest setting that they do."""
    dtypes, offload, parallel = config.precision.dtypes, config.offload, config.parallel
    half_master, half_sum = dtypes.master != "fp32", dtypes.accumulate != "fp32" and config.batch.accumulation > 1
    states = getattr(config.optimizer.rule, "state_dtype", "fp32")
    recompute, stage, away = config.recompute.kind, config.zero.stage, offload.optimizer is not Tier.DEVICE
    blocks = recompute in ("none", "full") or (recompute == "by_operation" and engine not in WHOLE_BLOCKS)
    half = half_master and states == "bf16" and stage > 0 and not away
    most = 0 if engine in SHARDS_NOTHING else 1 if engine in SHARDS_STATES else 3
    least, zero = 1 if engine == "fsdp2" or (engine == "deepspeed" and away) else 0, f"zero=stage{stage}"
    on_device = not away and offload.params is Tier.DEVICE
    whole_bf16 = (not half_master and not half_sum) or (engine in HALF_STATES and half)
    moments = states == "fp32" or (engine in HALF_MOMENTS and (half_master or engine == "megatron"))
    has_tp = engine not in (*SHARDS_NOTHING, "deepspeed")  # AutoTP keeps whole tokens, which are divided here
    in_half = engine not in SHARDS_STATES or dtypes.param != "fp32"
    asked = (
        (stage <= most, "shard nothing" if most == 0 else "shard the optimizer alone", zero, f"zero=stage{most}"),
        (stage >= least, "shard at these settings", zero, "zero=stage1"),
        (in_half, "train in 16 bits", "precision=fp32", "precision=bf16"),
        (config.loss.kind is LossKind.full, "are for full losses", "loss=tiled", "loss=full"),
        (not offload.uses_nvme, "offload nothing to a disk", "offload to nvme", "offload=none"),
        (engine in ON_HOST or on_device, "offload nothing", "offload to the host", "offload=none"),
        (parallel.sp == 1, "divide no sequences", f"parallel.sp={parallel.sp}", "parallel=none"),
        (has_tp or parallel.tp == 1, "divide no layers", f"parallel.tp={parallel.tp}", "parallel=none"),
        (blocks, "know no such recomputation", f"recompute={recompute}", "recompute=full"),
        (whole_bf16, "keep fp32 masters", f"precision.master={dtypes.master}", "precision=bf16"),
        (moments, "keep fp32 moments", f"optimizer.state_dtype={states}", "optimizer.state_dtype=fp32"),
    )  # fmt: skip
    return [Broken(f"the rules of {engine} {rule}", found, (fix,)) for holds, rule, found, fix in asked if not holds]
