"""Writes a point as a configuration of DeepSpeed; the settings that it has no keys for stay as words beside them."""

from __future__ import annotations

from typing import Any

from orchestrator.config.parallel import Parallel
from orchestrator.config.schema import RunConfig
from orchestrator.wings.foreign import dropin_words
from orchestrator.wings.foreign.importing import OURS
from orchestrator.wings.foreign.point_words import values_of_point, words_of_point
from zero_runtime.deepspeed.config import examine
from zero_runtime.deepspeed.keys import HOMES
from zero_runtime.deepspeed.schema import Reader
from zero_runtime.limits import values_of
from zero_runtime.offload_plan import Tier
from zero_runtime.optim.configs import (
    AdamConfig,
    AdamW8bitConfig,
    AdamWConfig,
    LambConfig,
    LionConfig,
    MuonConfig,
    OneBitAdamConfig,
    SgdConfig,
    TorchConfig,
)
from zero_runtime.optim.loss_scaler import LossScaleRule
from zero_runtime.optim.lr_schedule import Constant, Cosine
from zero_runtime.wire import EXACT

_DEVICES = {Tier.DEVICE: "none", Tier.HOST: "cpu", Tier.NVME: "nvme"}
_TESTED = (AdamConfig, AdamWConfig, LionConfig)  # that DeepSpeed's stages take without zero_allow_untested_optimizer


def deepspeed_config(config: RunConfig) -> dict[str, Any]:
    """The configuration as plain data for JSON; its section OURS has the words that `import` needs to make the point
    again."""
    ranks, batch = config.resources.ranks, config.batch
    accumulation = batch.accumulation
    found: dict[str, Any] = {
        "train_batch_size": batch.micro * accumulation * ranks // config.parallel.sp,
        "train_micro_batch_size_per_gpu": batch.micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": config.optimizer.clip_norm or 0.0,
        **_precision(config),
        "zero_optimization": _zero(config),
        **_parallel(config.parallel),
        **_aio(config),
        "optimizer": _optimizer(config),
        **_scheduler(config),
        "steps_per_print": 100,
    }
    rule = config.optimizer.rule
    if config.zero.stage > 0 and (not isinstance(rule, _TESTED) or isinstance(rule, LambConfig)):
        found["zero_allow_untested_optimizer"] = True
    return {**found, OURS: {"words": _left(config, found, ranks)}}


def problems_of(config: RunConfig) -> list[str]:
    """Why DeepSpeed cannot run this point, one line each."""
    found = []
    if isinstance(config.optimizer.rule, AdamW8bitConfig):
        found.append("optimizer=adamw8bit: DeepSpeed has no AdamW with 8-bit states      fix: optimizer=adamw")
    if config.parallel.tp > 1 and config.zero.stage == 3:
        found.append("parallel.tp: DeepSpeed divides layers up to stage 2      fix: zero=stage2   or   parallel.tp=1")
    if isinstance(config.optimizer.rule, MuonConfig):
        found.append("optimizer=muon: DeepSpeed's has matrices and rates of other rules      fix: optimizer=adamw")
    if isinstance(config.optimizer.rule, OneBitAdamConfig) and config.zero.stage > 0:
        found.append(
            "optimizer=onebitadam: DeepSpeed has 1-bit Adam up to 0.19.6, at stage 0 alone      fix: zero=stage0"
        )
    found += _wire_problems(config)
    if config.precision.keep_dtype:
        found.append("precision.keep_dtype: DeepSpeed casts every parameter      fix: precision.keep_dtype=[]")
    if config.precision.dtypes.weights is not None:
        found.append("precision.weights: DeepSpeed trains no codes      fix: precision.weights=null")
    if config.zero.stage < 3 and config.zero.shard_ranks is not None:
        found.append("zero.shard_ranks: DeepSpeed's MiCS needs stage 3      fix: zero.shard_ranks=null")
    if config.zero.outer_sharding is not None:
        found.append(
            "zero.outer_sharding=optim: DeepSpeed exchanges parameters in each forward      fix: "
            "zero.outer_sharding=null"
        )
    if config.offload.ratio != 1 and config.zero.stage < 3:
        found.append("offload.ratio: DeepSpeed offloads a part at stage 3 only      fix: offload.ratio=1.0")
    if config.zero.stage == 0 and config.offload.optimizer is not Tier.DEVICE:
        found.append("offload at stage 0: DeepSpeed offloads from stage 1      fix: zero=stage1")
    dtypes = config.precision.dtypes
    if (dtypes.param, dtypes.master) not in (("fp32", "fp32"), ("bf16", "fp32"), ("fp16", "fp32"), ("bf16", "bf16")):
        found.append(f"precision.master={dtypes.master}: DeepSpeed has fp32 masters      fix: precision.master=fp32")
    if (dtypes.param, dtypes.master) == ("bf16", "bf16") and config.zero.stage == 0:
        found.append("precision=bf16_pure: DeepSpeed has bf16 masters from stage 1      fix: zero=stage1")
    return found


