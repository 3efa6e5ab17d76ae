"""Reads settings of FSDP, as Accelerate and the Trainer name them, into DeepSpeed's form of the same sharding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.config.strict import nearest
from orchestrator.wings.foreign.findings import Fate, Foreign, KeyFinding

# By strategy, its number in FSDP 1 and its name: the stage, and whether shards are replicated over the machines.
_STRATEGIES = {
    "FULL_SHARD": (3, False),
    "SHARD_GRAD_OP": (2, False),
    "NO_SHARD": (0, False),
    "HYBRID_SHARD": (3, True),
    "HYBRID_SHARD_ZERO2": (2, True),
}
_BY_NUMBER = {str(number): name for number, name in enumerate(_STRATEGIES, 1)}
ACTING = (
    *("sharding_strategy", "reshard_after_forward", "offload_params", "activation_checkpointing", "version"),
    *("activation_checkpointing_offload", "reduce_dtype"),
)
IDLE = frozenset(
    [
        *("auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params", "backward_prefetch"),
        *("backward_prefetch_policy", "forward_prefetch", "use_orig_params", "sync_module_states"),
        *("cpu_ram_efficient_loading", "state_dict_type", "limit_all_gathers", "ignored_modules", "xla"),
        *("xla_fsdp_settings", "xla_fsdp_grad_ckpt", "xla_fsdp_v2", "final_state_dict_type"),
    ]
)


def read_fsdp(settings: Mapping[str, Any], mixed: str, ranks_per_machine: int | None, found: Foreign) -> None:
    """Adds what these settings mean. `mixed`: no, bf16 or fp16. Names may have the prefix fsdp_."""
    plain = {}
    for key, value in settings.items():
        name = str(key).removeprefix("fsdp_")
        if name in ACTING:
            plain[name] = str(value)
        elif name in IDLE:
            found.keys.append(KeyFinding(str(key), str(value), Fate.idle))
        else:
            near = nearest(name, [*ACTING, *IDLE])
            hint = f"; did you mean {'fsdp_' if str(key).startswith('fsdp_') else ''}{near}?" if near else ""
            found.problems.append(f"{key}: unknown key of FSDP{hint}")
    found.engine = "FSDP"
    level, hybrid = _strategy(plain, found)
    zero: dict[str, Any] = {"stage": level}
    if hybrid:
        _hybrid(zero, level, ranks_per_machine, found)
    if _is_true(plain.get("offload_params")):
        zero |= _offload(level, found)
    if _is_true(plain.get("activation_checkpointing")):
        found.words["recompute"] = "full"
        if _is_true(plain.get("activation_checkpointing_offload")):
            found.words["recompute.offload"] = "cpu"
    found.keys += [KeyFinding(f"fsdp_{name}", value, Fate.mapped, _words_of(name)) for name, value in plain.items()]
    found.config["zero_optimization"] = zero
    if mixed in ("bf16", "fp16"):
        found.config[mixed] = {"enabled": True}
        reduce = found.config["communication_data_type"] = plain.get("reduce_dtype", mixed)
        if reduce == mixed:
            found.notes.append(f"FSDP reduces gradients in {mixed} here: precision.reduce={mixed}; fp32 is more exact")


def _strategy(plain: Mapping[str, str], found: Foreign) -> tuple[int, bool]:
    """The stage of a strategy. Version 2 has no strategy: reshard_after_forward tells stage 3 from stage 2."""
    reshard = plain.get("reshard_after_forward", "true")
    name = plain.get("sharding_strategy", "")
    if not name and reshard.upper() in _STRATEGIES:  # FSDP 1 of newer versions of Accelerate
        name = reshard
    if not name:
        return (3 if _is_true(reshard) else 2), False
    name = _BY_NUMBER.get(name, name).upper()
    if name not in _STRATEGIES:
        found.problems.append(f"fsdp_sharding_strategy: expected one of {', '.join(_STRATEGIES)}, found {name}")
        return 3, False
    return _STRATEGIES[name]


def _hybrid(zero: dict[str, Any], level: int, ranks_per_machine: int | None, found: Foreign) -> None:
    if level != 3:
        found.problems.append(
            "fsdp_sharding_strategy HYBRID_SHARD_ZERO2: groups of ranks need stage 3 here; HYBRID_SHARD has them"
        )
    elif ranks_per_machine is None:
        found.problems.append("fsdp_sharding_strategy HYBRID_SHARD: expected num_processes and num_machines beside it")
    else:
        zero["mics_shard_size"] = ranks_per_machine


def _offload(level: int, found: Foreign) -> dict[str, Any]:
    """CPUOffload keeps the shards of parameters, gradients and optimizer states in host memory."""
    if level == 0:
        found.problems.append("fsdp_offload_params: NO_SHARD has no shards to offload; leave it out")
        return {}
    params = {"offload_param": {"device": "cpu"}} if level == 3 else {}
    if not params:
        found.notes.append("fsdp_offload_params at stage 2: masters and optimizer states are offloaded, parameters not")
    return {"offload_optimizer": {"device": "cpu"}, **params}


def _is_true(value: str | None) -> bool:
    return (value or "").lower() in ("true", "1", "full_shard")


def _words_of(name: str) -> tuple[str, ...]:
    others = {"offload_params": ("offload",), "version": (), "reduce_dtype": ("precision.reduce",)}
    checkpointing = name.startswith("activation_checkpointing")
    return ("recompute",) if checkpointing else others.get(name, ("zero", "zero.shard_ranks"))


def trainer_words(text: str) -> dict[str, str]:
    """The Trainer's argument --fsdp, such as "full_shard auto_wrap offload", as settings of FSDP."""
    settings = {}
    for word in text.replace(",", " ").split():
        if word.upper() in _STRATEGIES:
            settings["sharding_strategy"] = word.upper()
        elif word == "offload":
            settings["offload_params"] = "true"
        elif word == "auto_wrap":
            settings["auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"
        else:
            settings[word] = "true"
    return settings
