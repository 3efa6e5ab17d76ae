"""Runs an element-wise torch optimizer on the shards: one instance per unit, one of its groups per run.

Its states are stored in the runtime's flat tensors: after the step in which the optimizer creates a tensor, that is
copied to its place in a flat tensor and the optimizer gets a view of the place. So the states are counted, saved and
moved like those of the runtime's own optimizers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from zero_runtime.collectives import Collectives
from zero_runtime.errors import PlanError
from zero_runtime.optim.configs import TORCH_WITHOUT_DECAY, ProbedConfig, TorchConfig
from zero_runtime.optim.groups import Run
from zero_runtime.optim.rules import Held, StepNumbers, UpdateRule
from zero_runtime.unit import Unit

_FP32 = torch.empty((), dtype=torch.float32)  # torch's own counters of steps


class TorchRule(UpdateRule):
    """Update rule of a class of torch.optim or of a probed one. Raises PlanError if the masters are not fp32."""

    def __init__(self, config: TorchConfig, helds: Sequence[Held], collectives: Collectives) -> None:
        self._config = config
        self._optimizers = [_build(config, held) for held in helds]

    def update(self, helds: Sequence[Held], numbers: StepNumbers) -> None:
        for held, optimizer in zip(helds, self._optimizers, strict=True):
            if optimizer is None:
                continue
            for run, group in zip(held.runs, optimizer.param_groups, strict=True):
                self._prepare(held, run.start, run.stop, group, numbers)
                group["lr"] = numbers.rate(run.settings)
            optimizer.step()
            for run, group in zip(held.runs, optimizer.param_groups, strict=True):
                (shard,) = group["params"]
                shard.grad = None
                assert held.unit.master_shard is not None
                _move(shard.data, held.unit.master_shard[run.start : run.stop])
                self._take_states(held, run.start, run.stop, optimizer.state[shard])
            assert isinstance(held.unit, Unit), "offloaded shards have no torch optimizer"
            held.unit.parameters.refresh_param_shard()

    def counters(self, helds: Sequence[Held]) -> dict[str, float]:
        """Torch's own 0-dim states, by group: they depend only on the steps and rates. Reads them on the host."""
        found: dict[str, float] = {}
        for run, state, _ in self._runs(helds):
            scalars = {name: value for name, value in state.items() if is_number(value)}
            found |= {f"group{run.settings.index}.{name}": float(value) for name, value in scalars.items()}
        return found

    def resume(self, helds: Sequence[Held], counters: Mapping[str, float]) -> None:
        """Give torch the current flat states, and the `counters` of a run that had made the same number of steps."""
        if counters == {"updates": 0.0}:
            return  # torch has no states yet
        examples = self._config.numbers if isinstance(self._config, ProbedConfig) else {}
        for run, state, held in self._runs(helds):
            prefix = f"group{run.settings.index}."
            state.update({name: flat[run.start : run.stop] for name, flat in held.states.items()})
            scalars = {name.removeprefix(prefix): value for name, value in counters.items() if name.startswith(prefix)}
            state.update({name: _like(examples.get(name, _FP32), value) for name, value in scalars.items()})

    def free(self) -> None:
        """Release torch's optimizers and with them the states."""
        self._optimizers.clear()

    def _runs(self, helds: Sequence[Held]) -> Iterator[tuple[Run, dict[str, Any], Held]]:
        """Every run with torch's state for it."""
        for held, optimizer in zip(helds, self._optimizers, strict=True):
            if optimizer is not None:
                for run, group in zip(held.runs, optimizer.param_groups, strict=True):
                    yield run, optimizer.state[group["params"][0]], held

    def _prepare(self, held: Held, start: int, stop: int, group: dict[str, Any], numbers: StepNumbers) -> None:
        """Point torch's tensor at the current memory of the master's run, and set its gradient."""
        (shard,) = group["params"]
        unit = held.unit
        assert unit.master_shard is not None
        assert unit.grad_shard is not None
        shard.data = unit.master_shard[start:stop]
        shard.grad = unit.grad_shard[start:stop].to(torch.float32) * numbers.grad_scale
        if numbers.momentum is not None and self._config.uses_betas:
            group["betas"] = (numbers.momentum, group["betas"][1])
        elif numbers.momentum is not None:
            group["momentum"] = numbers.momentum

    def _take_states(self, held: Held, start: int, stop: int, state: dict[str, Any]) -> None:
        made = {name for name, value in state.items() if isinstance(value, torch.Tensor) and value.dim() == 1}
        if made != held.states.keys():
            raise PlanError(
                f"{self._config.name}: expected the states {sorted(held.states)} for each element, found "
                f"{sorted(made)}; torch {torch.__version__} keeps others than the memory model knows of"
            )
        for name, flat in held.states.items():
            state[name] = _move(state[name], flat[start:stop])


def is_number(value: object) -> bool:
    """Whether a state is one number for all elements: a 0-dim tensor, or a number of Python."""
    return not value.dim() if isinstance(value, torch.Tensor) else isinstance(value, (int, float))


def twin(given: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """An optimizer of the same class and attributes for other groups, without states."""
    found: torch.optim.Optimizer = object.__new__(type(given))
    vars(found).update(vars(given) | {"param_groups": groups, "state": defaultdict(dict)})
    vars(found).pop("step", None)  # a schedule's wrapper, which would call the given one's
    return found


def _move(found: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """The place, with the values that were found, which some classes put into new memory in each step."""
    return place if found.data_ptr() == place.data_ptr() else place.copy_(found)


def _like(example: Any, value: float) -> Any:
    return example.new_tensor(value) if isinstance(example, torch.Tensor) else type(example)(value)


def _build(config: TorchConfig, held: Held) -> torch.optim.Optimizer | None:
    """Create the unit's optimizer; None if the rank holds nothing of the unit, since torch refuses an empty one."""
    master = held.unit.master_shard
    assert master is not None
    if master.dtype != torch.float32:
        raise PlanError(
            f"{config.name}: expected precision.master=fp32, found {master.dtype}: torch would keep its states in it "
            "too; use fp32 masters, or an optimizer of the runtime's own"
        )
    groups = []
    for run in held.runs:
        group: dict[str, Any] = {"params": [master[run.start : run.stop].detach()]}
        if run.settings.weight_decay:
            group["weight_decay"] = run.settings.weight_decay
        groups.append(group)
    if isinstance(config, ProbedConfig):
        return twin(config.given, [{**config.arguments, **group} for group in groups]) if groups else None
    kind = getattr(torch.optim, config.class_name)
    rest = {} if config.class_name in TORCH_WITHOUT_DECAY else {"weight_decay": 0.0}
    try:
        return kind(groups, **dict(config.arguments), **rest, foreach=False) if groups else None
    except (TypeError, ValueError) as error:
        raise PlanError(f"optimizer.arguments: {config.name} refuses {dict(config.arguments)}: {error}") from error
