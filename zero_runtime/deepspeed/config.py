"""Converts a DeepSpeed configuration to runtime settings; every key is mapped, refused, or reported as idle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zero_runtime.deepspeed.auto import AutoValues, auto_values, leaves, with_values
from zero_runtime.deepspeed.batch import BatchSizes, read_batch
from zero_runtime.deepspeed.compressed import check_one_bit, read_wire
from zero_runtime.deepspeed.json_text import load, shown
from zero_runtime.deepspeed.keys import HOMES, OWN, TOP
from zero_runtime.deepspeed.offload_section import read_offload
from zero_runtime.deepspeed.optimizer_section import ChosenOptimizer, choose_optimizer
from zero_runtime.deepspeed.parallel_section import UNDIVIDED, Degrees, batch_ranks, notes_of, read_degrees
from zero_runtime.deepspeed.schedule_section import ScheduleOf, choose_schedule
from zero_runtime.deepspeed.schema import Reader, without_effect
from zero_runtime.deepspeed.zero_section import AHEAD, ZERO_LEVEL, read_plan, with_new_names
from zero_runtime.limits import keys_of
from zero_runtime.offload_plan import OffloadPlan
from zero_runtime.optim.configs import OneBitAdamConfig
from zero_runtime.optim.loss_scaler import UNSCALED, LossScaleRule
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import ITEMSIZE_BYTES, DType, MixedPrecision
from zero_runtime.wire import Wire

DEFAULT_CLIP_NORM = 1.0
NODE_LOCAL = "use_node_local_storage"
_APART = ("idle", "notes", "given")  # which have lines of their own


@dataclass(frozen=True)
class DropinConfig:
    """The settings that a configuration describes.

    idle: keys without effect. notes: sentences for the user on how the engine differs from DeepSpeed. older: older
    names of keys, with the newer ones. managed_accumulation: whether micro-batches are counted, or each call of `step`
    ends a step. fp32_buffers: whether floating buffers are cast to fp32. degrees: of tensor and
    sequence parallelism. leaf_modules: by which classes and names initialize marks modules. prefetch: units gathered
    ahead. node_local: whether each node has checkpoints of its own. given: the configuration that was read, with "auto"
    filled in; it also says what the engine prints. `optimizer` and `schedule` are None if the configuration has no such
    section.
    """

    plan: ZeroPlan
    wire: Wire
    offload: OffloadPlan
    precision: MixedPrecision
    loss_scale: LossScaleRule
    batch: BatchSizes
    clip_norm: float | None
    optimizer: ChosenOptimizer | None
    schedule: ScheduleOf | None
    fp32_buffers: bool
    casts_inputs: bool
    drop_last: bool
    managed_accumulation: bool
    idle: tuple[str, ...]
    notes: tuple[str, ...]
    older: Mapping[str, str]
    degrees: Degrees = UNDIVIDED
    leaf_modules: Mapping[str, Any] = field(default_factory=dict)
    node_local: bool = False
    prefetch: int = 1
    given: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def text(self, name: str) -> str:
        """In full: what the keys mean here, each key that was given, and which have no effect and why."""
        lines = [f"{key} = {value}" for key, value in vars(self).items() if key not in _APART]
        lines += [f"given: {path} = {value!r}" for path, value in leaves(self.given)]
        return "\n  ".join([f"{name}:", *lines, *self.notes, *self.without_effect()])

    def without_effect(self) -> list[str]:
        """One line for all keys that have no effect for one reason."""
        return without_effect({path: path for path in self.idle}, TOP)


def read_config(
    source: Mapping[str, Any] | str | Path, world: int, device: str = "cpu", auto: AutoValues | None = None
) -> DropinConfig:
    """Read a dict or a file, for `world` ranks with a device of this type. One PlanError reports all problems.

    Sequence parallelism is a problem, because the engine has none.

    auto: what keys that are "auto" are filled in from; each that was filled is a note.
    """
    given, reader = load(source), Reader(HOMES)
    if auto is not None:
        found = auto_values(given, auto, world)
        given = with_values(given, found)
        reader.notes += [f"auto: {', '.join(f'{path}={one.value}' for path, one in found.items())}"] if found else []
    config = examine(given, world, device, reader, engine=True)
    reader.finish()
    return config


def examine(given: Mapping[str, Any], world: int, device: str, reader: Reader, *, engine: bool = False) -> DropinConfig:
    """Read a configuration; all problems are added to the reader's, and the result is of use if there are none.

    engine: for the engine, which has no sequence parallelism.
    """
    values = reader.read(TOP, _in_new_form(given, reader))
    degrees = read_degrees(values, world, reader, engine=engine)
    reader.notes += notes_of(degrees)
    precision = _precision(values, reader)
    zero = with_new_names(values.get("zero_optimization", {}), reader)
    plan = read_plan(zero, reader)
    wire = read_wire(zero, plan, reader)
    offload = read_offload(zero, values.get("aio", {}), plan, device, reader)
    loss_scale = _loss_scale(values.get("fp16", {}), reader)
    batch = read_batch(values, batch_ranks(values, world), reader)
    optimizer = choose_optimizer(values.get("optimizer"), reader)
    clip_norm = _clip_norm(values, optimizer, reader)
    schedule = choose_schedule(values.get("scheduler"), reader)
    if schedule is not None and optimizer is not None and not engine:  # the engine's optimizer may be the call's
        schedule, fitted, notes = schedule.fit(optimizer.config)
        optimizer = replace(optimizer, config=fitted)
        reader.notes += notes
    check_one_bit(optimizer, plan, clip_norm, reader)
    if not engine:
        reader.unused("zero_optimization", zero, ["leaf_module"])
        reader.idle += [name for name in OWN if name in values]
    return DropinConfig(
        plan=plan,
        wire=wire,
        offload=offload,
        precision=precision,
        loss_scale=loss_scale,
        batch=batch,
        clip_norm=clip_norm,
        optimizer=optimizer,
        schedule=schedule,
        fp32_buffers=precision.param != "fp32" and "buffer_dtype" in values.get("data_types", {}),
        casts_inputs=precision.param == "fp16" and values["fp16"].get("auto_cast", False),
        drop_last=values.get("dataloader_drop_last", False),
        managed_accumulation=values.get("managed_gradient_accumulation", True),
        idle=tuple(reader.idle),
        notes=tuple(reader.notes),
        older=dict(reader.older),
        degrees=degrees,
        leaf_modules=zero.get("leaf_module", {}),
        node_local=values.get("checkpoint", {}).get(NODE_LOCAL, False),
        prefetch=0 if any(path.rpartition(".")[2] in zero for path in AHEAD) else 1,
        given=given,
    )


def _in_new_form(given: Mapping[str, Any], reader: Reader) -> Mapping[str, Any]:
    """The configuration with the sections that early versions of DeepSpeed had in their present form."""
    section = given.get("zero_optimization")
    if isinstance(section, bool):
        reader.older[f"zero_optimization: {str(section).lower()}"] = f"zero_optimization.{ZERO_LEVEL}: {int(section)}"
        given = {**given, "zero_optimization": {ZERO_LEVEL: int(section)}}
    if "bfloat16" in given:
        if "bf16" in given:
            reader.refuse("bfloat16", "expected it or bf16, which replaced it, found both; keep bf16")
        reader.older["bfloat16"] = "bf16"
        given = {"bf16": given["bfloat16"], **{name: value for name, value in given.items() if name != "bfloat16"}}
    return given


def _precision(values: Mapping[str, Any], reader: Reader) -> MixedPrecision:
    """fp32 unless fp16 or bf16 is enabled; gradients are reduced and accumulated in fp32 unless keys say otherwise."""
    names: tuple[DType, ...] = ("fp16", "bf16")
    enabled = [name for name in names if values.get(name, {}).get("enabled", False)]
    if len(enabled) == 2:
        reader.problems.append("fp16.enabled, bf16.enabled: expected at most one of them, found both; disable one")
    pure = enabled == ["bf16"] and values["bf16"].get("bf16_master_weights_and_grads", False)
    usual: DType = "bf16" if pure else "fp32"
    reduce = _dtype(values.get("communication_data_type"), usual, "communication_data_type", reader)
    grad = values.get("data_types", {}).get("grad_accum_dtype")
    accumulate = _dtype(grad, usual, "data_types.grad_accum_dtype", reader)
    param: DType = enabled[0] if enabled else "fp32"
    named = values.get("data_types", {}).get("param_dtype")
    if _dtype(named, param, "data_types.param_dtype", reader) != param:
        reader.refuse("data_types.param_dtype", f"expected {param}, which fp16 and bf16 say, found {shown(named)}")
    return MixedPrecision(param, reduce, accumulate, master=usual)


def _dtype(name: str | None, usual: DType, where: str, reader: Reader) -> DType:
    for dtype in ITEMSIZE_BYTES:
        if dtype == (name or usual).lower():
            return dtype
    reader.problems.append(f"{where}: expected one of {', '.join(sorted(ITEMSIZE_BYTES))}, found {shown(name)}")
    return usual


def _loss_scale(fp16: Mapping[str, Any], reader: Reader) -> LossScaleRule:
    """The rule of the section fp16. A loss_scale of 0 is dynamic; the rule has DeepSpeed's defaults for other keys."""
    if not fp16.get("enabled", False):
        return UNSCALED
    given = {one.name: fp16[key] for key, one in keys_of(LossScaleRule).items() if key in fp16}
    static = fp16.get("loss_scale", 0) or None
    with reader.collecting("fp16"):
        return LossScaleRule(**{**given, "static": None if static is None else float(static)})
    return UNSCALED


def _clip_norm(values: Mapping[str, Any], chosen: ChosenOptimizer | None, reader: Reader) -> float | None:
    """The norm to clip to; 1.0 if it is not given, as in DeepSpeed since 0.19.3, and None for 0."""
    clip = values.get("gradient_clipping")
    if clip is None and chosen is not None and isinstance(chosen.config, OneBitAdamConfig):
        return None  # DeepSpeed's last version with this optimizer did not clip without the key
    if clip is None:
        reader.notes.append(
            f"gradient_clipping is not given: gradients are clipped at a norm of {DEFAULT_CLIP_NORM}, as in DeepSpeed "
            "since 0.19.3 (older versions did not clip); write 0.0 for no clipping"
        )
        return DEFAULT_CLIP_NORM
    if clip < 0:
        reader.problems.append(f"gradient_clipping: expected at least 0 (0 is none), found {clip}")
    return float(clip) or None
