"""The optimizer that initialize returns: torch's view of the parameter groups of the runtime's sharded optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, NoReturn

import torch

from zero_runtime.deepspeed.groups import Trained
from zero_runtime.errors import CallOrderError, PlanError
from zero_runtime.optim.lr_schedule import Rates
from zero_runtime.runtime import ZeroRuntime

# The values of a group that a schedule may change.
SCHEDULED = ("lr", "initial_lr", "betas", "momentum", "max_lr", "min_lr", "max_momentum", "base_momentum")


class ScalerView:
    """The loss scale as it is now, which nobody can set; 1 without loss scaling."""

    __slots__ = ("_runtime",)

    def __init__(self, runtime: ZeroRuntime) -> None:
        self._runtime = runtime

    @property
    def cur_scale(self) -> float:
        """The loss scale of the next backward."""
        return self._runtime.scaler.scale

    loss_scale = cur_scale


class EngineOptimizer(torch.optim.Optimizer):
    """Holds in param_groups the model's own parameters and the rates for the next update.

    So any torch scheduler can drive it. All other constants are fixed at construction: if one is changed, the next step
    raises an error. It holds no states; runtime.full_optimizer_state(name) returns them.
    """

    def __init__(self, trained: Trained) -> None:
        groups = trained.param_groups
        super().__init__(groups, {key: value for key, value in groups[0].items() if key != "params"})
        self.param_groups = groups  # the same list object, which a client's scheduler may modify
        self._fixed = [self._constants(group) for group in groups]
        self._params = [list(group["params"]) for group in groups]
        self._momentum = self._momenta()
        self._cycled = False
        self._update: Callable[[Rates], bool] | None = None
        self._runtime: ZeroRuntime | None = None
        self._drop: Callable[[], None] = lambda: None
        self.overflow = False  # the last step was skipped, because gradients overflowed
        self._rates()

    def bind(self, update: Callable[[Rates], bool], runtime: ZeroRuntime, drop: Callable[[], None]) -> None:
        """Set the engine's runtime, its update, which returns whether it was skipped, and its dropping of gradients."""
        self._update, self._runtime, self._drop = update, runtime, drop

    @property
    def optimizer(self) -> EngineOptimizer:
        """The optimizer itself: there is none inside it."""
        return self

    @property
    def loss_scaler(self) -> ScalerView:
        """The loss scale; it follows the steps."""
        assert self._runtime is not None, "bound by the engine"
        return ScalerView(self._runtime)

    @property
    def cur_scale(self) -> float:
        """The loss scale of the next backward; 1 without loss scaling."""
        return self.loss_scaler.cur_scale

    loss_scale = cur_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows overflows."""
        assert self._runtime is not None, "bound by the engine"
        return self._runtime.scaler.rule.static is None

    def needs_scaler(self) -> bool:
        """Whether a loss must be scaled before its backward: engine.backward does it, or engine.scale(loss)."""
        return self.dynamic_loss_scale or self.cur_scale != 1

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch returns a closure's loss
        """Called by the engine at the last micro-batch of a step; CallOrderError if the user calls it."""
        if closure is not None:
            raise PlanError("optimizer.step: expected no closure: a step is made of the backward calls before it")
        if self._update is None:
            raise CallOrderError("optimizer.step: expected engine.step(), which knows the boundary of a step")
        self.overflow = self._update(self._rates())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients since the last step, as engine.zero_grad."""
        self._drop()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Allowed only during construction."""
        if "_update" in self.__dict__:
            raise PlanError("optimizer.add_param_group: expected all groups at initialize, found one more; start anew")
        super().add_param_group(param_group)

    def state_dict(self) -> NoReturn:
        """Always raises: an empty dict would look like a checkpoint."""
        raise PlanError(
            "optimizer.state_dict: states are shards; engine.save_checkpoint saves them, and "
            "engine.runtime.full_optimizer_state(name) has the whole states of one parameter"
        )

    def load_state_dict(self, state_dict: Any) -> NoReturn:
        """Always raises: see state_dict."""
        raise PlanError("optimizer.load_state_dict: states are shards; engine.load_checkpoint loads them")

    def _rates(self) -> Rates:
        """The rates of the next update, by group, with one more group for frozen parameters that are in none."""
        if list(map(_ids, self._params)) != [_ids(group["params"]) for group in self.param_groups]:
            raise PlanError(
                "optimizer.param_groups: expected the groups and parameters of initialize, found others; what is added "
                "later is not trained: give all groups to initialize, and hold one for some steps by lr=0"
            )
        for index, (group, fixed) in enumerate(zip(self.param_groups, self._fixed, strict=True)):
            now = self._constants(group)
            edited = [key for key, value in fixed.items() if now.get(key) != value]
            if edited:
                raise PlanError(
                    f"optimizer.param_groups[{index}], {edited[0]}: expected {fixed[edited[0]]!r} as at initialize, "
                    f"found {now.get(edited[0])!r}; lr and momentum alone may change"
                )
        momenta = self._momenta()
        self._cycled = self._cycled or momenta != self._momentum
        if len(set(momenta)) > 1:
            raise PlanError(f"optimizer.param_groups: expected one momentum for all groups, found {momenta}")
        lrs = [_rate_of(group, index) for index, group in enumerate(self.param_groups)]
        return Rates((*lrs, 0.0), momenta[0] if self._cycled else None)

    def _momenta(self) -> list[float | None]:
        return [_momentum_of(group) for group in self.param_groups]

    @staticmethod
    def _constants(group: dict[str, Any]) -> dict[str, Any]:
        """The values of a group that must not change, including the second beta."""
        second = {"betas[1]": group["betas"][1]} if "betas" in group else {}
        return {key: value for key, value in group.items() if key not in ("params", *SCHEDULED)} | second


def _ids(params: Sequence[torch.Tensor]) -> list[int]:
    return list(map(id, params))


def _rate_of(group: dict[str, Any], index: int) -> float:
    found = group.get("lr")
    rate = float(found) if isinstance(found, (Real, torch.Tensor)) else math.nan
    if not 0 <= rate < math.inf:
        raise PlanError(
            f"optimizer.param_groups[{index}], lr: expected a finite number of at least 0, found {found!r}; nothing "
            "was updated; set it, or mend the schedule that does"
        )
    return rate


def _momentum_of(group: dict[str, Any]) -> float | None:
    if "betas" in group:
        return float(group["betas"][0])
    return float(group["momentum"]) if group.get("momentum") else None
