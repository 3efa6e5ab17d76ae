"""Checkpoints of the drop-in engine: those of the runtime, with the engine's counters and schedule in addition."""

from __future__ import annotations

import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

from zero_runtime.checkpoint.load import load_checkpoint, load_weights
from zero_runtime.checkpoint.retention import newest_good_together
from zero_runtime.checkpoint.save import SaveSettings, save_checkpoint
from zero_runtime.deepspeed.client_state import from_json, to_json
from zero_runtime.deepspeed.engine_loop import EngineLoop
from zero_runtime.deepspeed.foreign_checkpoints.deepspeed import is_deepspeed, open_deepspeed
from zero_runtime.deepspeed.foreign_checkpoints.source import load_foreign
from zero_runtime.deepspeed.model_folder import model_config
from zero_runtime.dtypes import TORCH_DTYPE
from zero_runtime.errors import PlanError
from zero_runtime.runtime import ZeroRuntime
from zero_runtime.world import own_rank

_COUNTERS = ("micro_steps", "global_steps", "skipped_steps")
_SAMPLES = "global_samples"
_PLAIN = (bool, int, float, str, type(None))


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


def _folder_together(runtime: ZeroRuntime, call: str, folder: object, tag: object, client_state: object = None) -> Path:
    """The same for all ranks, which must name one folder. A collective; PlanError on every rank.

    client_state: is refused together with the folder.
    """
    path, trouble = Path(), ""
    try:
        path = folder_of(call, folder, tag)
        to_json(client_state)
    except PlanError as error:
        trouble = str(error)
    every = runtime.collectives.gather_objects((os.path.abspath(path), trouble))
    for _, told in every:
        if told:
            raise PlanError(told)
    named = list(dict.fromkeys(found for found, _ in every))
    if len(named) > 1:
        raise PlanError(f"engine.{call}: expected one folder and one tag on all ranks, found {' and '.join(named)}")
    return path


def save(engine: EngineLoop, folder: object, tag: object, client_state: dict[str, Any], *, with_frozen: bool) -> None:
    """Save a checkpoint of step `global_steps`, to which the engine resumes."""
    if engine.runtime.backwards.has_gradients and own_rank() == 0:
        warnings.warn(
            "engine.save_checkpoint: expected a call after the last micro-batch of a step, found one within it: the "
            "gradients since the last step are not saved, and training resumes from the end of that step",
            stacklevel=3,
        )
    root = _folder_together(engine.runtime, "save_checkpoint", folder, tag, client_state)
    trainer = {
        "client_state": to_json(client_state),
        "engine": {name: getattr(engine, name) for name in (*_COUNTERS, _SAMPLES)}
        | {"micro_steps": engine.micro_steps - engine.micro_steps_in_step},
        "schedule": _schedule_state(engine),
        "lr": engine.get_lr(),
        "model_config": model_config(engine.module, TORCH_DTYPE[engine.runtime.precision.param]),
    }
    settings = SaveSettings(with_frozen=with_frozen, within_step=True)
    save_checkpoint(engine.runtime, root, step=engine.global_steps, trainer=trainer, settings=settings)


def load(
    engine: EngineLoop, folder: object, tag: object, *, weights_only: bool, with_schedule: bool
) -> tuple[str | None, dict[str, Any]]:
    """See Engine.load_checkpoint."""
    root = _folder_together(engine.runtime, "load_checkpoint", folder, tag)
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
        return None, {}
    if weights_only:
        load_weights(engine.runtime, found)
        return str(found.path), from_json(found.index.trainer.get("client_state", {}))
    trainer = load_checkpoint(engine.runtime, found)
    counted = trainer.get("engine", {})
    for name in _COUNTERS:
        setattr(engine, name, counted.get(name, found.index.step))
    engine.global_samples = counted.get(_SAMPLES, engine.global_steps * engine.train_batch_size())
    if with_schedule and engine.lr_scheduler is not None and trainer.get("schedule"):
        engine.lr_scheduler.load_state_dict({**engine.lr_scheduler.state_dict(), **trainer["schedule"]})
    if with_schedule:
        # Loading the state of a torch scheduler does not set the groups' rates.
        for group, lr in zip(engine.optimizer.param_groups, trainer.get("lr", ()), strict=False):
            group["lr"] = lr
    return str(found.path), from_json(trainer.get("client_state", {}))


def _schedule_state(engine: EngineLoop) -> dict[str, Any]:
    """The plain values of the schedule's state: counters and rates, but not a user's functions."""
    if engine.lr_scheduler is None:
        return {}
    state = engine.lr_scheduler.state_dict()
    return {key: value for key, value in state.items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, list) and all(isinstance(one, _PLAIN) for one in value))
