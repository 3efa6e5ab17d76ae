"""A backward that the user starts with `tensor.backward()`, in which a runtime takes part as in one of its own.

It begins at its first event in the runtime and ends with the pass of autograd in which it began. `torch.autograd.grad`
leaves no gradients in parameters and is not one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import nn

from zero_runtime.unit import Unit

_current_graph_task = torch._C._current_graph_task_id


class UsersBackward(NamedTuple):
    """What is done with a backward that the user started.

    last: whether it is the last of its step. parts: its gradients are divided by it, before they are summed over ranks.
    """

    last: bool
    parts: int


class UsersBackwards:
    """Calls `begin` at the first event of a backward that the user started, and `end` at its end. `begin` may raise."""

    def __init__(self, begin: Callable[[], UsersBackward], end: Callable[[], None]) -> None:
        self._begin = begin
        self._end = end
        self.parts: int | None = None  # of the backward under way; None: there is none
        self._other = -1  # torch's number of the latest pass that leaves no gradients here

    def join(self, units: Iterable[Unit]) -> None:
        """Called in a backward that no runtime started: begin, if it leaves a gradient in a parameter of the units."""
        task = _current_graph_task()
        if task == self._other:
            return
        if not any(receives_gradient(param) for unit in units if unit.trainable for param in unit.params):
            self._other = task
            return
        self.parts = self._begin().parts
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        self.parts = None
        self._end()

    @property
    def failed(self) -> bool:
        """Whether the backward under way ended without `end`, which is so after an error."""
        return self.parts is not None and _current_graph_task() == -1


def receives_gradient(param: nn.Parameter) -> bool:
    """Whether the pass of autograd under way adds to `param.grad`."""
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        view = param.view_as(param)
    node = view.grad_fn and view.grad_fn.next_functions[0][0]
    if node is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # autograd.grad asks for the gradient of this parameter
        return False
