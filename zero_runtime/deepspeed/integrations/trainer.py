"""A Trainer of transformers that trains with the engine, as a class to inherit from before transformers' own.

[Note: what the Trainer's loop does]
The loop of transformers is used as it is: it calls the model, `accelerator.backward`, `optimizer.step` and the
scheduler. Here the model and the optimizer are the engine's, and backward is the engine's. The loop decides which
micro-batch is the last of a step, so the shorter last step of an epoch is one, too.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_runtime.deepspeed.config import read_config
from zero_runtime.deepspeed.engine import Engine
from zero_runtime.deepspeed.entry import initialize
from zero_runtime.deepspeed.full_state import full_state
from zero_runtime.deepspeed.integrations.trainer_config import as_mapping, engine_config
from zero_runtime.deepspeed.schedules import JsonSchedule
from zero_runtime.errors import PlanError

STATES = "zero"  # the folder of the engine's checkpoint inside one of the Trainer's
_SCHEDULER = "scheduler.pt"


class TrainerOptimizer(torch.optim.Optimizer):
    """The optimizer that the Trainer's loop steps, once per step; everything else is that of the engine."""

    def __init__(self, engine: Engine) -> None:  # not torch's: groups and states are the engine's
        self._engine = engine
        self.defaults: dict[str, Any] = engine.optimizer.defaults
        self.param_groups = engine.optimizer.param_groups
        self.last_lr: float | None = None  # of the last update
        self.step_was_skipped = False  # whether the last step left the parameters, because fp16 gradients overflowed

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch returns a closure's loss
        """Update the parameters with the gradients of the step."""
        self.last_lr = float(self.param_groups[0]["lr"])
        self._engine.step()
        self.step_was_skipped = not self._engine.was_step_applied()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: the engine's step drops the gradients."""

    def state_dict(self) -> dict[str, Any]:
        """Always raises PlanError: see EngineOptimizer.state_dict."""
        return self._engine.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Always raises PlanError: see EngineOptimizer.load_state_dict."""
        self._engine.optimizer.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return f"TrainerOptimizer({self.param_groups!r})"


class ZeroTrainer:
    """Inherit from it before transformers.Trainer or a subclass: `class Mine(ZeroTrainer, Seq2SeqTrainer)`.

    With `deepspeed=` in its arguments (ZeroArguments) the engine trains, evaluates, saves and resumes; without it the
    class changes nothing. Between steps the rules of the engine hold for reading weights; `save_model` gathers them.
    """

    engine: Engine | None = None
    # Of transformers.Trainer.
    accelerator: Any
    args: Any
    deepspeed: Any
    lr_scheduler: Any
    model: Any
    model_wrapped: Any
    optimizer: Any

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        if not self._is_sharded:
            return
        # The loop calls accelerator.backward(loss) in each of its versions and subclasses; the class of the accelerator
        # cannot be chosen from outside.
        self.accelerator.backward = self._backward
        # Gradients are reduced by the engine as its plan says; `no_sync` would keep full gradients on each rank.
        self.accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        found: dict[str, Any] = super()._build_accelerator_args(**kwargs)  # type: ignore[misc]
        # The engine casts parameters; autocast on top of it would cast again.
        return {**found, "mixed_precision": "no"} if self._is_sharded else found

    @property
    def _is_sharded(self) -> bool:
        return bool(self.args.deepspeed)

    # ---- the engine ----------------------------------------------------------------------------------------------

    def _config(self, total_steps: int | None = None) -> dict[str, Any]:
        return engine_config(as_mapping(self.args.deepspeed), self.args, self.model, total_steps)

    def _engine_of_model(self) -> Engine:
        """The engine of the current model; built by the first train or evaluate."""
        if self.engine is not None and self.engine.module is not self.model:  # model_init made another one
            self.engine.destroy()
            self.engine = None
        if self.engine is None:
            config = self._config()
            config.pop("scheduler", None)  # the Trainer's loop drives it: see _new_schedule
            trains = self.train_dataset is not None  # type: ignore[attr-defined]
            if not trains:
                config.pop("optimizer", None)
            chosen = self.optimizer is not None or "optimizer" not in config
            given = self.create_optimizer() if trains and chosen else None  # type: ignore[attr-defined]
            self.engine = initialize(model=self.model, config=config, optimizer=given)[0]
            if self.engine.mp_world_size > 1:
                self.engine.destroy()
                raise PlanError(
                    "tensor_parallel: expected no divided layers with the Trainer, whose loader gives each rank a "
                    "batch of its own; leave it out, or write the loop yourself (docs/dropin.md)"
                )
            self.optimizer = TrainerOptimizer(self.engine)
            self.deepspeed = self.model_wrapped = self.engine
        return self.engine

    def _new_schedule(self, total_steps: int) -> None:
        """A schedule for `total_steps` steps: of the configuration, or the Trainer's own."""
        config = self._config(total_steps)
        if "scheduler" not in config:
            self.create_scheduler(num_training_steps=total_steps)  # type: ignore[attr-defined]
            return
        schedule = read_config(config, self.args.world_size, self._engine_of_model().device.type).schedule
        assert schedule is not None
        self.lr_scheduler = JsonSchedule(self.optimizer, schedule)
        self._created_lr_scheduler = True  # the next call of train makes another one

    def _backward(self, loss: torch.Tensor, **_: Any) -> None:
        """Stands for accelerator.backward. `loss` is divided by the micro-batches of the step already."""
        assert self.engine is not None
        ends = bool(self.accelerator.sync_gradients)
        self.engine.set_gradient_accumulation_boundary(ends)
        self.engine.backward(loss, scale_wrt_gas=False)
        if not ends:
            self.engine.step()  # counts the micro-batch; the loop calls optimizer.step at the last one

    # ---- the Trainer's methods -------------------------------------------------------------------------------------

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        if not self._is_sharded:
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)  # type: ignore[misc]
        engine = self._engine_of_model()
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self._new_schedule(max_steps)
        self.accelerator._optimizers.append(self.optimizer)  # asked after each step whether it was skipped
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        handler: Any = self.callback_handler  # type: ignore[attr-defined]
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, self.optimizer, self.lr_scheduler
        handler.train_dataloader = train_dataloader
        return engine, train_dataloader

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        if not self._is_sharded:
            return super()._wrap_model(model, training, dataloader)  # type: ignore[misc]
        return self._engine_of_model()

    def _clip_grad_norm(self, model: Any) -> Any:
        return None if self._is_sharded else super()._clip_grad_norm(model)  # type: ignore[misc]

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        # Known after the step, which also clips: see _maybe_log_save_evaluate.
        return None if self._is_sharded else super()._get_grad_norm(model, grad_norm)  # type: ignore[misc]

    def _get_learning_rate(self) -> float:
        if self._is_sharded and self.optimizer.last_lr is not None:
            return self.optimizer.last_lr
        return float(super()._get_learning_rate())  # type: ignore[misc]

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        if self._is_sharded and self.engine is not None:
            grad_norm = self.engine.get_global_grad_norm()
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)  # type: ignore[misc]

    # ---- saving and resuming ---------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights in the dtype that the model computes in, for from_pretrained. Every rank calls it."""
        if self.engine is None:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        state = full_state(self.engine.runtime, kept=self.args.should_save)
        if self.args.should_save:
            self._save(output_dir or self.args.output_dir, state_dict=state)  # type: ignore[attr-defined]
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)  # type: ignore[attr-defined]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.engine is None:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        self.engine.save_checkpoint(output_dir, tag=STATES)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self._is_sharded:  # else the engine loads its shards, in _load_optimizer_and_scheduler
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.engine is None or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        self._load_states(self.engine, checkpoint, weights_only=False)
        path = Path(checkpoint, _SCHEDULER)
        if path.is_file():
            self.lr_scheduler.load_state_dict(torch.load(path, weights_only=True))

    def _load_best_model(self) -> None:
        if self.engine is None:
            super()._load_best_model()  # type: ignore[misc]
            return
        self._load_states(self.engine, self.state.best_model_checkpoint, weights_only=True)  # type: ignore[attr-defined]

    @staticmethod
    def _load_states(engine: Engine, checkpoint: str, *, weights_only: bool) -> None:
        tag = STATES if Path(checkpoint, STATES).is_dir() else None  # without: a checkpoint of DeepSpeed itself
        path, _ = engine.load_checkpoint(checkpoint, tag, load_module_only=weights_only)
        if path is None:
            raise PlanError(
                f"{checkpoint}: expected a checkpoint with the folder {STATES!r}, or DeepSpeed's own, found neither; a "
                "checkpoint that was saved with save_only_model=True has weights alone: give its folder to "
                "from_pretrained instead"
            )
