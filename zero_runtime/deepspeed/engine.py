"""An engine with the training loop of DeepSpeed (forward, backward(loss), step) on top of a ZeroRuntime."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_runtime.closed import retire
from zero_runtime.deepspeed import engine_checkpoint
from zero_runtime.deepspeed.absent import ABSENT_OF_ENGINE
from zero_runtime.deepspeed.config import DropinConfig
from zero_runtime.deepspeed.engine_optimizer import EngineOptimizer
from zero_runtime.deepspeed.engine_settings import EngineSettings
from zero_runtime.deepspeed.live_engines import add_engine, claim_loss, remove_engine
from zero_runtime.deepspeed.model_folder import save_16bit
from zero_runtime.deepspeed.schedules import Schedule, advance, rates_now
from zero_runtime.dtypes import TORCH_DTYPE
from zero_runtime.errors import CallOrderError, NonFiniteError, PlanError
from zero_runtime.optim.lr_schedule import Rates
from zero_runtime.runtime import ZeroRuntime
from zero_runtime.step_report import StepReport
from zero_runtime.watch.watch import RankWatch
from zero_runtime.world import own_rank, world_size

_ONE_LOSS = (
    "gradients of another engine's backward alone; for one loss that trains two models make one engine of a module "
    "that holds both, with a parameter group for each"
)


@dataclass(frozen=True)
class EngineParts:
    """The objects from which initialize builds an engine, which owns them from then on."""

    runtime: ZeroRuntime
    optimizer: EngineOptimizer
    schedule: Schedule | None
    config: DropinConfig
    local_rank: int
    watch: RankWatch | None


class Engine(EngineSettings):
    """Trains `module`; attributes that it lacks are those of the module (parameters(), state_dict(), generate(), ...).

    The loss passed to `backward` is this rank's mean over its micro-batch: the engine divides it by the number of
    micro-batches per step and by `dp_world_size`. Call `step` after every backward; it updates the parameters at the
    last micro-batch of a step.
    """

    def __init__(self, parts: EngineParts) -> None:
        self.module: nn.Module = parts.runtime.model
        self.runtime = parts.runtime
        self.optimizer = parts.optimizer
        self.lr_scheduler = parts.schedule
        self.config = parts.config
        self.device: torch.device = parts.runtime.device
        self.global_rank, self.local_rank, self.world_size = own_rank(), parts.local_rank, world_size()
        self.micro_steps = 0  # calls of step
        self.global_steps = 0  # optimizer steps, including skipped ones
        self.skipped_steps = 0
        self._watch = parts.watch
        self._in_step = 0  # micro-batches of the current step, before the next one
        self._told_boundary: bool | None = None  # by set_gradient_accumulation_boundary
        self._awaits_step = False
        self._stepping = False
        self._applied = False  # by the last call of step
        self._report: StepReport | None = None
        self.optimizer.bind(self._update, lambda: self.cur_scale, self.runtime.drop_foreign)
        add_engine(self)

    def __getattr__(self, name: str) -> Any:
        if name in ABSENT_OF_ENGINE:
            raise AttributeError(f"engine.{name}: {ABSENT_OF_ENGINE[name]}")
        module = self.__dict__.get("module")
        for owner in (self, module):
            if hasattr(type(owner), name):  # a property raised AttributeError: raise its own error
                return object.__getattribute__(owner, name)
        try:
            return getattr(module, name)
        except AttributeError as error:
            raise AttributeError(
                f"engine.{name}: neither the engine nor its module ({type(module).__name__}) has it"
            ) from error

    # ---- a micro-batch -------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module. With fp16.auto_cast, floating-point tensors among the arguments are cast first."""
        if self.config.casts_inputs:
            args = tuple(self._cast(value) for value in args)
            kwargs = {name: self._cast(value) for name, value in kwargs.items()}
        return self.module(*args, **kwargs)

    forward = __call__

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Add the gradients of `loss` (0-dim, the mean over this rank's micro-batch).

        Returns the loss divided by the accumulation, or undivided if scale_wrt_gas is False. DeepSpeed's signature.
        """
        if self._awaits_step:
            raise CallOrderError(
                "engine.backward: expected engine.step() after the last backward, found another backward; add the "
                "losses of one micro-batch and call backward once"
            )
        claim_loss(self, loss)
        # The product of a 16-bit loss and the loss scale would overflow fp16 before any gradient does.
        share = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
        share = share / self.gradient_accumulation_steps() if scale_wrt_gas else share
        last = self.is_gradient_accumulation_boundary()
        self.runtime.backward(share / self.dp_world_size, retain_graph=retain_graph, last=last)
        self._awaits_step = True
        return share.detach()

    def step(self) -> None:
        """Count the micro-batch. At the last one of a step, also update the parameters, drop the gradients and, unless
        the step was skipped, advance the schedule."""
        if not self._awaits_step:
            found = _ONE_LOSS if self.runtime.has_foreign else "none"
            raise CallOrderError(f"engine.step: expected engine.backward(loss) since the last step, found {found}")
        self._applied = False
        if not self.is_gradient_accumulation_boundary():
            self._end_micro_step(self._in_step + 1)
            return
        self._stepping = True
        try:
            self.optimizer.step()
        except NonFiniteError:  # it dropped the gradients; after a PlanError, step may be called again
            self._end_step()
            raise
        finally:
            self._stepping = False
        self._end_step()
        assert self._report is not None
        self._applied = not self._report.skipped
        if self._report.skipped:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            advance(self.lr_scheduler)

    def _end_step(self) -> None:
        self.global_steps += 1
        self._end_micro_step(0)

    def _end_micro_step(self, in_step: int) -> None:
        self.micro_steps += 1
        self._in_step = in_step
        self._awaits_step = False

    def _update(self, rates: Rates) -> None:
        if not self._stepping:
            raise CallOrderError("optimizer.step: expected engine.step(), which knows the boundary of a step")
        self._report = self.runtime.step(rates)

    def _cast(self, value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(TORCH_DTYPE[self.runtime.precision.param]) if floating else value

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last of its step."""
        counted = self._in_step + 1 == self.gradient_accumulation_steps()
        return counted if self._told_boundary is None else self._told_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say, before each backward and on every rank, whether it is the last of its step, instead of counting.

        A step may have fewer micro-batches than gradient_accumulation_steps(), as at the end of an epoch, but not more.
        """
        if not is_boundary and self._in_step + 1 >= self.gradient_accumulation_steps():
            raise PlanError(
                f"engine.set_gradient_accumulation_boundary: expected True at micro-batch {self._in_step + 1} of a "
                f"step at the latest, found False; gradient_accumulation_steps is {self.gradient_accumulation_steps()}"
            )
        self._told_boundary = is_boundary

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which backward keeps gradients on this rank (the runtime's no_sync).

        The last backward of a step must be outside.
        """
        return self.runtime.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Between steps: drop what backwards of other engines left; `step` has dropped all others.

        Within a step it raises CallOrderError.
        """
        if self._awaits_step or self._in_step:
            raise CallOrderError(
                "engine.zero_grad: expected it between steps, found micro-batches whose gradients it would lose; "
                "engine.step drops them at the boundary, so leave it out"
            )
        self.runtime.drop_foreign()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The module's `generate`, on every rank; prompts and lengths may differ. `synced_gpus` is not needed."""
        return self.runtime.generate(*args, **kwargs)

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save into `save_dir` (in its folder `tag` if given) in this runtime's format. Every rank calls it alike.

        `client_state`: plain JSON values, which load_checkpoint returns. `save_latest` has no effect: no file is needed
        to find the newest undamaged checkpoint. Returns True, as DeepSpeed does.
        """
        engine_checkpoint.save(self, save_dir, tag, client_state or {}, with_frozen=not exclude_frozen_parameters)
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load the newest undamaged checkpoint of `load_dir` (under `tag` if given).

        The checkpoint may be the runtime's or DeepSpeed's own, of any world size and stage. Returns its path and the
        client state, or (None, {}) if there is no checkpoint. Every rank calls it, between steps.
        """
        if not load_module_strict:
            raise PlanError("engine.load_checkpoint: expected load_module_strict=True: a model half loaded is none")
        weights_only = load_module_only or not load_optimizer_states
        return engine_checkpoint.load(
            self, load_dir, tag, weights_only=weights_only, with_schedule=load_lr_scheduler_states
        )

    def save_16bit_model(self, save_dir: str | Path, save_filename: str = "model.safetensors") -> bool:
        """Gather the weights, round them to 16 bits and write them as safetensors into `save_dir`, which may exist.

        Every rank calls it, between steps. Also writes config.json if the module has a Hugging Face `config`. Replaces
        files of an earlier save under the same name. DeepSpeed writes a pickle, pytorch_model.bin; for that name,
        model.safetensors is written here, which from_pretrained reads.
        """
        save_16bit(self.runtime, engine_checkpoint.folder_of("save_16bit_model", save_dir), save_filename)
        return True

    # ---- modes and ends ------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Engine:
        """Set the module's training mode; returns the engine."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Set the module's evaluation mode; returns the engine."""
        return self.train(False)

    def destroy(self) -> None:
        """Close the runtime and the watch; the process group stays. Every rank calls it. Idempotent.

        The module keeps its trained parameters where they are whole on a rank (stages 0 to 2); at stage 3 a read of one
        raises its name, unless there is one rank. All other methods raise CallOrderError afterwards.
        """
        remove_engine(self)
        try:
            self.runtime.close()
        finally:
            if self._watch is not None:
                self._watch.close()
        told = "expected an engine in use, found one that was destroyed; call engine.module, or initialize another"
        retire(self, told, kept=("destroy",))

    # ---- numbers -------------------------------------------------------------------------------------------------

    def train_batch_size(self) -> int:
        """Samples per step over all ranks."""
        return self.config.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per micro-batch on one rank."""
        return self.config.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per step."""
        return self.config.batch.accumulation

    @property
    def global_samples(self) -> int:
        """Samples of all steps so far, over all ranks."""
        return self.global_steps * self.train_batch_size()

    def get_lr(self) -> list[float]:
        """The learning rates of the next update, by group."""
        return rates_now(self.optimizer.param_groups)

    def get_global_grad_norm(self) -> float | None:
        """The norm over all ranks in the last step, unscaled, before clipping; None before the first."""
        return None if self._report is None else self._report.grad_norm

    def was_step_applied(self) -> bool:
        """Whether the last call of `step` updated the parameters: False at a micro-batch within a step."""
        return self._applied

    @property
    def cur_scale(self) -> float:
        """The loss scale of the next backward; 1 without loss scaling."""
        return self.runtime.scaler.scale

    def loss_scale(self) -> float:
        """The same as `cur_scale`, as a method with DeepSpeed's name."""
        return self.cur_scale
