"""Expresses a configuration that the drop-in has read as words of conf/: `zero=stage3`, `batch.micro=4`, ..."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from orchestrator.wings.foreign.findings import as_word
from zero_runtime.deepspeed.config import DropinConfig
from zero_runtime.deepspeed.optimizer_section import ChosenOptimizer
from zero_runtime.deepspeed.parallel_section import Degrees
from zero_runtime.limits import values_of
from zero_runtime.offload_plan import OffloadPlan, ScratchSettings, Tier
from zero_runtime.optim.configs import TorchConfig
from zero_runtime.optim.loss_scaler import LossScaleRule
from zero_runtime.optim.lr_schedule import (
    LRRangeTest,
    LrSchedule,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.wire import EXACT, Wire

MIB = 1 << 20
DIGITS = 12  # of a ratio of two rates, so that 0.1 x lr / lr is 0.1 again


def words_of(config: DropinConfig) -> dict[str, str]:
    """The words by key, options of groups first. `inexpressible` names what they cannot say."""
    words = {
        **_zero(config.plan, config.wire),
        **_precision(config.precision, config.loss_scale),
        **_offload(config.offload),
        **_parallel(config.degrees),
        **({} if config.prefetch == 1 else {"zero.prefetch": as_word(config.prefetch)}),
    }
    batch = {"batch.micro": config.batch.micro, "batch.accumulation": config.batch.accumulation}
    words |= {key: as_word(value) for key, value in batch.items()} | {"batch.global_size": "null"}
    words["optimizer.clip_norm"] = as_word(config.clip_norm)
    if config.optimizer is not None:
        words |= _optimizer(config.optimizer)
    schedule = _schedule_of(config)
    if schedule is not None:
        words |= _schedule(schedule)
        if config.optimizer is None and config.schedule is not None and config.schedule.takes_own_rate:
            del words["optimizer.lr"]  # known to the script alone
    elif config.optimizer is not None:
        words["scheduler"] = "constant"
    return _groups_first(words)


def inexpressible(config: DropinConfig) -> list[str]:
    """What the drop-in runs and the settings of conf/ cannot say, one problem each."""
    schedule = _schedule_of(config)
    buffers = "data_types.buffer_dtype: buffers keep their dtype in an experiment; leave it out"
    found = [buffers] if config.fp32_buffers else []
    if config.optimizer is not None and not vars(config.optimizer.config).get("corrects_bias", True):
        found.append("optimizer.params.bias_correction: experiments correct the bias; leave it out")
    if config.schedule is not None:
        found += [
            f"scheduler.params.{name}: conf/ has no parameter groups, found {count} rates; give one"
            for name, count in config.schedule.by_group.items()
            if count > 1
        ]
    if isinstance(schedule, OneCycle):
        absent = ("cycle_first_stair_count", "cycle_second_stair_count", "decay_mom_rate")
        found += [
            f"scheduler.params.{name}: one_cycle of conf/scheduler has none; leave it out"
            for name in absent
            if getattr(schedule, name)
        ]
    if isinstance(schedule, WarmupLR) and schedule.warmup_min_lr > schedule.warmup_max_lr:
        found.append("scheduler.params.warmup_min_lr: expected at most warmup_max_lr, as a rise begins low")
    return found


def _groups_first(words: dict[str, str]) -> dict[str, str]:
    return dict(sorted(words.items(), key=lambda item: "." in item[0]))


def _zero(plan: ZeroPlan, wire: Wire) -> dict[str, str]:
    plain = replace(plan, shard_ranks=None)
    level = next(one for one in range(4) if ZeroPlan.from_stage(one) == plain)
    shard = {} if plan.shard_ranks is None else {"zero.shard_ranks": as_word(plan.shard_ranks)}
    return {"zero": f"stage{level}"} | shard | _differing("zero", values_of(wire), values_of(EXACT))


def _parallel(degrees: Degrees) -> dict[str, str]:
    words = {"parallel.tp": degrees.tensor, "parallel.sp": degrees.sequence}
    return {key: as_word(degree) for key, degree in words.items() if degree > 1}


def _precision(precision: MixedPrecision, scale: LossScaleRule) -> dict[str, str]:
    pure = precision.param == precision.master == "bf16"
    usual = "bf16" if pure else "fp32"
    words: dict[str, str] = {"precision": "bf16_pure" if pure else precision.param}
    for key in ("reduce", "accumulate"):
        if getattr(precision, key) != usual:
            words[f"precision.{key}"] = getattr(precision, key)
    if precision.param == "fp16":
        words |= _differing("precision", values_of(scale), values_of(LossScaleRule()))
    return words


def _offload(plan: OffloadPlan) -> dict[str, str]:
    tiers = {
        (Tier.DEVICE, Tier.DEVICE): "none",
        (Tier.DEVICE, Tier.HOST): "optimizer_cpu",
        (Tier.DEVICE, Tier.NVME): "optimizer_nvme",
        (Tier.HOST, Tier.DEVICE): "param_cpu",
        (Tier.HOST, Tier.HOST): "optimizer_param_cpu",
        (Tier.HOST, Tier.NVME): "optimizer_param_nvme",
        (Tier.NVME, Tier.NVME): "optimizer_param_nvme",
    }
    words = {"offload": tiers[plan.params, plan.optimizer]}
    if (plan.params, plan.optimizer) == (Tier.HOST, Tier.NVME):
        words["offload.params"] = "cpu"
    if plan.ratio != 1:
        words["offload.ratio"] = as_word(plan.ratio)
    return words | ({} if plan.scratch is None else _scratch(plan.scratch))


def _scratch(scratch: ScratchSettings) -> dict[str, str]:
    usual = ScratchSettings(scratch.folder)
    words = {"offload.folder": str(scratch.folder)}
    if scratch.block_bytes != usual.block_bytes:
        words["offload.block_mib"] = as_word(max(1, round(scratch.block_bytes / MIB)))
    for key in ("requests", "ahead"):
        if getattr(scratch, key) != getattr(usual, key):
            words[f"offload.{key}"] = as_word(getattr(scratch, key))
    return words


def _optimizer(chosen: ChosenOptimizer) -> dict[str, str]:
    values = values_of(chosen.config)
    arguments: dict[str, Any] = values.pop("arguments", {})
    words = {"optimizer": chosen.config.kind, "optimizer.lr": as_word(float(chosen.lr))}
    words |= {f"optimizer.{key}": as_word(value) for key, value in values.items()}
    if isinstance(chosen.config, TorchConfig):
        words |= {f"+optimizer.arguments.{key}": as_word(value) for key, value in arguments.items()}
    return words


def _schedule_of(config: DropinConfig) -> LrSchedule | None:
    if config.schedule is None:
        return None
    return config.schedule(0.0 if config.optimizer is None else config.optimizer.lr)


def _schedule(schedule: LrSchedule) -> dict[str, str]:
    """The words of DeepSpeed's schedules. Their rates are absolute, ours are ratios of optimizer.lr, which they set."""
    if isinstance(schedule, WarmupCosineLR):
        rise = _warmup("warmup_cosine", schedule.warmup_num_steps, schedule.warmup_type, schedule.warmup_min_ratio)
        return rise | {"scheduler.min_lr_ratio": as_word(float(schedule.cos_min_ratio))}
    if isinstance(schedule, WarmupLR):
        kind = "warmup_decay" if isinstance(schedule, WarmupDecayLR) else "warmup"
        start = _ratio(schedule.warmup_min_lr, schedule.warmup_max_lr)
        rise = _warmup(kind, schedule.warmup_num_steps, schedule.warmup_type, start)
        return rise | {"optimizer.lr": as_word(float(schedule.warmup_max_lr))}
    if isinstance(schedule, OneCycle):
        return _one_cycle(schedule)
    assert isinstance(schedule, LRRangeTest)
    return {
        "scheduler": "lr_range_test",
        "optimizer.lr": as_word(float(schedule.lr_range_test_min_lr)),
        "scheduler.interval_steps": as_word(schedule.lr_range_test_step_size),
        "scheduler.interval_rate": as_word(float(schedule.lr_range_test_step_rate)),
        "scheduler.staircase": as_word(schedule.lr_range_test_staircase),
    }


