"""Reads from the installed package DeepSpeed its schedules' rates and its keys' defaults, for test_real_values.py.

`python tests/foreign/real_values.py` writes both to tests/foreign/real_values.json, with the package's version.
"""

from __future__ import annotations

import inspect
import json
from enum import Enum
from pathlib import Path
from typing import Any

import torch

RECORDED = Path(__file__).with_suffix(".json")
STEPS = 14
Seen = list[list[float]]  # of each parameter group, the rate and both betas
# Each: the type, its parameters, and the rates of the optimizer's groups.
CASES: list[tuple[str, dict[str, Any], list[float]]] = [
    ("WarmupLR", {"warmup_num_steps": 5}, [2e-5, 3e-4]),
    ("WarmupLR", {"warmup_min_lr": 1e-6, "warmup_num_steps": 7, "warmup_type": "linear"}, [2e-5, 3e-4, 0.0]),
    ("WarmupLR", {"warmup_max_lr": None, "warmup_num_steps": 3}, [2e-5]),
    ("WarmupLR", {"warmup_max_lr": [0.1, 0.3], "warmup_min_lr": [0.0, 0.01], "warmup_num_steps": 6}, [1.0, 2.0]),
    ("WarmupLR", {"warmup_max_lr": 0.7, "warmup_num_steps": 1}, [1.0, 2.0]),
    ("WarmupDecayLR", {"total_num_steps": 11, "warmup_num_steps": 4}, [2e-5, 3e-4]),
    ("WarmupDecayLR", {"total_num_steps": 11, "warmup_num_steps": 4, "warmup_max_lr": None}, [2e-5, 3e-4]),
    ("WarmupDecayLR", {"total_num_steps": 9, "warmup_num_steps": 2, "warmup_max_lr": [0.3, 0.7]}, [1.0, 2.0]),
    ("WarmupCosineLR", {"total_num_steps": 11, "warmup_num_steps": 4, "warmup_min_ratio": 0.1}, [2e-5, 3e-4]),
    ("WarmupCosineLR", {"total_num_steps": 9, "warmup_type": "linear", "warmup_num_steps": 3}, [0.7, 3e-4]),
    ("OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": 7e-3, "cycle_first_step_size": 5}, [1.0, 2.0]),
    (
        "OneCycle",
        {
            **{"cycle_min_lr": [1e-4, 3e-4], "cycle_max_lr": [7e-3, 9e-3], "cycle_first_step_size": 3},
            **{"cycle_second_step_size": 7, "decay_step_size": 2, "decay_lr_rate": 0.3, "decay_mom_rate": 0.01},
        },
        [1.0, 2.0],
    ),
    (
        "OneCycle",
        {
            **{"cycle_min_lr": 0.1, "cycle_max_lr": 0.7, "cycle_first_step_size": 7, "cycle_second_step_size": 5},
            **{"cycle_first_stair_count": 3, "cycle_second_stair_count": 2, "cycle_momentum": False},
        },
        [1.0],
    ),
    (
        "OneCycle",
        {"cycle_min_lr": 0.1, "cycle_max_lr": 0.7, "cycle_first_step_size": 4, "cycle_second_step_size": 0},
        [1],
    ),
    ("LRRangeTest", {"lr_range_test_min_lr": [1e-4, 3e-3], "lr_range_test_step_size": 3}, [1.0, 2.0]),
    ("LRRangeTest", {"lr_range_test_step_size": 4, "lr_range_test_staircase": True}, [1.0, 2.0]),
]


def groups_of(rates: list[float]) -> list[dict[str, Any]]:
    return [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]


def seen(optimizer: torch.optim.Optimizer) -> Seen:
    """The rate and both betas of each group."""
    return [[float(group["lr"]), *map(float, group["betas"])] for group in optimizer.param_groups]


def real_rates() -> dict[str, list[Seen]]:
    """By case and step, what the installed package sets."""
    from deepspeed.runtime import lr_schedules

    found = {}
    for index, (kind, params, rates) in enumerate(CASES):
        optimizer = torch.optim.AdamW(groups_of(rates))
        schedule = getattr(lr_schedules, kind)(optimizer, **params)
        steps = [seen(optimizer)]
        for _ in range(STEPS - 1):
            schedule.step()
            steps.append(seen(optimizer))
        found[str(index)] = steps
    return found


# Top-level keys: the function of DeepSpeed's config module that reads each.
_READERS = (
    *("gradient_accumulation_steps", "managed_gradient_accumulation", "steps_per_print", "dump_state"),
    *("disable_python_gc", "disable_allgather", "communication_data_type", "prescale_gradients"),
    *("gradient_predivide_factor", "gradient_allreduce_op", "gradient_clipping", "zero_allow_untested_optimizer"),
    *("zero_force_ds_cpu_optimizer", "wall_clock_breakdown", "memory_breakdown", "dataloader_drop_last", "log_level"),
    *("train_batch_size", "train_micro_batch_size_per_gpu"),
)


def real_defaults() -> dict[str, Any]:
    """The default of every key by its path; null where a key has none or another key decides."""
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import FusedLion
    from deepspeed.runtime import config, constants, lr_schedules
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    found = {name: getattr(config, f"get_{name}")({}) for name in _READERS}
    found |= {f"aio.{name}": value for name, value in AIO_DEFAULT_DICT.items()}
    for name in ("grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules"):
        found[f"data_types.{name}"] = getattr(constants, f"{name.upper()}_DEFAULT")
    for section, kind in (
        ("zero_optimization", DeepSpeedZeroConfig),
        ("zero_optimization.offload_param", DeepSpeedZeroOffloadParamConfig),
        ("zero_optimization.offload_optimizer", DeepSpeedZeroOffloadOptimizerConfig),
        ("fp16", DeepSpeedFP16Config),
        ("bf16", DeepSpeedBF16Config),
    ):
        for name, one in kind.model_fields.items():
            for key in {name, one.alias or name}:
                found[f"{section}.{key}"] = _plain(one.get_default(call_default_factory=True))
    optimizers = {"Adam": FusedAdam, "Lamb": FusedLamb, "Lion": FusedLion, "SGD": torch.optim.SGD}
    for name, made in optimizers.items():
        found |= {f"optimizer.{name}.{key}": value for key, value in _defaults_of(made).items()}
    for name in sorted({kind for kind, _, _ in CASES}):
        found |= {f"scheduler.{name}.{key}": value for key, value in _defaults_of(getattr(lr_schedules, name)).items()}
    return dict(sorted(found.items()))


def _defaults_of(made: Any) -> dict[str, Any]:
    arguments = inspect.signature(made.__init__).parameters.values()
    return {one.name: _plain(one.default) for one in arguments if one.default is not one.empty}


def _plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    if hasattr(value, "model_dump"):
        return {name: _plain(one) for name, one in value.model_dump().items()}
    if isinstance(value, (bool, str)) or value is None:
        return value.value if isinstance(value, Enum) else value
    return type(value).__mro__[-2](value) if isinstance(value, (int, float)) else str(value)


def main() -> None:
    import deepspeed

    parts = [f'"version": {json.dumps(deepspeed.__version__)}']
    for name, found in (("defaults", real_defaults()), ("rates", real_rates())):
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items()]
        parts.append(f'"{name}": {{\n' + ",\n".join(lines) + "\n}")
    RECORDED.write_text("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    main()