def _wire_problems(config: RunConfig) -> list[str]:
    wire, shards, found = config.zero.wire, config.zero.shard_ranks, []
    exact = "zero.gather_dtype=null zero.reduce_dtype=null zero.error_feedback=false"
    if wire != EXACT and (config.zero.stage < 3 or shards is not None):
        what = "zero.gather_dtype" if wire.gather else "zero.reduce_dtype"
        found.append(f"{what}: DeepSpeed quantises messages at stage 3 over all ranks alone      fix: {exact}")
    if wire.reduce == "int8":
        found.append("zero.reduce_dtype=int8: DeepSpeed quantises gradients to int4      fix: zero.reduce_dtype=int4")
    if wire.error_feedback:
        found.append(
            "zero.error_feedback: the errors of DeepSpeed's LoCo fade and are dropped      fix: "
            "zero.error_feedback=false"
        )
    return found


def notes_of(config: RunConfig) -> list[str]:
    """What DeepSpeed does differently with the written configuration, one sentence each."""
    notes = []
    if config.zero.stage == 3:
        notes.append("stage 3: DeepSpeed prefetches by elements and keeps up to stage3_max_live_parameters (1e9)")
    rule = config.optimizer.rule
    if isinstance(rule, LambConfig) and None in (rule.min_coeff, rule.max_coeff):
        notes.append("Lamb: DeepSpeed limits the trust ratio to [0.01, 10]")
    if isinstance(rule, LambConfig) and rule.correction == "moments":
        notes.append("Lamb: DeepSpeed corrects the rate for the moments' bias, so that its first updates are smaller")
    if isinstance(config.optimizer.rule, OneBitAdamConfig):
        notes.append(
            "OneBitAdam: DeepSpeed 0.19.8 has none any more, 0.19.6 did; it corrected no moments for their bias, "
            "updated nothing in its first step, and needed cupy for its default comm_backend_name"
        )
    if config.zero.wire.gather:
        notes.append("zero_quantized_weights: DeepSpeed rounds to fp16 first, with a scale for up to 16,000 elements")
    if config.zero.wire.reduce:
        notes.append("zero_quantized_gradients: DeepSpeed sums exactly on one node, and rounds twice on several")
    if config.parallel.tp > 1:
        notes.append("parallel.tp: give the ranks of a group the same batch; train_batch_size counts each of them")
    if config.parallel.sp > 1:
        notes.append(
            "parallel.sp: DeepSpeed divides no sequence by itself: register UlyssesSPAttentionHF with the model, take "
            "batches from UlyssesSPDataLoaderAdapter, and sum the losses of the parts in your script"
        )
    if config.recompute.kind != "none":
        notes.append(f"recompute={config.recompute.kind}: call model.gradient_checkpointing_enable() in your script")
    if config.adapter.kind.value != "none":
        notes.append("adapter=lora: wrap the model with peft before deepspeed.initialize")
    return notes


def _left(config: RunConfig, found: dict[str, Any], ranks: int) -> list[str]:
    """The words that the configuration alone would not give again."""
    given = dropin_words.words_of(examine(found, ranks, "cpu", Reader(HOMES)))
    words, values = words_of_point(config), values_of_point(config)
    words.pop("resources.ranks", None)
    left = {key: value for key, value in words.items() if given.get(key) != value}
    left |= {key: values[key] for key, value in given.items() if key in values and values[key] != value}
    return [f"{key}={value}" for key, value in left.items()]


def _precision(config: RunConfig) -> dict[str, Any]:
    dtypes = config.precision.dtypes
    found: dict[str, Any] = {}
    if dtypes.param == "bf16":
        pure = {"bf16_master_weights_and_grads": True} if dtypes.master == "bf16" else {}
        found["bf16"] = {"enabled": True, **pure}
    if dtypes.param == "fp16":
        scale = {name: value for name, value in values_of(config.precision.scale).items() if value is not None}
        usual = values_of(LossScaleRule())
        differing = {name: value for name, value in scale.items() if value != usual[name]}
        found["fp16"] = {"enabled": True, **differing}
    return found | {
        "communication_data_type": dtypes.reduce,
        "data_types": {"grad_accum_dtype": dtypes.accumulate},
    }


