"""Brings the flags of `accelerate launch` into the form of Accelerate's file, over which they have precedence."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from orchestrator.wings.foreign.accelerate_file import DEEPSPEED, DEEPSPEED_IDLE, FILE, PARALLELISM
from orchestrator.wings.foreign.fsdp import ACTING as FSDP_ACTING
from orchestrator.wings.foreign.fsdp import IDLE as FSDP_IDLE

TYPES = {  # the flag that says what is started, by distributed_type
    "use_deepspeed": "DEEPSPEED",
    "use_fsdp": "FSDP",
    "multi_gpu": "MULTI_GPU",
    "cpu": "MULTI_CPU",
    "tpu": "XLA",
    "use_megatron_lm": "MEGATRON_LM",
}
COUNTS = ("num_processes", "num_machines")
_TOP = (*COUNTS, "mixed_precision")
_ALONE = (*TYPES, *_TOP, "config_file", "use_parallelism_config")  # no other launcher and no script has these
_IDLE = frozenset(
    [
        *("quiet", "num_cpu_threads_per_process", "enable_cpu_affinity", "gpu_ids", "same_network", "machine_rank"),
        *("main_process_ip", "main_process_port", "tee", "log_dir", "role", "rdzv_backend", "rdzv_conf"),
        *("max_restarts", "monitor_interval", "no_python", "env", "debug", "main_training_function", "downcast_bf16"),
        *("mpirun_hostfile", "use_parallelism_config", "dynamo_backend", "dynamo_mode", "dynamo_use_fullgraph"),
        *("dynamo_use_dynamic", "dynamo_use_regional_compilation"),
    ]
)
_SECTIONS = {
    "DEEPSPEED": ("deepspeed_config", frozenset([*DEEPSPEED, *DEEPSPEED_IDLE, FILE])),
    "FSDP": ("fsdp_config", frozenset(f"fsdp_{name}" for name in (*FSDP_ACTING, *FSDP_IDLE))),
}


def is_flag(name: str, *, alone: bool = False) -> bool:
    """Whether `accelerate launch` has this flag. `alone`: and scripts and other launchers do not."""
    if alone:
        return name in _ALONE
    known = name in _ALONE or name in _IDLE or any(name in names for _, names in _SECTIONS.values())
    return known or name.startswith((PARALLELISM, "megatron_lm_", "fp8_"))


def kind_of(flags: Mapping[str, str], file: Mapping[str, Any] | None) -> str | None:
    """The distributed_type that flags or a file say; None without either."""
    said = next((kind for flag, kind in TYPES.items() if flag in flags), None)
    return said if said or file is None else str(file.get("distributed_type", "NO")).upper()


def over_file(flags: Mapping[str, str], file: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """The content of the file with the flags over it; a flag that the type does not read is a problem."""
    content = copy.deepcopy(dict(file))
    kinds = [kind for flag, kind in TYPES.items() if flag in flags]
    if len(kinds) > 1:
        problems.append(f"expected one of --use_deepspeed, --use_fsdp and --multi_gpu, found {', '.join(kinds)}")
    content["distributed_type"] = kind = kind_of(flags, file) or "NO"
    for name, text in flags.items():
        section = next((one for one, (_, names) in _SECTIONS.items() if name in names), None)
        if name in _TOP:
            content[name] = _plain(text)
        elif name.startswith(PARALLELISM):
            content.setdefault("parallelism_config", {})[name] = _plain(text)
        elif section == kind:
            key = _SECTIONS[section][0]
            content[key] = {**(content.get(key) or {}), name: _plain(text)}
        elif section is not None:
            problems.append(
                f"--{name}: Accelerate ignores it with {kind}; give --use_{section.lower()}, or leave it out"
            )
    return content


def _plain(text: str) -> Any:
    """A flag's value as a file of Accelerate has it."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        return text
