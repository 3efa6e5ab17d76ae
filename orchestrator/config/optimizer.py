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

    `lr`: learning rate, at its highest if the scheduler changes it. `beta1`, `beta2`: decay of the mean of gradients
    and of their squares. `eps`: what is added to the divisor. `weight_decay`: the share of a weight that is taken off,
    times the learning rate; with kinds adam and sgd it is added to the gradient. `no_decay`: do not apply weight decay
    to norms and biases. `state_dtype`: of the moments in memory; bf16 halves them. `clip_norm`: the largest norm of the
    gradient; null disables clipping. `warmup_updates`: of kind onebitadam, updates as AdamW's at first.

    `momentum`: of kinds sgd and muon. `dampening`: of kind sgd, the share of a gradient that the momentum leaves out.
    `nesterov`: look ahead by the momentum. `ns_steps`, `ns_dtype`: of kind muon, number and dtype of the Newton-Schulz
    steps that orthogonalise the momentum of a matrix. `lr_scaling`: of kind muon, match_rms_adamw gives matrices
    updates of the size of AdamW's, original those of its author. `matrices`: of kind muon, patterns of the names of the
    matrices that it updates; [] are those of the repeated blocks. `adamw_lr_ratio`: of kind muon, the rate of all other
    parameters, relative to `lr`. `min_coeff`, `max_coeff`: of kind lamb, limits of the ratio by which a parameter's
    update is scaled. `correction`: of kind lamb, of the moments' bias: in the moments, as in its paper, or in the rate,
    as in DeepSpeed's.

    Kind torch is an element-wise optimizer of torch.optim, given by its class `name` and its `arguments`.
    """

    lr: float = 3e-3
    rule: OptimizerConfig = field(default=AdamWConfig(beta2=0.95, weight_decay=0.1), metadata=part(OPTIMIZERS))
    clip_norm: float | None = 1.0

    def __post_init__(self) -> None:
        limits = Limits(vars(self), "optimizer")
        limits.at_least(0, lr=0.003)
        limits.must("clip_norm", lambda value: value > 0, "above 0, or null for no clipping", None)
        decay = max(self.rule.decay, *(group.weight_decay or 0.0 for group in self.rule.groups), 0.0)
        if self.lr * decay > 1:
            rule = "optimizer.weight_decay x optimizer.lr must be at most 1: a step takes off no more than a weight"
            limits.refuse(rule, f"{decay:g} x {self.lr:g}", "optimizer.weight_decay=0")
        limits.conclude()


@dataclass(frozen=True)
class Scheduler:
    """The learning rate over the steps, which are optimizer updates.

    `warmup_steps`: steps of the rise. `warmup_type`: its form, linear or log. `decay_steps`, `decay_rate`: of kind
    one_cycle, divide the rate by 1 + decay_rate x steps / decay_steps after the fall. `momentum_min`, `momentum_max`:
    of kind one_cycle, the limits of the momentum (beta1); null keeps it constant. `staircase`: of kind lr_range_test,
    raise the rate in jumps.

    Ratios are relative to optimizer.lr: a rise begins at `start_lr_ratio`, and a fall ends at `min_lr_ratio`; with kind
    one_cycle or warmup_decay it ends at `start_lr_ratio` too. Kind one_cycle raises the rate over `rise_steps` and
    lowers it over `fall_steps`, while the momentum moves in the opposite direction. Kind lr_range_test adds
    `interval_rate` x optimizer.lr every `interval_steps`.
    """

    curve: LrSettings = field(default=CosineSettings(), metadata=part(SCHEDULES))