def _zero(config: RunConfig) -> dict[str, Any]:
    offload, folder = config.offload, config.offload.folder
    found: dict[str, Any] = {"stage": config.zero.stage, "overlap_comm": True, "contiguous_gradients": True}
    if config.zero.shard_ranks is not None:
        found["mics_shard_size"] = config.zero.shard_ranks
    found |= {"zero_quantized_weights": True} if config.zero.wire.gather else {}
    found |= {"zero_quantized_gradients": True} if config.zero.wire.reduce else {}
    nvme = {"nvme_path": folder}
    if offload.optimizer is not Tier.DEVICE:
        section: dict[str, Any] = {"device": _DEVICES[offload.optimizer], "pin_memory": True}
        if offload.optimizer is Tier.NVME:
            section |= {**nvme, "pipeline_read": offload.ahead > 0, "pipeline_write": offload.ahead > 0}
        found["offload_optimizer"] = section | ({} if offload.ratio == 1 else {"ratio": offload.ratio})
    if offload.params is not Tier.DEVICE:
        path = nvme if offload.params is Tier.NVME else {}
        found["offload_param"] = {"device": _DEVICES[offload.params], "pin_memory": True, **path}
    if config.zero.stage == 3:
        found["stage3_gather_16bit_weights_on_model_save"] = True
    return found


def _parallel(parallel: Parallel) -> dict[str, Any]:
    tensor = {"tensor_parallel": {"autotp_size": parallel.tp}} if parallel.tp > 1 else {}
    return tensor | ({"sequence_parallel_size": parallel.sp} if parallel.sp > 1 else {})


def _aio(config: RunConfig) -> dict[str, Any]:
    if not config.offload.uses_nvme:
        return {}
    return {"aio": {"block_size": config.offload.block_mib << 20, "queue_depth": config.offload.requests}}


def _optimizer(config: RunConfig) -> dict[str, Any]:
    rule, lr = config.optimizer.rule, config.optimizer.lr
    params: dict[str, Any] = {"lr": lr, "weight_decay": rule.decay}
    if isinstance(rule, AdamWConfig):  # Adam, Lamb and 1-bit Adam have its constants too
        params |= {"betas": [rule.beta1, rule.beta2], "eps": rule.eps}
        params |= {"freeze_step": rule.warmup_updates} if isinstance(rule, OneBitAdamConfig) else {}
        params |= _lamb(rule) if isinstance(rule, LambConfig) else {}
        kind = {AdamConfig: "Adam", LambConfig: "Lamb", OneBitAdamConfig: "OneBitAdam"}.get(type(rule), "AdamW")
        return {"type": kind, "params": {**params, **({"adam_w_mode": False} if kind == "Adam" else {})}}
    if isinstance(rule, LionConfig):
        return {"type": "Lion", "params": {**params, "betas": [rule.beta1, rule.beta2]}}
    if isinstance(rule, SgdConfig):
        constants = {"momentum": rule.momentum, "dampening": rule.dampening, "nesterov": rule.nesterov}
        return {"type": "SGD", "params": {**params, **constants}}
    assert isinstance(rule, TorchConfig)
    return {"type": rule.class_name, "params": {**params, **rule.arguments}}


def _lamb(rule: LambConfig) -> dict[str, Any]:
    limits = {"min_coeff": rule.min_coeff, "max_coeff": rule.max_coeff}
    given: dict[str, Any] = {name: limit for name, limit in limits.items() if limit is not None}
    return given | ({"bias_correction": False} if rule.correction == "none" else {})


def _scheduler(config: RunConfig) -> dict[str, Any]:
    """DeepSpeed's own schedules, whose classes and their fields have DeepSpeed's names; another one is a torch schedule
    in the script, and none is a constant rate."""
    schedule = config.scheduler.curve.build(config.optimizer.lr, config.steps() or 1)
    if isinstance(schedule, (Constant, Cosine)):
        return {}
    params = {name: value for name, value in vars(schedule).items() if name != "lr" and value is not None}
    return {"scheduler": {"type": type(schedule).__name__, "params": params}}
