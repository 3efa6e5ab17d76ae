"""An optimizer that torch does not have, with its parameters and constants, for `initialize` to run on shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, NoReturn

import torch

from zero_runtime.deepspeed.optimizer_section import ChosenOptimizer, choose_optimizer
from zero_runtime.deepspeed.schema import Reader
from zero_runtime.errors import CallOrderError


class NamedOptimizer(torch.optim.Optimizer):
    """Holds parameter groups for `initialize`; it makes no step of its own.

    `constants` are those of the configuration's section optimizer of the type `section`; PlanError for others.
    """

    section: ClassVar[str]

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, **constants: Any) -> None:
        reader = Reader({})
        chosen = choose_optimizer({"type": self.section, "params": {"lr": lr, **constants}}, reader)
        reader.finish()
        assert chosen is not None
        self.chosen: ChosenOptimizer = chosen
        super().__init__(params, {"lr": chosen.lr, "weight_decay": chosen.weight_decay})

    def step(self, closure: Any = None) -> NoReturn:
        raise CallOrderError(
            f"{type(self).__name__}.step: expected it in initialize(optimizer=...), found a call; engine.step() updates"
        )
