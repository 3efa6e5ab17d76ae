"""What of a DeepSpeed configuration enters the bytes of a rank (zero_runtime/predict/memory/peers.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from orchestrator.config.schema import Device, RunConfig
from zero_runtime.precision import ITEMSIZE_BYTES
from zero_runtime.predict.memory.peer_deepspeed import DeepSpeedSettings, deepspeed
from zero_runtime.predict.memory.peers import SINGLE, PeerMemory, PeerModel

KEYS = {
    "reduce_bucket_size": "reduce_bucket_size",
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "max_live_parameters": "stage3_max_live_parameters",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
    "sub_group_size": "sub_group_size",
    "overlap_comm": "overlap_comm",
    "contiguous_gradients": "contiguous_gradients",
}
OFFLOADED = {"optimizer_on_host": "offload_optimizer", "params_on_host": "offload_param"}


def settings_in(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of DeepSpeedSettings that a configuration of DeepSpeed sets; "auto" is its default."""
    zero = given.get("zero_optimization") or {}
    found = {name: zero[key] for name, key in KEYS.items() if zero.get(key) not in (None, "auto")}
    found = {name: value if isinstance(value, bool) else int(value) for name, value in found.items()}
    away = {name: (zero.get(key) or {}).get("device", "none") != "none" for name, key in OFFLOADED.items()}
    accumulates = (given.get("data_types") or {}).get("grad_accum_dtype")
    enabled = {key: bool((given.get(key) or {}).get("enabled")) for key in ("bf16", "torch_autocast")}
    more = {"bf16": enabled["bf16"], "autocast": enabled["torch_autocast"], "fp32_gradients": accumulates == "fp32"}
    more["immediate_grad_update"] = bool((given.get("bf16") or {}).get("immediate_grad_update"))
    more["accumulates"] = int(given.get("gradient_accumulation_steps") or 1) > 1
    return {**found, **away, **more}


def autocast_in(given: Mapping[str, Any]) -> str | None:
    """The dtype of torch_autocast in a configuration of DeepSpeed; None if it is not enabled."""
    section = given.get("torch_autocast") or {}
    return {"bfloat16": "bf16", "float16": "fp16"}[section["dtype"]] if section.get("enabled") else None


def memory_of(model: PeerModel, config: RunConfig, given: Mapping[str, Any]) -> PeerMemory | None:
    """The bytes of a rank; None for offload at stage 0, which DeepSpeed has not. given: its configuration.

    Our runs give it an optimizer of torch.optim, not its FusedAdam. On a CPU a bucket takes the memory that is written.
    """
    settings = DeepSpeedSettings(**settings_in(given), fused=False)
    if config.zero.stage == 0 and settings.optimizer_on_host:
        return None
    if config.resources.device is not Device.cuda:
        written = min(settings.reduce_bucket_size, model.trained_numel)
        settings = replace(settings, reduce_bucket_size=written)
    if config.precision.dtypes.master == "bf16":
        settings = replace(settings, half_states=True, fp32_gradients=False)
    weights = SINGLE if settings.autocast else ITEMSIZE_BYTES[config.precision.dtypes.param]
    return deepspeed(model, config.zero.plan, config.data_ranks, settings, weights=weights)
