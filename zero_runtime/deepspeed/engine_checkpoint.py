"""Checkpoints of the drop-in engine: those of the runtime, with the engine's counters and schedule in addition."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

from zero_runtime.checkpoint.load import load_checkpoint, load_weights
from zero_runtime.checkpoint.retention import committed, newest_good_together, set_aside
from zero_runtime.checkpoint.save import SaveSettings, save_checkpoint
from zero_runtime.deepspeed.client_state import from_json, to_json
from zero_runtime.deepspeed.engine_loop import EngineLoop
from zero_runtime.deepspeed.engine_optimizer import SCHEDULED
from zero_runtime.deepspeed.foreign_checkpoints.deepspeed import is_deepspeed, open_deepspeed
from zero_runtime.deepspeed.foreign_checkpoints.source import load_foreign
from zero_runtime.deepspeed.model_folder import model_config
from zero_runtime.dtypes import TORCH_DTYPE
from zero_runtime.errors import CheckpointError, PlanError, some
from zero_runtime.world import own_node, own_rank

_COUNTERS = ("micro_steps", "global_steps", "skipped_steps")
_SAMPLES = "global_samples"


def folder_of(call: str, folder: object, tag: object = None) -> Path:
    """The folder that a call names, and the one of the tag in it; PlanError for no name and for a tag outside."""
    if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
        raise PlanError(f"engine.{call}: expected a folder, found {folder!r}; the current one is '.'")
    if tag is None:
        return Path(folder)
    inside = Path(str(tag))
    if inside.is_absolute() or not inside.parts or ".." in inside.parts:
        raise PlanError(f"engine.{call}: expected a tag that names a folder inside {folder}, found {tag!r}")
    return Path(folder) / inside


def _folder_together(
    engine: EngineLoop, call: str, folder: object, tag: object, check: Callable[[], object] = lambda: None
) -> Path:
    """Agree on the folder over all ranks, which must name one, or one tag where each node has its own folder.

    A collective; PlanError on every rank.

    check: its PlanError is told together with the folder's.
    """
    path, trouble, node_local = Path(), "", engine.config.node_local
    try:
        _node_of(engine)
        path = folder_of(call, folder, tag)
        check()
    except PlanError as error:
        trouble = str(error)
    every = engine.runtime.collectives.gather_objects((f"tag {tag}" if node_local else os.path.abspath(path), trouble))
    for _, told in every:
        if told:
            raise PlanError(told)
    named = list(dict.fromkeys(found for found, _ in every))
    if len(named) > 1:
        raise PlanError(f"engine.{call}: expected one folder and one tag on all ranks, found {' and '.join(named)}")
    return path


def _node_of(engine: EngineLoop) -> int | None:
    return own_node() if engine.config.node_local else None


def save(engine: EngineLoop, folder: object, tag: object, client_state: dict[str, Any], *, with_frozen: bool) -> None:
    """Save a checkpoint of step `global_steps`, to which the engine resumes."""
    if engine.runtime.backwards.has_gradients and own_rank() == 0:
        warnings.warn(
            "engine.save_checkpoint: expected a call after the last micro-batch of a step, found one within it: the "
            "gradients since the last step are not saved, and training resumes from the end of that step",
            stacklevel=3,
        )
    states = partial(_states, engine, client_state)
    root = _folder_together(engine, "save_checkpoint", folder, tag, states)
    trainer = {
        **states(),
        "engine": {name: getattr(engine, name) for name in (*_COUNTERS, _SAMPLES)}
        | {"micro_steps": engine.micro_steps - engine.micro_steps_in_step},
        "model_config": model_config(engine.module, TORCH_DTYPE[engine.runtime.precision.param]),
    }
    settings = SaveSettings(_node_of(engine), with_frozen=with_frozen, within_step=True)
    save_checkpoint(engine.runtime, root, step=engine.global_steps, trainer=trainer, settings=settings)


def load(
    engine: EngineLoop, folder: object, tag: object, *, weights_only: bool, with_schedule: bool
) -> tuple[str | None, dict[str, Any]]:
    """See Engine.load_checkpoint."""
    root = _folder_together(engine, "load_checkpoint", folder, tag)
    if is_deepspeed(root):
        foreign = load_foreign(engine.runtime, partial(open_deepspeed, root), weights_only=weights_only)
        if not weights_only:
            # A foreign checkpoint has only the optimizer's count of updates, which excludes skipped steps.
            engine.global_steps = foreign.updates
            engine.micro_steps = foreign.updates * engine.gradient_accumulation_steps()
            engine.global_samples = foreign.updates * engine.train_batch_size()
        return str(foreign.path), {}
    found = newest_good_together(engine.runtime.collectives, root)
    if found is None:
        tags = [path.name for path in root.iterdir() if path.is_dir() and committed(path)] if root.is_dir() else []
        if tags:
            raise CheckpointError(
                f"engine.load_checkpoint: expected a tag, found its folders in {root}: {some(sorted(tags))}; give one"
            )
        return None, {}
    if weights_only:
        load_weights(engine.runtime, found)
        return str(found.path), from_json(found.index.trainer.get("client_state", {}))
    trainer = load_checkpoint(engine.runtime, found)
    counted = trainer.get("engine", {})
    for name in _COUNTERS:
        setattr(engine, name, counted.get(name, found.index.step))
    engine.global_samples = counted.get(_SAMPLES, engine.global_steps * engine.train_batch_size())
    if with_schedule:
        _load_schedule(engine, trainer)
    if own_rank() == (_node_of(engine) or 0):
        set_aside(root, found.index.step)
    return str(found.path), from_json(trainer.get("client_state", {}))


def _states(engine: EngineLoop, client_state: dict[str, Any]) -> dict[str, Any]:
    """The parts of a checkpoint's trainer state that the user's objects decide. PlanError, which names the place, for
    what JSON cannot hold.

    The new schedule has its own functions: torch's schedules do not save them either.
    """
    name, found = type(engine.lr_scheduler).__name__, engine.lr_scheduler.state_dict() if engine.lr_scheduler else {}
    kept = {key: value for key, value in found.items() if not isinstance(value, FunctionType)}
    groups = [
        {key: value for key, value in group.items() if key in SCHEDULED} for group in engine.optimizer.param_groups
    ]
    return {
        "client_state": to_json(client_state),
        "schedule": to_json(kept, f"{name}.state_dict()"),
        "groups": to_json(groups, "optimizer.param_groups"),
    }


def _load_schedule(engine: EngineLoop, trainer: Mapping[str, Any]) -> None:
    """Load the schedule's state, and what it has written into the parameter groups, which torch's load does not set."""
    saved = from_json(trainer.get("schedule", {}))
    if engine.lr_scheduler is not None and saved:
        engine.lr_scheduler.load_state_dict({**engine.lr_scheduler.state_dict(), **saved})
    for group, values in zip(engine.optimizer.param_groups, from_json(trainer.get("groups", [])), strict=False):
        if "betas" in group and "betas" in values:
            values["betas"] = (values["betas"][0], *group["betas"][1:])  # the second is a constant of this run
        group.update(values)
