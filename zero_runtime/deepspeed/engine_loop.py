"""The engine's part of a step: forward, backward(loss) or loss.backward(), step, and where a step ends."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from zero_runtime.deepspeed.engine_settings import EngineSettings
from zero_runtime.deepspeed.forward_profile import profile_forward
from zero_runtime.deepspeed.live_engines import claim_loss
from zero_runtime.deepspeed.schedules import Schedule, advance
from zero_runtime.dtypes import TORCH_DTYPE
from zero_runtime.errors import CallOrderError, NonFiniteError, PlanError
from zero_runtime.optim.lr_schedule import Rates
from zero_runtime.step_report import StepReport
from zero_runtime.users_backward import UsersBackward
from zero_runtime.world import own_rank

_NAMES = {"forward": "fwd", "backward": "bwd", "optimizer": "step"}  # DeepSpeed's names of phases
_HALVES = (torch.float16, torch.bfloat16)


class EngineLoop(EngineSettings):
    """Counts micro-batches by the calls of `step`, as DeepSpeed does: each may have several backwards.

    Gradients of a step are summed. Each backward divides them by the micro-batches of a step and by `dp_world_size`.
    """

    lr_scheduler: Schedule | None

    def __init__(self) -> None:
        self.micro_steps = 0  # calls of step
        self.global_steps = 0  # optimizer steps, including skipped ones
        self.skipped_steps = 0
        self.global_samples = 0  # of all steps, over all ranks
        self.micro_steps_in_step = 0  # of the current step, before the next micro-batch
        self._told_boundary: bool | None = None  # by set_gradient_accumulation_boundary
        self._stepping = False
        self._is_scaled = False  # the user's next backward is of a loss that `scale` returned
        self._inside_no_sync = False
        self._applied = False  # by the last call of step
        self._report: StepReport | None = None
        self._begin_prints()
        self.optimizer.bind(self._update, self.runtime, self.zero_grad)
        self.runtime.backwards.follow_users(self._begin_users_backward)
        self.runtime.backwards.take_written(self.dp_world_size)  # what `.grad` held before counts, as in torch

    # ---- a micro-batch -------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module. With fp16.auto_cast, floating-point tensors among the arguments are cast first."""
        self.runtime.backwards.end_failed()
        if self.config.casts_inputs:
            args = tuple(self._cast(value) for value in args)
            kwargs = {name: self._cast(value) for name, value in kwargs.items()}
        with self._forward_profile(), self.runtime.clock.phase("forward"):
            return self.module(*args, **kwargs)

    forward = __call__

    def _cast(self, value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(TORCH_DTYPE[self.runtime.precision.param]) if floating else value

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Add the gradients of `loss` (0-dim, the mean over this rank's micro-batch).

        Returns the loss divided by the accumulation, or undivided if scale_wrt_gas is False. DeepSpeed's signature.
        """
        self.runtime.backwards.end_failed()
        claim_loss(self, loss)
        share = _in_fp32(loss)
        share = share / self.gradient_accumulation_steps() if scale_wrt_gas else share
        last = self.is_gradient_accumulation_boundary()
        with self.runtime.clock.phase("backward"):
            self.runtime.backward(share / self.dp_world_size, retain_graph=retain_graph, last=last)
        return share.detach()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss multiplied by the loss scale, for `engine.scale(loss).backward()` in place of engine.backward."""
        if loss.dim() != 0 or not loss.requires_grad:
            raise PlanError(
                "engine.scale: expected a scalar tensor with a graph, found one of shape "
                f"{list(loss.shape)}, requires_grad={loss.requires_grad}; for others call tensor.backward(gradient)"
            )
        self._is_scaled = True
        return _in_fp32(loss) * self.cur_scale

    def _begin_users_backward(self) -> UsersBackward:
        """`tensor.backward()` was called on what the engine returned, or on a loss of it."""
        was_scaled, self._is_scaled = self._is_scaled, False
        if self.optimizer.needs_scaler() and not was_scaled:
            raise CallOrderError(
                "Loss scaling is required with fp16, found loss.backward() of a loss that is not scaled; call "
                "engine.backward(loss) or engine.scale(loss).backward()"
            )
        return UsersBackward(
            last=self.is_gradient_accumulation_boundary(), parts=self.gradient_accumulation_steps() * self.dp_world_size
        )

    # ---- the step ------------------------------------------------------------------------------------------------

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Count the micro-batch. At the last one of a step, also update the parameters, drop the gradients and, unless
        the step was skipped, advance the schedule, with `lr_kwargs`."""
        self.runtime.backwards.end_failed()
        if self._inside_no_sync:
            raise CallOrderError("engine.step: It is illegal to call Engine.step() inside no_sync context manager")
        self._applied = False
        if self.config.managed_accumulation and not self.is_gradient_accumulation_boundary():
            self._end_micro_step(self.micro_steps_in_step + 1)
            return
        samples = self._samples_of_step()
        self._stepping = True
        try:
            with self.runtime.clock.phase("optimizer"):
                self.allreduce_gradients()
                self.optimizer.step()
        except NonFiniteError:  # it dropped the gradients; after a PlanError, step may be called again
            self._end_step(samples)
            raise
        finally:
            self._stepping = False
        self._end_step(samples)
        assert self._report is not None
        self._applied = not self._report.skipped
        if self._report.skipped:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            advance(self.lr_scheduler, lr_kwargs or {})
        self._print_step()

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """At a boundary: reduce the gradients that backwards have left on each rank. `step` does it. Every rank calls
        it. No effect within a step, or after a backward at the boundary, which has reduced them."""
        if not self.is_gradient_accumulation_boundary():
            return
        self.runtime.backwards.take_written(self.dp_world_size)
        if not self.runtime.backwards.has_gradients:
            raise CallOrderError("engine.step: expected engine.backward(loss) since the last step, found none")
        self.runtime.backwards.finish()

    def _samples_of_step(self) -> int:
        micro_batches = self.gradient_accumulation_steps()
        done = micro_batches if self.config.managed_accumulation else self.runtime.backwards.count
        return self.train_batch_size() // micro_batches * done

    def _end_step(self, samples: int) -> None:
        self.global_steps += 1
        self.global_samples += samples
        self._end_micro_step(0)

    def _end_micro_step(self, in_step: int) -> None:
        self.micro_steps += 1
        self.micro_steps_in_step = in_step

    def _update(self, rates: Rates) -> bool:
        if not self._stepping:
            raise CallOrderError("optimizer.step: expected engine.step(), which knows the boundary of a step")
        self._report = self.runtime.step(rates)
        return self._report.skipped

    def get_global_grad_norm(self) -> float | None:
        """The norm over all ranks in the last step, unscaled, before clipping; None before the first."""
        return None if self._report is None else self._report.grad_norm

    def was_step_applied(self) -> bool:
        """Whether the last call of `step` updated the parameters: False at a micro-batch within a step."""
        return self._applied

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last of its step. With managed_gradient_accumulation false, each call
        of `step` ends one, so that this is known inside it alone."""
        if not self.config.managed_accumulation:
            return self._stepping
        counted = self.micro_steps_in_step + 1 >= self.gradient_accumulation_steps()
        return counted if self._told_boundary is None else self._told_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say, on every rank, whether the next backwards are of the last micro-batch of a step, instead of counting."""
        if not self.config.managed_accumulation:
            raise CallOrderError(
                "engine.set_gradient_accumulation_boundary: expected managed_gradient_accumulation true, found false: "
                "each call of step() is the boundary; leave one of the two out"
            )
        self._told_boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which backward keeps gradients on this rank; the next backward or step outside reduces them."""
        if self._inside_no_sync:
            raise CallOrderError("engine.no_sync: no_sync context manager reentry is unsupported")
        self._inside_no_sync = True
        try:
            with self.runtime.no_sync():
                yield
        finally:
            self._inside_no_sync = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients since the last step, also those of other engines' backwards; `step` has dropped them.

        Between the micro-batches of a step it raises CallOrderError, unless a backward has failed.
        """
        self.runtime.backwards.end_failed()
        if self.micro_steps_in_step and not self.runtime.backwards.failed:
            raise CallOrderError(
                "engine.zero_grad: expected it between steps, found micro-batches whose gradients it would lose; "
                "engine.step drops them at the boundary, so leave it out"
            )
        self.micro_steps_in_step = 0
        self.runtime.zero_grad()

    # ---- what rank 0 prints ----------------------------------------------------------------------------------------

    def _begin_prints(self) -> None:
        """Follow steps_per_print, wall_clock_breakdown and flops_profiler. Times run from the end of a step to that of
        the next one: `other` is all that a script does between its calls."""
        own = self.config.given if own_rank() == 0 else {}
        self._section = own.get("flops_profiler") or {}
        self._profiles = self._section.get("enabled", False)
        # The profile needs a clock that runs, and DeepSpeed prints the times with it too.
        self._times = own.get("wall_clock_breakdown", False) or self._profiles
        every = float(own.get("steps_per_print") or math.inf)
        self._every = 1.0 if self._times and every == math.inf else every
        self._printed = time.perf_counter(), 0  # when the last line was printed, and the samples until then
        if self._times:
            self.runtime.clock.start()

    def _forward_profile(self) -> AbstractContextManager[None]:
        """The context of a forward: a profile, if it is the first one of the step to profile."""
        if not self._profiles or self.global_steps != self._section.get("profile_step", 1):
            return nullcontext()
        self._profiles = False
        title = f"flops_profiler: step {self.global_steps}, rank 0 of {self.world_size}, one forward"
        return profile_forward(self.runtime, self._section, title)

    def _print_step(self) -> None:
        """Print what is due at the end of a step."""
        spent = dict.fromkeys(_NAMES, 0.0)
        if self._times:
            spent |= self.runtime.clock.end().seconds()
            self.runtime.clock.start()
        if self.global_steps % self._every:
            return
        (begun, samples), now = self._printed, time.perf_counter()
        self._printed = now, self.global_samples
        told = f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}, mom={self.get_mom()}"
        print(f"{told}, samples/s={(self.global_samples - samples) / (now - begun):.4g}", flush=True)
        if self._times:
            told = " | ".join(f"{_NAMES.get(phase, phase)}: {1e3 * s:.2f}" for phase, s in spent.items())
            print(f"time (ms) | {told}", flush=True)


def _in_fp32(loss: torch.Tensor) -> torch.Tensor:
    """The product of a 16-bit loss and the loss scale would overflow fp16 before any gradient does."""
    return loss.float() if loss.dtype in _HALVES else loss
