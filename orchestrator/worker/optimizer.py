"""Converts the optimizer and schedule settings to the runtime's own objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator.config.optimizer import Optimizer, OptimizerKind, Scheduler, SchedulerKind
from zero_runtime.optim.configs import (
    AdamConfig,
    AdamW8bitConfig,
    AdamWConfig,
    LambConfig,
    LionConfig,
    OptimizerConfig,
    SgdConfig,
    TorchConfig,
)
from zero_runtime.optim.lr_schedule import (
    Constant,
    Cosine,
    LRRangeTest,
    LrSchedule,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

_MOMENTS = ("beta1", "beta2", "eps", "weight_decay", "no_decay")
_OPTIMIZERS: dict[OptimizerKind, tuple[type[OptimizerConfig], tuple[str, ...]]] = {
    OptimizerKind.adamw: (AdamWConfig, _MOMENTS),
    OptimizerKind.adamw8bit: (AdamW8bitConfig, _MOMENTS),
    OptimizerKind.adam: (AdamConfig, _MOMENTS),
    OptimizerKind.lamb: (LambConfig, _MOMENTS),
    OptimizerKind.lion: (LionConfig, ("beta1", "beta2", "weight_decay", "no_decay")),
    OptimizerKind.sgd: (SgdConfig, ("momentum", "dampening", "nesterov", "weight_decay", "no_decay")),
}


def build_optimizer(optimizer: Optimizer) -> OptimizerConfig:
    """The optimizer's constants. The rules have checked that the keys of its kind are set."""
    if optimizer.kind is OptimizerKind.torch:
        return TorchConfig(
            optimizer.name or "", optimizer.arguments, optimizer.weight_decay, no_decay=optimizer.no_decay
        )
    kind, keys = _OPTIMIZERS[optimizer.kind]
    return kind(**{key: vars(optimizer)[key] for key in keys})


def build_schedule(scheduler: Scheduler, lr: float, *, total_steps: int) -> LrSchedule:
    """The learning rate as a function of the number of updates. `lr` is its peak, or the start of a range test."""
    return _SCHEDULES[scheduler.kind](scheduler, lr, total_steps)


def _cosine(scheduler: Scheduler, lr: float, total_steps: int) -> LrSchedule:
    assert scheduler.warmup_steps is not None
    assert scheduler.min_lr_ratio is not None
    return Cosine(lr, total_steps, scheduler.warmup_steps, scheduler.min_lr_ratio)


def _warmup(scheduler: Scheduler, lr: float, total_steps: int) -> LrSchedule:
    return WarmupLR(**_rise(scheduler, lr))


def _warmup_decay(scheduler: Scheduler, lr: float, total_steps: int) -> LrSchedule:
    return WarmupDecayLR(**_rise(scheduler, lr), total_num_steps=total_steps)


def _rise(scheduler: Scheduler, lr: float) -> dict[str, Any]:
    assert scheduler.start_lr_ratio is not None
    return {
        "warmup_min_lr": lr * scheduler.start_lr_ratio,
        "warmup_max_lr": lr,
        "warmup_num_steps": scheduler.warmup_steps,
        "warmup_type": str(scheduler.warmup_type),
    }


def _warmup_cosine(scheduler: Scheduler, lr: float, total_steps: int) -> LrSchedule:
    assert scheduler.warmup_steps is not None
    assert scheduler.start_lr_ratio is not None
    assert scheduler.min_lr_ratio is not None
    return WarmupCosineLR(
        lr,
        total_steps,
        scheduler.start_lr_ratio,
        scheduler.warmup_steps,
        scheduler.min_lr_ratio,
        str(scheduler.warmup_type),
    )


def _one_cycle(scheduler: Scheduler, lr: float, total_steps: int) -> LrSchedule:
    assert scheduler.start_lr_ratio is not None
    assert scheduler.rise_steps is not None
    cycles = scheduler.momentum_min is not None and scheduler.momentum_max is not None
    cycle: dict[str, Any] = {
        "cycle_first_step_size": scheduler.rise_steps,
        "cycle_second_step_size": scheduler.fall_steps,
        "decay_step_size": scheduler.decay_steps or 0,
        "decay_lr_rate": scheduler.decay_rate or 0.0,
        "cycle_momentum": cycles,
    }
    if cycles:
        cycle |= {"cycle_min_mom": scheduler.momentum_min, "cycle_max_mom": scheduler.momentum_max}
    return OneCycle(lr * scheduler.start_lr_ratio, lr, **cycle)


def _lr_range_test(scheduler: Scheduler, lr: float, total_steps: int) -> LrSchedule:
    assert scheduler.interval_steps is not None
    assert scheduler.interval_rate is not None
    return LRRangeTest(lr, scheduler.interval_steps, scheduler.interval_rate, bool(scheduler.staircase))


_SCHEDULES: dict[SchedulerKind, Callable[[Scheduler, float, int], LrSchedule]] = {
    SchedulerKind.constant: lambda scheduler, lr, total_steps: Constant(lr),
    SchedulerKind.cosine: _cosine,
    SchedulerKind.warmup: _warmup,
    SchedulerKind.warmup_decay: _warmup_decay,
    SchedulerKind.warmup_cosine: _warmup_cosine,
    SchedulerKind.one_cycle: _one_cycle,
    SchedulerKind.lr_range_test: _lr_range_test,
}
