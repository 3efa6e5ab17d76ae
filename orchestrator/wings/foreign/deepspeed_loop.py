"""Writes a point that DeepSpeed trained: the configuration that it was given, and the loop around it."""

from __future__ import annotations

import json
from typing import Any

from orchestrator import wings
from orchestrator.config.schema import RunConfig
from orchestrator.wings.engines.contract import EngineModule
from orchestrator.wings.foreign import loop_lines
from orchestrator.wings.foreign.exported import JSON_FILE, LINES_FILE, Exported, trained_by

_USE = f"""In every rank call initialize(model), and train_step for each update. Needs torch and DeepSpeed, and
{JSON_FILE} beside this file."""
_PARTS_USE = """Parts of a training loop next to {json}, for what DeepSpeed has no keys for:

    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=parameter_groups(model), config="{json}"{scheduler}
    )

Needs torch alone."""
_INITIALIZE = f'''
def initialize(model):
    """DeepSpeed's engine around the model. The process group must be there."""
    config = Path(__file__).with_name("{JSON_FILE}"){{before}}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer(model), config=str(config), lr_scheduler=schedule, dist_init_required=False
    ){{after}}
    return engine
'''
# For weights in 16 bits, of which DeepSpeed makes its masters.
_BEFORE = """
    # The masters begin as the model's fp32 weights; DeepSpeed would take the rounded ones. Not of zero.Init's shards.
    whole = [param for param in model.parameters() if param.requires_grad and not hasattr(param, "ds_tensor")]
    masters = [(param, param.detach().float().clone()) for param in whole]"""
_AFTER = """
    for param, value in masters:
        set_master(param, value)"""
_SET_MASTER = """
def set_master(param, value):
    if not hasattr(param, "ds_tensor"):
        return safe_set_full_fp32_param(param, value)
    size = param.ds_tensor.numel()
    padded = F.pad(value.flatten(), (0, size * dist.get_world_size() - value.numel()))
    return safe_set_local_fp32_param(param, padded[size * dist.get_rank() :][:size])
"""
_IMPORTS = "\nimport deepspeed\n"
_IMPORTS_OF_MASTERS = "from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param\n"
_MICRO = """engine.set_gradient_accumulation_boundary(index + 1 == len(micro_batches))
loss = loss_of(engine, input_ids, labels) / tokens
# Gradients are sums; where DeepSpeed averages over the ranks, the loss makes up for it.
engine.backward(loss * (dist.get_world_size() if engine.gradient_average else 1), scale_wrt_gas=False)"""


def exported(config: RunConfig, why: str) -> Exported:
    """The files for this point. Refusal: DeepSpeed cannot train it."""
    asked = trained_by(config, "deepspeed")
    engine: EngineModule = wings.load(wings.ENGINES["deepspeed"])
    notes = [*engine.notes_of(asked), *loop_lines.model_notes(asked, "initialize")]
    settings = engine.settings_of(asked)
    rounds = "bf16" in settings or "fp16" in settings
    first = loop_lines.heading(why, notes, _USE) + "\n"
    first += loop_lines.needed(asked, more="from pathlib import Path\n") + _IMPORTS
    parts = [
        first + (_IMPORTS_OF_MASTERS if rounds else ""),
        f"MICRO_BATCH, ACCUMULATION = {asked.batch.micro}, {asked.batch.accumulation}\n",
        loop_lines.parameter_groups(asked),
        loop_lines.optimizer(asked),
        loop_lines.rates(asked),
        _INITIALIZE.format(before=_BEFORE if rounds else "", after=_AFTER if rounds else ""),
        *([_SET_MASTER] if rounds else []),
        loop_lines.step(_MICRO, arguments="engine", update="engine.step()  # of the schedule too"),
    ]
    text = "\n".join(parts)
    files = {JSON_FILE: json.dumps(settings, indent=2) + "\n", LINES_FILE: text}
    use = f"deepspeed --num_gpus {config.resources.ranks} train.py, with from loop_parts import *"
    return Exported(files, notes, use)


def parts_file(config: RunConfig, deepspeed: dict[str, Any], why: str) -> str:
    """Parameter groups of a point of our own engine, and the schedule if the configuration has none."""
    own = "scheduler" not in deepspeed
    use = _PARTS_USE.format(json=JSON_FILE, scheduler=",\n        lr_scheduler=schedule" if own else "")
    lines = [loop_lines.parameter_groups(config), *([loop_lines.rates(config)] if own else [])]
    return "\n".join([loop_lines.heading(why, (), use), loop_lines.needed(config, steps=False), *lines])
