"""The groups optimizer and scheduler, whose kinds are classes of the runtime."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.config.parts import part
from orchestrator.config.strict import Limits
from zero_runtime.optim.configs import OPTIMIZERS, AdamWConfig, OptimizerConfig
from zero_runtime.optim.lr_settings import SCHEDULES, CosineSettings, LrSettings


@dataclass(frozen=True)
class Optimizer:
    """The update rule and its constants.

    `no_decay`: do not apply weight decay to norms and biases. `clip_norm`: null disables clipping. Kind torch is an
    element-wise optimizer of torch.optim, given by its class `name` and its `arguments`.
    """

    lr: float = 3e-3
    rule: OptimizerConfig = field(default=AdamWConfig(beta2=0.95, weight_decay=0.1), metadata=part(OPTIMIZERS))
    clip_norm: float | None = 1.0

    def __post_init__(self) -> None:
        limits = Limits(vars(self), "optimizer")
        limits.at_least(0, lr=0.003)
        limits.must("clip_norm", lambda value: value > 0, "above 0, or null for no clipping", None)
        limits.conclude()


@dataclass(frozen=True)
class Scheduler:
    """The learning rate over the steps, which are optimizer updates.

    Ratios are relative to optimizer.lr: a rise begins at `start_lr_ratio`, and a fall ends at `min_lr_ratio`; with kind
    one_cycle or warmup_decay it ends at `start_lr_ratio` too. Kind one_cycle raises the rate over `rise_steps` and
    lowers it over `fall_steps`, while the momentum moves in the opposite direction. Kind lr_range_test adds
    `interval_rate` x optimizer.lr every `interval_steps`.
    """

    curve: LrSettings = field(default=CosineSettings(), metadata=part(SCHEDULES))
