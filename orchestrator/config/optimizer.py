"""The settings of optimizers and learning-rate schedules, and the keys that each kind uses; unused keys are null."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from orchestrator.config.strict import Broken, Limits, Word, nearest
from zero_runtime.optim.configs import TORCH_NAMES, TORCH_OURS, TORCH_WITHOUT_DECAY, torch_has_momentum, torch_problem


class OptimizerKind(Word):
    adamw = "adamw"
    adamw8bit = "adamw8bit"
    adam = "adam"
    sgd = "sgd"
    lion = "lion"
    lamb = "lamb"
    torch = "torch"


class SchedulerKind(Word):
    constant = "constant"
    cosine = "cosine"
    warmup = "warmup"
    warmup_decay = "warmup_decay"
    warmup_cosine = "warmup_cosine"
    one_cycle = "one_cycle"
    lr_range_test = "lr_range_test"


class WarmupType(Word):
    linear = "linear"
    log = "log"


# The keys that a kind uses in addition to the common ones, each with a value to suggest if it is missing.
_MOMENTS: dict[str, object] = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
OPTIMIZER_KEYS: dict[OptimizerKind, dict[str, object]] = {
    OptimizerKind.adamw: _MOMENTS,
    OptimizerKind.adamw8bit: _MOMENTS,
    OptimizerKind.adam: _MOMENTS,
    OptimizerKind.lamb: _MOMENTS,
    OptimizerKind.lion: {"beta1": 0.9, "beta2": 0.99},
    OptimizerKind.sgd: {"momentum": 0.9, "dampening": 0.0, "nesterov": False},
    OptimizerKind.torch: {"name": "Adagrad", "arguments": {}},
}
OPTIMIZER_ALL = ("kind", "lr", "weight_decay", "no_decay", "clip_norm")

_RISE: dict[str, object] = {"warmup_steps": 5, "warmup_type": "linear", "start_lr_ratio": 0.0}
_CYCLE: dict[str, object] = {"start_lr_ratio": 0.1, "rise_steps": 10}
SCHEDULER_KEYS: dict[SchedulerKind, dict[str, object]] = {
    SchedulerKind.constant: {},
    SchedulerKind.cosine: {"warmup_steps": 5, "min_lr_ratio": 0.1},
    SchedulerKind.warmup: _RISE,
    SchedulerKind.warmup_decay: _RISE,
    SchedulerKind.warmup_cosine: {**_RISE, "min_lr_ratio": 0.1},
    SchedulerKind.one_cycle: _CYCLE,
    SchedulerKind.lr_range_test: {"interval_steps": 5, "interval_rate": 1.0, "staircase": False},
}
SCHEDULER_ALL = ("kind",)
# Keys of one_cycle that may be null: as many steps down as up, no decay after the cycle, a constant momentum.
CYCLE_OPTIONAL = ("fall_steps", "decay_steps", "decay_rate", "momentum_min", "momentum_max")
_PAIRS = (("decay_steps", "decay_rate"), ("momentum_min", "momentum_max"))


@dataclass(frozen=True)
class Optimizer:
    """The update rule and its constants.

    `no_decay`: do not apply weight decay to norms and biases. `clip_norm`: null disables clipping. Kind torch is an
    element-wise optimizer of torch.optim, given by its class `name` and its `arguments`.
    """

    kind: OptimizerKind = OptimizerKind.adamw
    lr: float = 3e-3
    beta1: float | None = 0.9
    beta2: float | None = 0.95
    eps: float | None = 1e-8
    momentum: float | None = None
    dampening: float | None = None
    nesterov: bool | None = None
    name: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    weight_decay: float = 0.1
    no_decay: bool = True
    clip_norm: float | None = 1.0

    def __post_init__(self) -> None:
        limits = Limits(vars(self), "optimizer")
        limits.at_least(0, lr=0.003, weight_decay=0.1, momentum=0.9)
        limits.must("beta1", lambda value: 0 <= value < 1, "from 0 to below 1", 0.9)
        limits.must("beta2", lambda value: 0 <= value < 1, "from 0 to below 1", 0.95)
        limits.must("eps", lambda value: value > 0, "above 0", 1e-8)
        limits.must("clip_norm", lambda value: value > 0, "above 0, or null for no clipping", None)
        limits.conclude()

    @property
    def has_momentum(self) -> bool:
        """Whether the optimizer has a momentum that a schedule can cycle."""
        if self.kind is OptimizerKind.torch:
            return torch_has_momentum(self.name or "", self.arguments)
        return self.kind is not OptimizerKind.sgd or bool(self.momentum)


@dataclass(frozen=True)
class Scheduler:
    """The learning rate over the steps, which are optimizer updates.

    Ratios are relative to optimizer.lr: a rise begins at `start_lr_ratio`, and a fall ends at `min_lr_ratio`; with kind
    one_cycle or warmup_decay it ends at `start_lr_ratio` too. Kind one_cycle raises the rate over `rise_steps` and
    lowers it over `fall_steps`, while the momentum moves in the opposite direction. Kind lr_range_test adds
    `interval_rate` x optimizer.lr every `interval_steps`.
    """

    kind: SchedulerKind = SchedulerKind.cosine
    warmup_steps: int | None = 5
    warmup_type: WarmupType | None = None
    start_lr_ratio: float | None = None
    min_lr_ratio: float | None = 0.1
    rise_steps: int | None = None
    fall_steps: int | None = None
    decay_steps: int | None = None
    decay_rate: float | None = None
    momentum_min: float | None = None
    momentum_max: float | None = None
    interval_steps: int | None = None
    interval_rate: float | None = None
    staircase: bool | None = None

    def __post_init__(self) -> None:
        limits = Limits(vars(self), "scheduler")
        least = 0 if self.kind is SchedulerKind.cosine else 1  # DeepSpeed's warm-ups have at least one step
        limits.at_least(least, warmup_steps=least)
        limits.at_least(1, rise_steps=10, fall_steps=None, decay_steps=10, interval_steps=5)
        limits.at_least(0, decay_rate=0.1, interval_rate=1.0)
        limits.must("start_lr_ratio", lambda value: 0 <= value <= 1, "from 0 to 1", 0.0)
        limits.must("min_lr_ratio", lambda value: 0 <= value <= 1, "from 0 to 1", 0.1)
        limits.must("momentum_min", lambda value: 0 <= value < 1, "from 0 to below 1", 0.8)
        limits.must("momentum_max", lambda value: 0 <= value < 1, "from 0 to below 1", 0.9)
        limits.conclude()


def optimizer_problem(optimizer: Optimizer) -> Broken | None:
    """The first broken rule: a key that the kind does not use, a missing key, or values that do not fit together."""
    used = OPTIMIZER_KEYS[optimizer.kind]
    return (
        _keys_problem("optimizer", vars(optimizer), used, OPTIMIZER_ALL)
        or (_sgd_problem(optimizer) if optimizer.kind is OptimizerKind.sgd else None)
        or (_torch_problem(optimizer) if optimizer.kind is OptimizerKind.torch else None)
    )


def scheduler_problem(scheduler: Scheduler) -> Broken | None:
    """The first broken rule: a key that the kind does not use, a missing key, a key without the other of its pair, or a
    momentum_min above momentum_max."""
    optional = CYCLE_OPTIONAL if scheduler.kind is SchedulerKind.one_cycle else ()
    values = vars(scheduler)
    broken = _keys_problem("scheduler", values, SCHEDULER_KEYS[scheduler.kind], (*SCHEDULER_ALL, *optional))
    for one, other in _PAIRS if not broken else ():
        if (values[one] is None) != (values[other] is None):
            given, missing = (other, one) if values[one] is None else (one, other)
            return Broken(f"scheduler.{given} needs scheduler.{missing}", "null", (f"scheduler.{given}=null",))
    low, high = scheduler.momentum_min, scheduler.momentum_max
    if low is not None and high is not None and low > high:
        fix = f"scheduler.momentum_min={high}"
        return broken or Broken(f"scheduler.momentum_min must be at most momentum_max={high}", str(low), (fix,))
    return broken


def momentum_problem(optimizer: Optimizer, scheduler: Scheduler) -> Broken | None:
    """The broken rule if the schedule cycles a momentum that the optimizer does not have."""
    if scheduler.momentum_max is None or optimizer.has_momentum:
        return None
    own = ("optimizer.momentum=0.9",) if optimizer.kind is OptimizerKind.sgd else ()
    fixes = (*own, "scheduler.momentum_min=null scheduler.momentum_max=null")
    called = optimizer.name if optimizer.kind is OptimizerKind.torch else optimizer.kind
    return Broken("scheduler.momentum_max cycles a momentum", f"{called} without one", fixes)


def _keys_problem(
    group: str, values: dict[str, Any], used: dict[str, object], always: tuple[str, ...]
) -> Broken | None:
    kind = values["kind"]
    for key, value in values.items():
        is_empty = value is None or value == {}
        if key in used and value is None:
            return Broken(f"{group}={kind} needs {group}.{key}", "null", (f"{group}.{key}={used[key]}",))
        if key not in used and key not in always and not is_empty:
            fix = f"{group}.{key}={'{}' if isinstance(value, dict) else 'null'}"
            return Broken(f"{group}={kind} has no {group}.{key}", str(value), (fix,))
    return None


def _sgd_problem(optimizer: Optimizer) -> Broken | None:
    if not optimizer.momentum and (optimizer.dampening or optimizer.nesterov):
        key = "dampening" if optimizer.dampening else "nesterov"
        fixes = ("optimizer.momentum=0.9 optimizer.dampening=0.0", "optimizer.dampening=0.0 optimizer.nesterov=false")
        return Broken(f"optimizer.{key} needs optimizer.momentum above 0", str(optimizer.momentum), fixes)
    if optimizer.nesterov and optimizer.dampening:
        fixes = ("optimizer.dampening=0.0", "optimizer.nesterov=false")
        return Broken("optimizer.nesterov needs optimizer.dampening=0.0", str(optimizer.dampening), fixes)
    return None


def _torch_problem(optimizer: Optimizer) -> Broken | None:
    name = optimizer.name or ""
    problem = torch_problem(name)
    if problem:
        return Broken(problem, name, (f"optimizer.name={nearest(name, TORCH_NAMES) or 'Adagrad'}",))
    ours = [key for key in optimizer.arguments if key in TORCH_OURS]
    if ours:
        rule = f"optimizer.arguments are those of torch.optim.{name} but {', '.join(TORCH_OURS)}"
        return Broken(rule, ", ".join(ours), ("optimizer.arguments={}",))
    if name in TORCH_WITHOUT_DECAY and optimizer.weight_decay:
        return Broken(
            f"torch.optim.{name} has no weight decay", str(optimizer.weight_decay), ("optimizer.weight_decay=0",)
        )
    return None
