"""What DeepSpeed and the Trainer do without a word for keys that are given, missing or "auto"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class _Case(NamedTuple):
    applies: Callable[[Mapping[str, Any]], bool]
    text: str


def _value(config: Mapping[str, Any], path: str, usual: Any = None) -> Any:
    inner: Any = config
    for name in path.split("."):
        if not isinstance(inner, Mapping) or name not in inner:
            return usual
        inner = inner[name]
    return inner


def _level(config: Mapping[str, Any]) -> int:
    section = config.get("zero_optimization")
    return int(section) if isinstance(section, bool) else int(_value(config, "zero_optimization.stage", 0) or 0)


def _mixed(config: Mapping[str, Any]) -> bool:
    return any(_value(config, f"{name}.enabled") is True for name in ("fp16", "bf16", "bfloat16"))


def _kind(config: Mapping[str, Any], section: str) -> str:
    return str(_value(config, f"{section}.type", "")).lower()


_CASES = (
    _Case(
        lambda config: config.get("gradient_clipping") is None and _kind(config, "optimizer") != "onebitadam",
        "gradient_clipping is missing: gradients are clipped at 1.0, as in DeepSpeed since 0.19.3 (older versions did "
        "not clip); optimizer.clip_norm=null switches it off",
    ),
    _Case(
        lambda config: _level(config) == 3 and _live(config) >= 1e9,
        "stage 3 keeps up to 1e9 gathered parameters (stage3_max_live_parameters; 2 GB in 16 bits) and every parameter "
        "below stage3_param_persistence_threshold; here a unit is released after its use (zero.prefetch)",
    ),
    _Case(
        lambda config: _level(config) in (1, 2) and _value(config, "zero_optimization.overlap_comm") is True,
        "overlap_comm takes 4.5 times the buckets: with 5e8 elements 9 GB a GPU; here the buckets are the units",
    ),
    _Case(
        lambda config: _mixed(config) and config.get("communication_data_type") is None and _level(config) > 0,
        "gradients are reduced in the 16-bit dtype by DeepSpeed, in fp32 here: precision.reduce=bf16 (or fp16) sends "
        "as many bytes",
    ),
    _Case(
        lambda config: (
            _mixed(config)
            and _value(config, "data_types.grad_accum_dtype") is None
            and (config.get("gradient_accumulation_steps") or 1) != 1
        ),
        "micro-batches are summed in the 16-bit dtype by DeepSpeed, in fp32 here: precision.accumulate",
    ),
    _Case(
        lambda config: _value(config, "bf16.enabled") is True,
        "a bf16 step whose gradients overflow is skipped by DeepSpeed 0.19 (check_grad_overflow); here it ends the run "
        "and names the parameter",
    ),
    _Case(
        lambda config: (
            _kind(config, "optimizer") == "adam" and _value(config, "optimizer.params.adam_w_mode", True) is True
        ),
        "type Adam is AdamW in DeepSpeed, unless adam_w_mode is false",
    ),
    _Case(
        lambda config: (
            _kind(config, "optimizer") == "adamw" and _value(config, "optimizer.params.adam_w_mode") is False
        ),
        "type AdamW is AdamW, whatever adam_w_mode says",
    ),
    _Case(
        lambda config: bool(_value(config, "optimizer.params.weight_decay")),
        "an optimizer section decays norms and biases too (optimizer.no_decay=false); the Trainer's own does not",
    ),
    _Case(
        lambda config: (
            _kind(config, "scheduler").startswith("warmup")
            and "warmup_type" not in (_value(config, "scheduler.params") or {})
        ),
        "the rise is logarithmic unless warmup_type is linear",
    ),
    _Case(
        lambda config: "warmup_max_lr" in (_value(config, "scheduler.params") or {}),
        "warmup_max_lr replaces optimizer.params.lr",
    ),
    _Case(
        lambda config: _kind(config, "scheduler") in ("warmupdecaylr", "warmupcosinelr"),
        "total_num_steps is the length of the run here (measure.warmup_steps + measure.steps): the schedule ends there",
    ),
    _Case(
        lambda config: (
            _level(config) == 3
            and not _value(config, "zero_optimization.stage3_gather_16bit_weights_on_model_save")
            and not _value(config, "zero_optimization.gather_16bit_weights_on_model_save")
        ),
        "without stage3_gather_16bit_weights_on_model_save DeepSpeed saves no weights that from_pretrained reads; here "
        "checkpoint.weights=bf16 or export-weights does",
    ),
    _Case(
        lambda config: (
            _value(config, "zero_optimization.offload_optimizer.device") == "nvme" and _level(config) in (1, 2)
        ),
        "nvme below stage 3: DeepSpeed keeps the states in memory; here they are in the file",
    ),
)


def _live(config: Mapping[str, Any]) -> float:
    for prefix in ("stage3_", ""):
        value = _value(config, f"zero_optimization.{prefix}max_live_parameters")
        if isinstance(value, (int, float)):
            return value
    return 1e9


def silent_effects(config: Mapping[str, Any]) -> list[str]:
    """What is done in silence with this configuration, whose "auto" values are filled in."""
    return [case.text for case in _CASES if case.applies(config)]
