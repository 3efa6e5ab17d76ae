"""ZeroRuntime: a model, a plan and a precision composed into forward, backward and step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero_runtime.collectives import Collectives, Ledger
from zero_runtime.errors import CallOrderError, NonFiniteError
from zero_runtime.grad_norm import clip_coefficient, local_sum_of_squares
from zero_runtime.memory_model import StateBytes, UnitSize, model_state_bytes
from zero_runtime.module_hooks import ModuleHooks
from zero_runtime.phase_clock import PhaseClock
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.schedule import Schedule
from zero_runtime.sharded_optimizer import AdamWConfig, ShardedOptimizer
from zero_runtime.unit import Unit
from zero_runtime.unit_planner import move_buffers, plan_units


@dataclass(frozen=True)
class RuntimeSettings:
    """What a run decides beside the plan and the precision.

    micro_batches: backward calls per step. clip_norm: the largest global gradient norm, None for no clipping.
    prefetch: how many units are gathered ahead of the one in use; changes time, never bits.
    """

    micro_batches: int = 1
    clip_norm: float | None = None
    prefetch: int = 1


@dataclass(frozen=True)
class StepReport:
    """What one step tells: the sum over ranks and micro-batches of the losses, and the norm before clipping."""

    loss: float
    grad_norm: float


class ZeroRuntime:
    """Trains `model` over all ranks of the default process group, which must exist.

    The model's parameters are taken over: they become views of flat tensors and hold values only while in use.
    Gradients are **summed** over the ranks, so the loss given to `backward` is this rank's and micro-batch's share of
    the objective: for a mean over all tokens, the sum of token losses divided by `sum_over_ranks(local tokens)`.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ZeroPlan,
        precision: MixedPrecision,
        optimizer: AdamWConfig,
        settings: RuntimeSettings,
        device: torch.device,
    ) -> None:
        self.model = model
        self.plan = plan
        self.precision = precision
        self.settings = settings
        self.device = device
        self.clock = PhaseClock(device)
        self.collectives = Collectives(plan.shard_count(dist.get_world_size()), self.clock)
        move_buffers(model, device)
        self.units = [
            Unit(spec, plan, precision, self.collectives, device, micro_batches=settings.micro_batches)
            for spec in plan_units(model)
        ]
        self.optimizer = ShardedOptimizer(self.units, optimizer)
        self._schedule = Schedule(self.units, plan, prefetch=settings.prefetch)
        self._hooks = ModuleHooks(self.units, self._schedule)
        self._backwards = 0
        self._loss = torch.zeros((), dtype=torch.float64, device=device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def sum_over_ranks(self, count: int) -> torch.Tensor:
        """0-dim int64 on the device: the sum of every rank's `count`. All ranks must call it."""
        return self.collectives.sum_over_ranks_(torch.tensor(count, dtype=torch.int64, device=self.device))

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of `loss` (0-dim, this rank's share of the objective)."""
        if self._backwards == self.settings.micro_batches:
            raise CallOrderError(
                f"backward: call number {self._backwards + 1} of this step, expected step() after "
                f"{self.settings.micro_batches}; give RuntimeSettings the micro_batches that you use"
            )
        self._backwards += 1
        self._loss += loss.detach()
        self._schedule.begin_backward(boundary=self._backwards == self.settings.micro_batches)
        loss.backward()
        self._schedule.end_backward()

    def step(self, lr: float) -> StepReport:
        """Clip, update every parameter once, drop the gradients. Reads one pair of numbers on the host.

        A loss or norm that is not finite raises NonFiniteError on every rank, before anything is updated.
        """
        if self._backwards != self.settings.micro_batches:
            raise CallOrderError(
                f"step: expected {self.settings.micro_batches} backward calls since the last step, "
                f"found {self._backwards}"
            )
        report, norm = self._agree()
        self.optimizer.step(lr, clip_coefficient(norm, self.settings.clip_norm))
        for unit in self.units:
            unit.free_grads()
        self._schedule.after_step()
        self._backwards = 0
        self._loss.zero_()
        return report

    def _agree(self) -> tuple[StepReport, torch.Tensor]:
        """Sum the loss and the squared norm over the ranks in one message, read both."""
        squares = local_sum_of_squares(self.units, self.collectives, self.device)
        sums = self.collectives.sum_over_ranks_(torch.stack([self._loss, squares]))
        norm = sums[1].sqrt()
        loss_value, norm_value = torch.stack([sums[0], norm]).tolist()
        if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
            raise NonFiniteError(
                f"step: loss {loss_value} and gradient norm {norm_value}, expected finite numbers; nothing was "
                "updated. Lower optimizer.lr, set optimizer.clip_norm, or use precision=fp32 to see whether it is "
                "rounding"
            )
        return StepReport(loss_value, norm_value), norm

    def predicted_state_bytes(self) -> StateBytes:
        """What `memory_model` predicts for this rank."""
        sizes = [UnitSize.of(unit.layout, trainable=unit.trainable) for unit in self.units]
        return model_state_bytes(
            self.plan,
            self.precision,
            sizes,
            world=self.collectives.world,
            micro_batches=self.settings.micro_batches,
        )

    def state_tensors(self) -> dict[str, list[torch.Tensor]]:
        """Live flat tensors by component; aliases share a storage."""
        tensors: dict[str, list[torch.Tensor]] = {"params": [], "grads": [], "optimizer": []}
        for unit in self.units:
            for component, found in unit.state_tensors().items():
                tensors[component] += found
        tensors["optimizer"] += self.optimizer.state_tensors()
        return tensors

    def reset_ledger(self) -> Ledger:
        """What was sent since the last call; counting starts anew."""
        return self.collectives.ledger.reset()
