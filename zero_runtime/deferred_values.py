"""Parameters whose values are computed when they are asked for; recorded_values.py has the only kind."""

from __future__ import annotations

from typing import Any

import torch


class DeferredTensor(torch.Tensor):
    """A parameter without memory, or a view of one. memory: the same object for tensors that would share it."""

    memory: Any

    def computed(self, name: str) -> torch.Tensor:
        """The values, which belong to the caller. PlanError tells of elements without a value under this name."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say how it is computed"
        )  # a tensor's class cannot be abstract


def values_of(tensor: torch.Tensor, name: str = "") -> torch.Tensor:
    """The tensor's values without its graph; those of a deferred one belong to the caller.

    name: as which a PlanError tells of a parameter that has elements without a value.
    """
    return tensor.computed(name) if isinstance(tensor, DeferredTensor) else tensor.detach()


def swap_content(first: torch.Tensor, second: torch.Tensor) -> None:
    """Exchange the contents of two parameters; references to the objects stay valid. No graph may use them yet.

    torch.utils.swap_tensors does the same but refuses parameters with weak references, which nn.LSTM keeps to its own
    parameters. Those refer to the object, so they stay correct after the swap.
    """
    torch._C._swap_tensor_impl(first, second)
