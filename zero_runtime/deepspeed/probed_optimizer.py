"""Finds by a probe whether the update of an optimizer class is element-wise, so that it may run on shards.

The probe steps a twin of the optimizer on a matrix and a vector, and another on the same elements in another order and
in other tensors. An element-wise update gives each element the same bits both times. All sizes are multiples of the
widest vector registers, so that no loop has a remainder, which a library may compute by other instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zero_runtime.errors import PlanError, brief
from zero_runtime.optim.configs import ProbedConfig
from zero_runtime.optim.torch_rule import is_number, twin

_SCALES = (1.0, 1e-3, 1e3, 0.0, 1.0, 30.0, 1.0, 1.0)  # of the gradients, by step
_NUMEL = 192
_RATE = 0.125
_OTHERS = (
    "its update of an element depends on other elements (a norm, a factored state), on the element's place or on "
    "random numbers"
)
_Split = Callable[[torch.Tensor], Sequence[torch.Tensor]]
_Twin = torch.optim.Optimizer


def probed_config(optimizer: torch.optim.Optimizer) -> ProbedConfig:
    """The configuration that runs this optimizer's class on shards. PlanError if its update is not element-wise."""
    first, kind = optimizer.param_groups[0], type(optimizer)
    decays = {group.get("weight_decay"): group for group in optimizer.param_groups}  # 0 may switch a norm off
    try:
        for group in decays.values():
            states, numbers = _examined(optimizer, {**group, "lr": _RATE, **_eager(group)})
    except Exception as error:  # whatever the user's class raises on tensors that are not its model's
        reason = str(error) if isinstance(error, PlanError) else f"its step() on other tensors raised {brief(error)}"
        raise PlanError(
            f"optimizer: {kind.__module__}.{kind.__qualname__} cannot run on shards: {reason}; expected an "
            "element-wise update, or AdamW, Lion, Lamb or Muon, which are here"
        ) from error
    constants = {key: value for key, value in first.items() if key not in ("params", "lr", "param_names", "name")}
    decay = {"weight_decay": 0.0} if "weight_decay" in first else {}
    arguments = constants | _eager(first) | decay
    own = {"given": optimizer, "states": states, "numbers": numbers}
    return ProbedConfig("", arguments, float(first.get("weight_decay", 0.0)), no_decay=False, **own)


def _eager(group: dict[str, Any]) -> dict[str, bool]:
    """Without torch's loops over many tensors, whose bits may be others."""
    return {key: False for key in ("foreach", "fused") if key in group}


def _examined(optimizer: _Twin, group: dict[str, Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The names of its states for each element, and examples of its other states."""
    order = torch.randperm(_NUMEL, generator=torch.Generator().manual_seed(0))
    shaped = _stepped(optimizer, group, lambda flat: (flat[:128].view(8, 16), flat[128:]))
    moved = _stepped(optimizer, group, lambda flat: flat[order].split((64, 128)))
    found, again = _told(shaped, order), _told(moved, slice(None))
    if found.keys() != again.keys() or not all(
        torch.equal(torch.as_tensor(value), torch.as_tensor(again[name])) for name, value in found.items()
    ):
        raise PlanError(_OTHERS)
    numbers = {name: value for name, value in found.items() if is_number(value)}
    return tuple(name for name in found if name and name not in numbers), numbers


def _stepped(optimizer: _Twin, group: dict[str, Any], split: _Split) -> _Twin:
    """A twin after some steps on the tensors into which `split` divides fixed values."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    draw = torch.Generator().manual_seed(1)
    params = [part.clone().to(device) for part in split(torch.randn(_NUMEL, generator=draw))]
    before, stepping = [param.clone() for param in params], twin(optimizer, [{**group, "params": params}])
    constants = _constants(stepping)
    with torch.random.fork_rng():
        for scale in _SCALES:
            grads = split(scale * torch.randn(_NUMEL, generator=draw))
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad.clone().to(device)
            stepping.step()
    if all(map(torch.equal, params, before)):
        raise PlanError("its step() changes none of its parameters")
    if _constants(stepping) != constants:
        raise PlanError("its step() changes attributes or groups, which no checkpoint of shards has; use self.state")
    return stepping


def _constants(optimizer: _Twin) -> str:
    kept = {key: value for key, value in vars(optimizer).items() if key not in ("state", "param_groups")}
    return repr((kept, {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}))


def _told(stepped: _Twin, order: torch.Tensor | slice) -> dict[str, Any]:
    """Its states by name, those of each element as one flat tensor in this order, and so its parameters as ""."""
    params = stepped.param_groups[0]["params"]
    found: dict[str, Any] = {"": torch.cat([param.reshape(-1) for param in params])[order]}
    for name in stepped.state[params[0]]:
        values = [stepped.state[param].get(name) for param in params]
        if all(map(is_number, values)):
            if len({float(value) for value in values}) > 1:
                raise PlanError(_OTHERS)
            found[name] = values[0]
            continue
        for value, param in zip(values, params, strict=True):
            shape = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            if shape != list(param.shape) or value.dtype != torch.float32:
                raise PlanError(
                    f"its state {name} is {shape} for a parameter of {list(param.shape)}: expected an fp32 number for "
                    "each element, or one number (a factored or quantised state belongs to whole parameters)"
                )
        found[name] = torch.cat([value.reshape(-1) for value in values])[order]
    return found
