"""Converts a DeepSpeed configuration to runtime settings; every key is mapped, refused, or reported as idle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_runtime.deepspeed.batch import BatchSizes, read_batch
from zero_runtime.deepspeed.json_text import load, shown
from zero_runtime.deepspeed.keys import HOMES, TOP
from zero_runtime.deepspeed.offload_section import read_offload
from zero_runtime.deepspeed.optimizer_section import ChosenOptimizer, choose_optimizer
from zero_runtime.deepspeed.schedules import ScheduleOf, choose_schedule
from zero_runtime.deepspeed.schema import Reader
from zero_runtime.deepspeed.zero_section import read_plan, with_new_names
from zero_runtime.limits import ConfigError, keys_of
from zero_runtime.offload.plan import OffloadPlan
from zero_runtime.optim.loss_scaler import UNSCALED, LossScaleRule
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import ITEMSIZE_BYTES, DType, MixedPrecision


@dataclass(frozen=True)
class DropinConfig:
    """The settings that a configuration describes.

    idle: keys without effect. notes: sentences for the user on how the engine differs from DeepSpeed. `optimizer` and
    `schedule` are None if the configuration has no such section.
    """

    plan: ZeroPlan
    offload: OffloadPlan
    precision: MixedPrecision
    loss_scale: LossScaleRule
    batch: BatchSizes
    clip_norm: float | None
    optimizer: ChosenOptimizer | None
    schedule: ScheduleOf | None
    casts_inputs: bool
    drop_last: bool
    idle: tuple[str, ...]
    notes: tuple[str, ...]


def read_config(source: Mapping[str, Any] | str | Path, world: int, device: str = "cpu") -> DropinConfig:
    """Read a dict or a file, for `world` ranks with a device of this type. One PlanError reports all problems."""
    reader = Reader(HOMES)
    values = reader.read(TOP, load(source))
    _check_tensor_parallel(values.get("tensor_parallel", {}), reader)
    precision = _precision(values, reader)
    zero = with_new_names(values.get("zero_optimization", {}), reader)
    plan = read_plan(zero, reader)
    config = DropinConfig(
        plan=plan,
        offload=read_offload(zero, values.get("aio", {}), plan, device, reader),
        precision=precision,
        loss_scale=_loss_scale(values.get("fp16", {}), reader),
        batch=read_batch(values, world, reader),
        clip_norm=_clip_norm(values, reader),
        optimizer=choose_optimizer(values.get("optimizer"), reader),
        schedule=choose_schedule(values.get("scheduler"), reader),
        casts_inputs=precision.param == "fp16" and values["fp16"].get("auto_cast", False),
        drop_last=values.get("dataloader_drop_last", False),
        idle=tuple(reader.idle),
        notes=tuple(reader.notes),
    )
    reader.finish()
    return config


def _precision(values: Mapping[str, Any], reader: Reader) -> MixedPrecision:
    """fp32 unless fp16 or bf16 is enabled; gradients are reduced and accumulated in fp32 unless keys say otherwise."""
    names: tuple[DType, ...] = ("fp16", "bf16")
    enabled = [name for name in names if values.get(name, {}).get("enabled", False)]
    if len(enabled) == 2:
        reader.problems.append("fp16.enabled, bf16.enabled: expected at most one of them, found both; disable one")
    reduce = _dtype(values.get("communication_data_type"), "communication_data_type", reader)
    grad = values.get("data_types", {}).get("grad_accum_dtype")
    accumulate = _dtype(grad, "data_types.grad_accum_dtype", reader)
    return MixedPrecision(param=enabled[0] if enabled else "fp32", reduce=reduce, accumulate=accumulate)


def _dtype(name: str | None, where: str, reader: Reader) -> DType:
    for dtype in ITEMSIZE_BYTES:
        if dtype == (name or "fp32").lower():
            return dtype
    reader.problems.append(f"{where}: expected one of {', '.join(sorted(ITEMSIZE_BYTES))}, found {shown(name)}")
    return "fp32"


def _loss_scale(fp16: Mapping[str, Any], reader: Reader) -> LossScaleRule:
    """The rule of the section fp16. A loss_scale of 0 is dynamic; the rule has DeepSpeed's defaults for other keys."""
    if not fp16.get("enabled", False):
        return UNSCALED
    given = {one.name: fp16[key] for key, one in keys_of(LossScaleRule).items() if key in fp16}
    static = fp16.get("loss_scale", 0) or None
    try:
        return LossScaleRule(**{**given, "static": None if static is None else float(static)})
    except ConfigError as error:
        reader.problems += [f"fp16: {one._replace(fix=())}" for one in error.broken]
        return UNSCALED


def _clip_norm(values: Mapping[str, Any], reader: Reader) -> float | None:
    """The norm to clip to; None if it is not given, since DeepSpeed's own default has been both 0 (none) and 1.0."""
    clip = values.get("gradient_clipping")
    if clip is None:
        reader.notes.append(
            "gradient_clipping is not given: gradients are not clipped (DeepSpeed's default was 0.0, none, for years "
            "and is 1.0 in newer versions); write it to be sure"
        )
        return None
    if clip < 0:
        reader.problems.append(f"gradient_clipping: expected at least 0 (0 is none), found {clip}")
    return float(clip) or None


def _check_tensor_parallel(values: Mapping[str, Any], reader: Reader) -> None:
    names = [name for name in ("tp_size", "autotp_size") if name in values]
    if len(names) == 2:
        reader.problems.append(
            "tensor_parallel: tp_size and autotp_size are two names of one number, found both; keep one"
        )
    size = max((values[name] for name in names), default=1)
    if values.get("enabled", True) and size > 1:
        reader.problems.append(
            f"tensor_parallel.{names[0]}: found {size}: tensor parallelism is not here yet; set it to 1, and shard the "
            "model by zero_optimization instead (3 shards the parameters too)"
        )
