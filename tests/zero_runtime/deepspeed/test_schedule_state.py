"""The engine saves the whole state of a schedule: each of torch's goes on after a load as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.ranks import run_ranks
from harness.seed_loop import full_values, initialize_quietly, unequal
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR

from zero_runtime.errors import PlanError


def _train(engine: Any, step: int) -> None:
    engine.backward(engine(torch.sin(torch.arange(16.0) + step).view(4, 4)).square().mean())
    engine.step()


class Fading:
    """A callable with a state of its own, which torch's schedules save."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, _place: float) -> float:
        self.calls += 1
        return 0.9**self.calls


class NumpyRate(schedules.LRScheduler):
    """A schedule of the user's with a function, and with values that JSON does not have."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.rule = lambda count: 0.1 / (1 + count)
        self.count, self.seen, self.tensors = np.int64(0), np.zeros(2), (torch.zeros(2, dtype=torch.bfloat16),)
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        self.count, self.seen, self.tensors = self.count + 1, self.seen + 1, (self.tensors[0] + 0.5,)
        return [self.rule(self.count) + self.seen[1] + self.tensors[0][1].item() for _ in self.base_lrs]


def _warm_cosine(opt: torch.optim.Optimizer) -> schedules.LRScheduler:
    parts = [schedules.LinearLR(opt, 0.1, 1.0, 3), schedules.CosineAnnealingLR(opt, 5)]
    return schedules.SequentialLR(opt, parts, [3])


def _chained(opt: torch.optim.Optimizer) -> schedules.LRScheduler:
    return schedules.ChainedScheduler([_warm_cosine(opt), schedules.LambdaLR(opt, Fading())], opt)


Kind = Callable[..., torch.optim.Optimizer]
KINDS: tuple[Kind, ...] = (
    partial(torch.optim.AdamW, lr=0.1),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.1)),
)
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda opt: schedules.LambdaLR(opt, Fading()),
    "MultiplicativeLR": lambda opt: schedules.MultiplicativeLR(opt, lambda _: 0.8),
    "StepLR": lambda opt: schedules.StepLR(opt, 3),
    "MultiStepLR": lambda opt: schedules.MultiStepLR(opt, [2, 5, 5], 0.5),
    "ConstantLR": lambda opt: schedules.ConstantLR(opt, 0.5, 6),
    "LinearLR": lambda opt: schedules.LinearLR(opt, 0.1, 1.0, 7),
    "ExponentialLR": lambda opt: schedules.ExponentialLR(opt, 0.8),
    "PolynomialLR": lambda opt: schedules.PolynomialLR(opt, 7, 2.0),
    "CosineAnnealingLR": lambda opt: schedules.CosineAnnealingLR(opt, 7),
    "CosineAnnealingWarmRestarts": lambda opt: schedules.CosineAnnealingWarmRestarts(opt, 3),
    "SequentialLR": _warm_cosine,
    "ChainedScheduler": _chained,
    "OneCycleLR": lambda opt: schedules.OneCycleLR(opt, 0.05, total_steps=12),
    "CyclicLR": lambda opt: schedules.CyclicLR(opt, 0.01, 0.1, 3, scale_fn=Fading()),
    "ReduceLROnPlateau": lambda opt: schedules.ReduceLROnPlateau(opt, factor=0.5, patience=2),
    "SWALR": lambda opt: SWALR(opt, 0.01, anneal_epochs=6),
    "a user's": NumpyRate,
}


def _rates(opt: Any, updates: range, update: Callable[[int], None], schedule: Any) -> list[Any]:
    """The rate and the momentum of each update; `schedule` is stepped here, unless it is None."""
    found = []
    for number in updates:
        [group] = opt.param_groups
        found.append((float(group["lr"]), group.get("betas", group.get("momentum"))))
        update(number)
        if schedule is not None:
            schedule.step(*([1.0] if isinstance(schedule, schedules.ReduceLROnPlateau) else []))
    return found


def _plain_rates(name: str, kind: Kind) -> list[Any]:
    opt = kind([nn.Parameter(torch.ones(2))])
    return _rates(opt, range(8), lambda _: opt.step(), SCHEDULES[name](opt))


def _begin(name: str, kind: Kind, seed: int) -> tuple[Any, Any]:
    """An engine with the schedule, and the schedule if the script steps it."""
    torch.manual_seed(seed)
    model = nn.Linear(4, 2)
    opt = kind(model.parameters())
    driven = None if name == "ReduceLROnPlateau" else SCHEDULES[name](opt)
    config = {"train_batch_size": 4, "zero_optimization": {"stage": 1}}
    engine = initialize_quietly(model=model, optimizer=opt, lr_scheduler=driven, config=config)[0]
    return engine, None if driven else SCHEDULES[name](engine.optimizer)


def _go_on(engine: Any, own: Any, updates: range) -> list[Any]:
    return _rates(engine.optimizer, updates, partial(_train, engine), own)


def _end(engine: Any) -> dict[str, torch.Tensor]:
    weights = full_values(engine)
    engine.destroy()
    return weights


def _schedules_go_on(root: Path) -> None:
    for (name, kind), place in zip(((name, kind) for name in SCHEDULES for kind in KINDS), count()):
        if kind is not KINDS[0] and name not in ("OneCycleLR", "CyclicLR", "SequentialLR"):
            continue  # the others leave the momentum alone
        engine, own = _begin(name, kind, 0)
        found = _go_on(engine, own, range(4))
        engine.save_checkpoint(root / str(place), client_state={"own": own and own.state_dict()})
        _go_on(engine, own, range(4, 8))
        unbroken = _end(engine)
        engine, own = _begin(name, kind, 1)
        state = engine.load_checkpoint(root / str(place))[1]
        if own is not None:
            own.load_state_dict(state["own"])
        found += _go_on(engine, own, range(4, 8))
        assert found == _plain_rates(name, kind), name
        assert unequal(_end(engine), unbroken) == [], name


def test_every_schedule_of_torch_goes_on_after_a_load_as_in_plain_torch(tmp_path: Path) -> None:
    of_torch = {kind.__name__ for kind in vars(schedules).values() if isinstance(kind, type)}
    kinds = {name for name in of_torch if name.endswith(("LR", "Scheduler", "Plateau", "Restarts")) and name[0] != "_"}
    assert kinds - {"LRScheduler"} <= SCHEDULES.keys()
    run_ranks(_schedules_go_on, 1, tmp_path)


def _refused_schedule(root: Path) -> None:
    """A schedule whose state cannot be saved is refused at the save, by the place of what cannot."""
    engine, _ = _begin("SequentialLR", KINDS[0], 0)
    _go_on(engine, None, range(4))
    engine.lr_scheduler._schedulers[1].owner = engine.module
    with pytest.raises(
        PlanError, match=r"SequentialLR\.state_dict\(\)\['_schedulers'\]\[1\]\['owner'\].*found a Linear"
    ):
        engine.save_checkpoint(root)
    assert not list(root.iterdir())
    engine.destroy()


def test_a_schedule_that_cannot_be_saved_is_refused_at_the_save(tmp_path: Path) -> None:
    run_ranks(_refused_schedule, 1, tmp_path)
