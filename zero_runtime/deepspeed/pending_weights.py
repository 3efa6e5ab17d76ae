"""Models on the meta device whose weights `initialize` reads from files, straight into each rank's shards."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from weakref import WeakKeyDictionary

from torch import nn

from zero_runtime.tensor_source import TensorSource

# Opens the files for the model that is handed to initialize, which may wrap the one that was built.
OpenWeights = Callable[[nn.Module], AbstractContextManager[TensorSource]]
# A loader returns a plain module, as from_pretrained does, so the module itself is the only way to name its files.
_PENDING: WeakKeyDictionary[nn.Module, OpenWeights] = WeakKeyDictionary()


def expect_weights(model: nn.Module, open_weights: OpenWeights) -> None:
    """Remember where `initialize` finds the weights of `model`."""
    _PENDING[model] = open_weights


def pending_weights(model: nn.Module) -> AbstractContextManager[TensorSource | None]:
    """Open the weights that a part of `model` still needs; None if it needs none."""
    for module in model.modules():
        if module in _PENDING:
            return _PENDING.pop(module)(model)
    return nullcontext()
