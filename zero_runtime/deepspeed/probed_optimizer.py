"""Finds by a probe whether the update of an optimizer class is element-wise, so that it may run on shards.

The probe steps a twin of the optimizer on a matrix and a vector, and another on the same elements in another order and
in other tensors. An element-wise update gives each element the same bits both times. All sizes are multiples of the
widest vector registers, so that no loop has a remainder, which a library may compute by other instructions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zero_runtime.errors import PlanError, brief
from zero_runtime.optim.configs import ProbedConfig
from zero_runtime.optim.torch_rule import is_number, twin

_SCALES = (1.0, 1e-3, 1e3, 0.0, 1.0, 30.0, 1.0, 1.0)  # of the gradients, by step
_ORDER = torch.arange(192).view(12, 16).t().flatten()
_OTHERS = "its update of an element depends on other elements (a norm, a factor), on its place or on random numbers"


def probed_config(optimizer: torch.optim.Optimizer) -> ProbedConfig:
    """The configuration that runs this optimizer's class on shards. PlanError if its update is not element-wise."""
    first, kind = optimizer.param_groups[0], f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    constants = {key: value for key, value in first.items() if key not in ("params", "lr", "param_names", "name")}
    # Without torch's loops over many tensors, whose bits may be others.
    constants |= {key: False for key in ("foreach", "fused") if key in first}
    none = {"weight_decay": 0.0} if "weight_decay" in first else {}  # the runs of a shard have their own
    try:
        for decay in {group.get("weight_decay", 0.0) for group in optimizer.param_groups}:  # 0 may switch a norm off
            group = constants | dict.fromkeys(none, decay) | {"lr": 0.125}
            found, numbers = _stepped(optimizer, group, moved=False)
            if found != _stepped(optimizer, group, moved=True)[0]:
                raise PlanError(_OTHERS)
    except Exception as error:  # whatever the user's class raises for tensors that are not its model's
        reason = str(error) if isinstance(error, PlanError) else f"its step() on other tensors raised {brief(error)}"
        raise PlanError(f"optimizer: {kind} cannot run on shards: {reason}; use another, such as AdamW") from error
    states = tuple(name for name in found if name and name not in numbers)
    own: dict[str, Any] = {"name": kind, "state_names": states, "given": optimizer, "numbers": numbers}
    decay = float(first.get("weight_decay", 0.0))
    return ProbedConfig("", constants | none, decay, no_decay=False, uses_betas="betas" in first, **own)


def _stepped(optimizer: torch.optim.Optimizer, group: dict[str, Any], *, moved: bool) -> tuple[Any, Any]:
    """The elements' values after some steps, by state ("" is the parameter), and the states that are one number.

    moved: whether the elements are in another order and in other tensors; their values are in that order anyway.
    """

    def split(flat: torch.Tensor) -> Sequence[torch.Tensor]:
        return flat[_ORDER].split((64, 128)) if moved else (flat[:128].view(8, 16), flat[128:])

    device, draw = "cuda" if torch.cuda.is_available() else "cpu", torch.Generator().manual_seed(1)
    begin = split(torch.randn(192, generator=draw))
    params = [part.clone().to(device) for part in begin]
    stepping = twin(optimizer, [{**group, "params": params}])
    before = _constants(stepping)
    with torch.random.fork_rng():
        for scale in _SCALES:
            for param, grad in zip(params, split(scale * torch.randn(192, generator=draw)), strict=True):
                param.grad = grad.clone().to(device)
            stepping.step()
    if _constants(stepping) != before:
        raise PlanError("its step() changes attributes or groups, which no checkpoint of shards has; use self.state")
    if all(torch.equal(param.cpu(), part) for param, part in zip(params, begin, strict=True)):
        raise PlanError("its step() changes none of its parameters")
    states = {name: [stepping.state[param][name] for param in params] for name in stepping.state[params[0]]}
    numbers = {name: values[0] for name, values in states.items() if is_number(values[0])}
    found = {name: list(map(float, values)) for name, values in states.items() if name in numbers}
    for name, values in [("", params), *states.items()]:
        if name not in found:
            shapes = [(list(one.shape), one.dtype) if isinstance(one, torch.Tensor) else one for one in values]
            if shapes != [(list(param.shape), torch.float32) for param in params]:
                raise PlanError(f"its state {name} is {shapes[0]}: expected an fp32 number for each element, or one")
            found[name] = torch.cat([value.reshape(-1) for value in values])[slice(None) if moved else _ORDER].tolist()
    return found, numbers


def _constants(optimizer: torch.optim.Optimizer) -> str:
    kept = {key: value for key, value in vars(optimizer).items() if key not in ("state", "param_groups")}
    return repr((kept, {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}))
