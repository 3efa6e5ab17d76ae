"""Reads a configuration file of Accelerate: its launcher's keys, and its sections for DeepSpeed and FSDP."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.config.strict import nearest
from orchestrator.wings.foreign.findings import Fate, Foreign, KeyFinding
from orchestrator.wings.foreign.fsdp import read_fsdp
from zero_runtime.deepspeed.json_text import load

_IDLE = frozenset(
    [
        *("compute_environment", "debug", "downcast_bf16", "dynamo_backend", "dynamo_config", "enable_cpu_affinity"),
        *("gpu_ids", "machine_rank", "main_process_ip", "main_process_port", "main_training_function"),
        *("rdzv_backend", "rdzv_conf", "same_network", "tpu_env", "tpu_use_cluster", "tpu_use_sudo", "tpu_name"),
        *("tpu_zone", "tpu_vm", "commands", "command_file", "mpirun_config", "use_cpu"),
    ]
)
SECTIONS = ("deepspeed_config", "fsdp_config", "parallelism_config")
_ACTING = ("distributed_type", "mixed_precision", "fp16", "num_processes", "num_machines", *SECTIONS)
_OTHERS = {
    "megatron_lm_config": "Megatron-LM's tensor and pipeline parallelism are not here",
    "fp8_config": "float8 is not here",
}
_PLAIN_DDP = ("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU")
# Accelerate's names of the keys of a section that names no file, by the key of DeepSpeed.
DEEPSPEED = {
    "zero_stage": ("zero_optimization", "stage"),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("gradient_clipping",),
    "offload_optimizer_device": ("zero_optimization", "offload_optimizer", "device"),
    "offload_optimizer_nvme_path": ("zero_optimization", "offload_optimizer", "nvme_path"),
    "offload_param_device": ("zero_optimization", "offload_param", "device"),
    "offload_param_nvme_path": ("zero_optimization", "offload_param", "nvme_path"),
    "zero3_save_16bit_model": ("zero_optimization", "stage3_gather_16bit_weights_on_model_save"),
}
DEEPSPEED_IDLE = (
    "zero3_init_flag",
    "deepspeed_multinode_launcher",
    "deepspeed_hostfile",
    "deepspeed_exclusion_filter",
    "deepspeed_inclusion_filter",
    "deepspeed_moe_layer_cls_names",
)
FILE, PARALLELISM = "deepspeed_config_file", "parallelism_config_"
_PARALLEL_BY_KIND = {"FSDP": ("dp_replicate", "dp_shard", "tp"), "DEEPSPEED": ("sp",)}
_PARALLEL_WORDS = {
    **dict.fromkeys(("dp_replicate", "dp_shard"), ("zero.shard_ranks",)),
    **{"tp": ("parallel.tp",), "cp": ("parallel.sp",), "sp": ("parallel.sp",)},
}


def is_accelerate(content: Mapping[str, Any]) -> bool:
    """Whether a file's keys are those of Accelerate's launcher."""
    return "distributed_type" in content or "compute_environment" in content


def read_accelerate(content: Mapping[str, Any], source: str, folder: Path) -> Foreign:
    """Reads the content. `folder`: where a relative deepspeed_config_file is looked for. PlanError if that is bad."""
    found = Foreign(source)
    for key in content:
        if key not in (*_IDLE, *_ACTING, *_OTHERS):
            near = nearest(str(key), [*_IDLE, *_ACTING])
            found.problems.append(f"{key}: unknown key of Accelerate{f'; did you mean {near}?' if near else ''}")
        elif key in _IDLE:
            found.keys.append(KeyFinding(key, str(content[key]), Fate.idle))
        elif key in _OTHERS and content[key]:
            found.problems.append(f"{key}: {_OTHERS[key]}; leave it out")
    kind = str(content.get("distributed_type", "NO")).upper()
    mixed = _mixed(content, found)
    read_counts(content, found)
    readers: dict[str, Callable[[], None]] = {
        "DEEPSPEED": lambda: _deepspeed(content, mixed, folder, found),
        "FSDP": lambda: _fsdp(content, mixed, found),
        **dict.fromkeys(_PLAIN_DDP, lambda: _data_parallel(content, kind, mixed, found)),
    }
    if kind in readers:
        readers[kind]()
        _parallelism(content.get("parallelism_config") or {}, kind, found)
    else:
        found.problems.append(f"distributed_type: expected one of {', '.join(readers)}, found {kind}")
    return found


def read_counts(content: Mapping[str, Any], found: Foreign) -> None:
    """Reads ranks and machines; num_processes counts the ranks of all machines."""
    ranks, machines = content.get("num_processes"), content.get("num_machines")
    if isinstance(ranks, int) and ranks > 0:
        found.ranks = ranks
        found.keys.append(KeyFinding("num_processes", str(ranks), Fate.mapped, ("resources.ranks",)))
    if machines is None:
        return
    found.keys.append(KeyFinding("num_machines", str(machines), Fate.mapped, ("resources.nodes",)))
    if not isinstance(machines, int) or machines < 1 or (found.ranks or machines) % machines:
        found.problems.append(f"num_machines: expected a divisor of the {found.ranks} processes, found {machines}")
    elif machines > 1:
        found.words["resources.nodes"] = str(machines)


def _parallelism(section: Mapping[str, Any], kind: str, found: Foreign) -> None:
    """The sizes of parallelism_config: hybrid shards and tensor parallelism of FSDP, sequences of DeepSpeed."""
    sizes = dict.fromkeys(_PARALLEL_WORDS, 1)
    for key, value in section.items():
        name = str(key).removeprefix(PARALLELISM).removesuffix("_size")
        if name not in sizes:
            found.keys.append(KeyFinding(str(key), str(value), Fate.idle))
        elif isinstance(value, int) and (value > 0 or (name, value) == ("dp_shard", -1)):
            sizes[name] = value
            found.keys.append(KeyFinding(str(key), str(value), Fate.mapped, _PARALLEL_WORDS[name]))
        else:
            found.problems.append(f"{key}: expected a whole number above 0, found {value}")
    wrong = [name for name, size in sizes.items() if size > 1 and name not in _PARALLEL_BY_KIND.get(kind, ())]
    found.problems += [
        f"{PARALLELISM}{name}_size: expected 1 with {kind}, found {sizes[name]}; its counterpart after the file is "
        f"{_PARALLEL_WORDS[name][0]}=N"
        for name in wrong
    ]
    if wrong:
        return
    if sizes["dp_shard"] < 0:  # the ranks that are left
        sizes["dp_shard"] = max(1, (found.ranks or 0) // (sizes["dp_replicate"] * sizes["tp"]))
    product = math.prod(sizes.values())
    if kind == "FSDP" and product > 1:
        if found.ranks not in (None, product):
            found.problems.append(f"parallelism_config: expected sizes with the product {found.ranks}, found {product}")
        found.ranks = product
    if sizes["dp_replicate"] > 1 and sizes["dp_shard"] > 1:
        found.config["zero_optimization"]["mics_shard_size"] = sizes["dp_shard"]
    elif sizes["dp_replicate"] > 1:
        found.problems.append(
            f"{PARALLELISM}dp_replicate_size: expected dp_shard_size above 1, or num_processes, beside it"
        )
    if sizes["tp"] > 1:
        found.config["tensor_parallel"] = {"autotp_size": sizes["tp"]}
    if sizes["sp"] > 1:
        found.config["sequence_parallel_size"] = sizes["sp"]


def _mixed(content: Mapping[str, Any], found: Foreign) -> str:
    """no, bf16 or fp16; `fp16: true` is its older form."""
    given = content.get("mixed_precision")
    mixed = "no" if given in (None, False) else str(given).lower()  # YAML reads a bare no as false
    if content.get("fp16") is True and given is None:
        mixed = "fp16"
    if mixed not in ("no", "bf16", "fp16"):
        found.problems.append(f"mixed_precision: expected no, fp16 or bf16, found {given}")
        return "no"
    if given is not None:
        found.keys.append(KeyFinding("mixed_precision", mixed, Fate.mapped, ("precision", "precision.reduce")))
    return mixed


def _deepspeed(content: Mapping[str, Any], mixed: str, folder: Path, found: Foreign) -> None:
    section = content.get("deepspeed_config") or {}
    for key, value in section.items():
        if key in DEEPSPEED_IDLE:
            found.keys.append(KeyFinding(f"deepspeed_config.{key}", str(value), Fate.idle))
        elif key not in DEEPSPEED and key != FILE:
            near = nearest(str(key), [*DEEPSPEED, *DEEPSPEED_IDLE, FILE])
            hint = f"; did you mean {near}?" if near else ""
            found.problems.append(f"deepspeed_config.{key}: unknown key of Accelerate{hint}")
    if FILE in section:
        _from_file(section, mixed, folder, found)
    else:
        _from_keys(section, mixed, found)


def _from_file(section: Mapping[str, Any], mixed: str, folder: Path, found: Foreign) -> None:
    path = Path(section[FILE])
    found.config = load(path if path.is_absolute() or path.is_file() else folder / path)
    beside = [key for key in section if key in DEEPSPEED]
    if beside:
        found.problems.append(
            f"deepspeed_config: expected {FILE} or {', '.join(beside)}, found both, of which Accelerate takes the "
            "file's in silence; keep one"
        )
    # Accelerate sets one accumulation, and the sections of the precision, where the file has none.
    found.config.setdefault("gradient_accumulation_steps", 1)
    other = "bf16" if mixed == "fp16" else "fp16"
    for name in ("fp16", "bf16"):
        mode = found.config.get(name)
        if mode is None and name == mixed:
            found.config[name] = _section_of(mixed)
        elif isinstance(mode, Mapping) and mode.get("enabled") == "auto":
            found.config[name] = {**mode, "enabled": name == mixed}
    disabled = found.config.get(other)
    if mixed != "no" and isinstance(disabled, Mapping) and disabled.get("enabled") is True:
        found.problems.append(f"mixed_precision: {mixed}, and the file enables {other}; Accelerate refuses both")


def _from_keys(section: Mapping[str, Any], mixed: str, found: Foreign) -> None:
    config: dict[str, Any] = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    config |= {"gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}
    config["zero_optimization"] = {"stage": 2}
    for key, path in DEEPSPEED.items():
        value = section.get(key)
        if value is None or (key.endswith("nvme_path") and value == "none"):
            continue
        inner = config
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = value
    for name in ("offload_optimizer", "offload_param"):
        if config["zero_optimization"].get(name, {}).get("device") == "none":
            del config["zero_optimization"][name]
    if mixed != "no":
        config[mixed] = _section_of(mixed)
    if "zero_stage" not in section:
        found.notes.append("zero_stage is missing: Accelerate uses stage 2 in silence")
    if "gradient_clipping" not in section:
        found.notes.append('gradient_clipping is missing: Accelerate writes "auto", which the Trainer fills with 1.0')
    found.config = config


def _section_of(mixed: str) -> dict[str, bool]:
    """What Accelerate writes for a precision; with fp16, DeepSpeed then casts the inputs too."""
    return {"enabled": True, "auto_cast": True} if mixed == "fp16" else {"enabled": True}


def _fsdp(content: Mapping[str, Any], mixed: str, found: Foreign) -> None:
    per_machine = None if found.ranks is None else found.ranks // int(found.words.get("resources.nodes", 1))
    read_fsdp(content.get("fsdp_config") or {}, mixed, per_machine, found)
    _batch(found)


def _data_parallel(content: Mapping[str, Any], kind: str, mixed: str, found: Foreign) -> None:
    found.keys.append(KeyFinding("distributed_type", kind, Fate.mapped, ("zero",)))
    found.config = {"zero_optimization": {"stage": 0}}
    if mixed != "no":
        found.config[mixed] = {"enabled": True}
        found.notes.append(
            f"{kind} with mixed_precision {mixed} is autocast in Accelerate: fp32 parameters, {mixed} products, fp32 "
            f"norms; precision={mixed} computes all of them in {mixed}, with fp32 masters"
        )
    _batch(found)


def _batch(found: Foreign) -> None:
    found.config |= {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    found.config["gradient_clipping"] = "auto"
