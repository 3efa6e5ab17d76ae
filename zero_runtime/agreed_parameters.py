"""The parameters of a model as they were when its units were built, which each step compares with what they are now."""

from __future__ import annotations

import torch
from torch import nn

from zero_runtime.errors import PlanError

_ABSENT = (None, False)


class AgreedParameters:
    """Remembers the parameters of `model` and which of them require a gradient.

    Units and states are made for them once. A parameter that is frozen later would still be moved by its momentum, and
    one that is unfrozen, added or replaced later would never be trained.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        with torch._C.DisableTorchFunctionSubclass():
            self._agreed = {
                module: {
                    name: (param, param.requires_grad)
                    for name, param in module._parameters.items()
                    if param is not None
                }
                for module in model.modules()
            }

    def check(self) -> None:
        """Raise PlanError, which names the parameter, if one was frozen, unfrozen, added or replaced.

        Reads no values. Parameters that were removed, and added ones that require no gradient, are allowed.
        """
        with torch._C.DisableTorchFunctionSubclass():  # a guarded parameter would run Python code for each attribute
            for module in self._model.modules():
                agreed = self._agreed.get(module, {})
                for name, param in module._parameters.items():
                    if param is None:
                        continue
                    known, trained = agreed.get(name, _ABSENT)
                    if param.requires_grad is not trained or (trained and param is not known):
                        raise PlanError(self._trouble(param, name, module, known, trained=trained))

    def _trouble(
        self, param: nn.Parameter, name: str, module: nn.Module, known: nn.Parameter | None, *, trained: bool
    ) -> str:
        path = next(path for path, one in self._model.named_modules() if one is module)
        full_name = f"{path}.{name}" if path else name
        where = f"step: parameter {full_name!r}: expected"
        if param is known:
            return (
                f"{where} requires_grad={trained} as at initialize, found {not trained}: the trained parameters are "
                "fixed there; set it before initialize, and hold a parameter for some steps by a group of its own "
                "with lr=0"
            )
        return (
            f"{where} {'none' if known is None else 'the same one'} as at initialize, found a new one: what is added "
            "or replaced later is not trained; do it before initialize, or make a new engine"
        )
