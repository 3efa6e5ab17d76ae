"""Makes a model's `generate` safe on ranks that generate different numbers of tokens."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn


class StepwiseGenerate:
    """A module's `generate` inside a context that keeps the ranks in step; it is called as the original is.

    A copy or pickle of the module gets the original. `synced_gpus` of transformers is switched off: it would call the
    model for sequences that have ended, past the last position that it knows.
    """

    def __init__(self, module: nn.Module, around: Callable[[], AbstractContextManager[None]]) -> None:
        self._module = module
        self._around = around
        self._original: Callable[..., Any] = module.generate  # type: ignore[assignment]
        functools.update_wrapper(self, self._original)
        self._has_sync = "synced_gpus" in inspect.signature(self._original).parameters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._has_sync or "synced_gpus" in kwargs:
            kwargs["synced_gpus"] = False
        with self._around():
            return self._original(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[nn.Module, str]]:
        return getattr, (self._module, "generate")


def wrap_generate(model: nn.Module, around: Callable[[], AbstractContextManager[None]]) -> Callable[[], None]:
    """Replace `generate` of the model and of its parts that have one; returns what restores them, idempotent."""
    found = [module for module in model.modules() if callable(getattr(module, "generate", None))]
    for module in found:
        module.__dict__["generate"] = StepwiseGenerate(module, around)
    return functools.partial(unwrap_generate, found)


def unwrap_generate(modules: list[nn.Module]) -> None:
    """Restore every module's own `generate`."""
    for module in modules:
        wrapped = module.__dict__.pop("generate", None)
        if isinstance(wrapped, StepwiseGenerate) and getattr(wrapped._original, "__self__", None) is not module:
            module.__dict__["generate"] = wrapped._original  # the module had one of its own
    modules.clear()