def _one_cycle(schedule: OneCycle) -> dict[str, str]:
    cycles = schedule.cycle_momentum
    decays = schedule.decay_step_size > 0
    values = {
        "start_lr_ratio": _ratio(schedule.cycle_min_lr, schedule.cycle_max_lr),
        "rise_steps": schedule.cycle_first_step_size,
        "fall_steps": schedule.cycle_second_step_size,
        "decay_steps": schedule.decay_step_size if decays else None,
        "decay_rate": float(schedule.decay_lr_rate) if decays else None,
        "momentum_min": schedule.cycle_min_mom if cycles else None,
        "momentum_max": schedule.cycle_max_mom if cycles else None,
    }
    words = {"scheduler": "one_cycle", "optimizer.lr": as_word(float(schedule.cycle_max_lr))}
    return words | {f"scheduler.{key}": as_word(value) for key, value in values.items()}


def _warmup(kind: str, steps: int, rise: str, start: float) -> dict[str, str]:
    values = {"warmup_steps": steps, "warmup_type": rise, "start_lr_ratio": float(start)}
    return {"scheduler": kind} | {f"scheduler.{key}": as_word(value) for key, value in values.items()}


def _ratio(low: float, high: float) -> float:
    return float(f"{low / high:.{DIGITS}g}") if high else 0.0


def _differing(group: str, values: dict[str, Any], usual: dict[str, Any]) -> dict[str, str]:
    return {f"{group}.{key}": as_word(value) for key, value in values.items() if value != usual[key]}
