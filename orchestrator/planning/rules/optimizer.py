"""Rules for the optimizer and the learning-rate schedule."""

from __future__ import annotations

from orchestrator.config.optimizer import Optimizer, Scheduler
from orchestrator.config.state_groups import Zero
from orchestrator.config.strict import Broken
from orchestrator.planning.rules.scene import Scene
from zero_runtime.limits import broken_by
from zero_runtime.optim.configs import SgdConfig


def dampening_is_used(scene: Scene, optimizer: Optimizer) -> Broken | None:
    rule = optimizer.rule
    if not isinstance(rule, SgdConfig) or rule.momentum or not rule.dampening:
        return None
    fixes = ("optimizer.momentum=0.9", "optimizer.dampening=0.0")
    return Broken("optimizer.dampening needs optimizer.momentum above 0", str(rule.momentum), fixes)


def optimizer_can_run(scene: Scene, optimizer: Optimizer, zero: Zero) -> Broken | None:
    """What an optimizer itself says of the other settings."""
    broken = broken_by(lambda: optimizer.rule.check_run(zero.plan, optimizer.clip_norm, zero.wire))
    if not broken or zero.plan.keeps_full_grads or zero.outer_sharding is not None:
        return next(iter(broken), None)
    return broken[0]._replace(fix=("zero=stage1", *broken[0].fix))


def momentum_can_cycle(scene: Scene, optimizer: Optimizer, scheduler: Scheduler) -> Broken | None:
    if not scheduler.curve.cycles_momentum or optimizer.rule.has_momentum:
        return None
    own = ("optimizer.momentum=0.9",) if isinstance(optimizer.rule, SgdConfig) else ()
    fixes = (*own, "scheduler.momentum_min=null scheduler.momentum_max=null")
    kind = optimizer.rule.kind
    found = f"{optimizer.rule.name if kind == 'torch' else kind} without one"
    return Broken("scheduler.momentum_max cycles a momentum", found, fixes)
