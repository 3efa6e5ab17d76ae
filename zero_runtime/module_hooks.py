"""The hooks on modules, tensors and parameters that turn nn.Module calls and autograd events into schedule events.

No other file registers hooks.

[Note: the life of a unit in a pass]
Forward: a unit is gathered when the first of its modules is called, and released when each of them has been called
once, or at the end of the root's forward. If another module reads one of its parameters (an output head that multiplies
by the embedding's weight), the innermost running call borrows the unit: it is gathered at the read and released at the
end of that call.
A part of the model may also be called separately (an encoder, a backbone, an embedding). A part that bounds no unit has
no hooks, so it costs nothing inside a call of the full model. Units that a separately called part reads are lent to it:
gathered at the read, and released when another part or the full model has been called or, if the part recorded a graph,
when the next backward has ended.
Backward: a unit is gathered when the gradient of an output of a call that read it arrives. A trained unit is done when
the last of its own gradients has arrived. A frozen unit has no gradients. It is done when every call that read it has
either received no output gradient yet or received all its input gradients, and when the trained parameters of the same
modules are done too, because their gradients may read the frozen unit outside of that path (as in DoRA). Units that are
not done by then are released at the end of the backward.

[Note: done on every rank]
A parameter that the forward did not use gets no gradient. If only one rank leaves a parameter unused, its unit would be
done later there than on the other ranks. The other ranks would wait for the unit's reduction before they issue a gather
that the first rank waits for: a deadlock. So a trained unit is also done when the gradients of the inputs of all its
calls have arrived. The unit's own gradients have arrived by then: autograd runs the nodes that were recorded last
first, and the nodes of a call are newer than the nodes that produced its inputs.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from zero_runtime.errors import CallOrderError, ParameterReadError
from zero_runtime.parameter_reads import unwatch_parameters, watch_parameters
from zero_runtime.schedule import Schedule
from zero_runtime.unit import Unit

_current_graph_task = torch._C._current_graph_task_id
_MODULE_CALL = nn.Module._call_impl.__code__


class RuntimeHook(partial[Any]):
    """A hook of the runtime. A copy or pickle of the module gets a no-op instead, so the copy is a plain module."""

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _nothing


def _nothing(*_args: object, **_kwargs: object) -> None:
    """The hook that copies get."""


@dataclass(eq=False)
class Call:
    """One call of a module that bounds units, with the units that it reads: its own and the borrowed ones."""

    module: nn.Module
    units: list[Unit]
    in_graph: bool = False  # the call will have a backward: gradients are enabled and it is not a recomputation
    opened_in: int = 0  # number of the backward that has begun but not ended this call's own backward; 0: none


@dataclass(eq=False)
class Edge:
    """A tensor between calls. `closing`: the calls whose backward has ended when the tensor's gradient arrives."""

    closing: list[Call] = field(default_factory=list)


class ModuleHooks:
    """Registers the hooks of all units on construction; `remove` removes them all."""

    def __init__(self, model: nn.Module, units: list[Unit], schedule: Schedule) -> None:
        self._model = model
        self._units = units
        self._schedule = schedule
        self._running: list[Call] = []
        self._ended = Call(model, [])  # the call that ended last
        self._called: dict[Unit, set[nn.Module]] = {unit: set() for unit in units}  # since the unit's last release
        self._calls: Counter[Unit] = Counter()  # forward calls since the last backward
        self._unclosed: Counter[Unit] = Counter()  # those in the graph that still await gradients of their inputs
        self._open: Counter[Unit] = Counter()  # calls that read the unit and whose own backward is under way
        self._backward = 0  # number of the latest backward; the next forward resets it to 0
        self._graph_task = -1
        self._edges: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._companions = {unit: _companions(unit, units) for unit in units}
        self._beside = {unit: [other for other in units if unit in self._companions[other]] for unit in units}
        self._lent: Call | None = None  # the separately called part, see [Note: the life of a unit in a pass]
        self._parts = set(model.modules())
        self._handles = list(self._attach())
        watch_parameters(model, units, self._on_read)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.end_part()
        unwatch_parameters(self._model, self._units)

    def _attach(self) -> Iterator[RemovableHandle]:
        by_module: dict[nn.Module, list[Unit]] = {self._model: []}
        for unit in self._units:
            for module in unit.modules:
                by_module.setdefault(module, []).append(unit)
            if unit.trainable:
                for index, param in enumerate(unit.params):
                    yield param.register_post_accumulate_grad_hook(self._grad_hook(unit, index))
        for module, units in by_module.items():
            yield module.register_forward_pre_hook(RuntimeHook(self._before_forward, units), with_kwargs=True)
            # The first runs even if forward raises, as a recomputation does to stop early. The second waits for
            # collectives, so it must not run on a rank whose forward failed.
            yield module.register_forward_hook(RuntimeHook(self._end_call), always_call=True)
            yield module.register_forward_hook(RuntimeHook(self._after_forward))
        for module in self._model.modules():
            if module._parameters:
                yield module.register_load_state_dict_pre_hook(RuntimeHook(self._before_load))

    # ---- forward -----------------------------------------------------------------------------------------------

    def _before_forward(
        self, units: list[Unit], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        call = Call(module, list(units), torch.is_grad_enabled() and not self._schedule.in_backward)
        self._running.append(call)
        for unit in units:
            self._begin_use(unit, call)
        if torch.is_grad_enabled():
            self._close_with_inputs(call, [one for one in tensors_in((args, kwargs)) if one.requires_grad])

    def _begin_use(self, unit: Unit, call: Call) -> None:
        unit.begin_use()
        if not self._schedule.in_backward:
            if self._backward:  # the first forward after a backward
                self._calls.clear()
                self._unclosed.clear()
                self._backward = 0
            self._calls[unit] += 1
            self._unclosed[unit] += call.in_graph
        self._schedule.before_forward(unit)

    def _end_call(self, _module: nn.Module, _args: object, _output: object) -> None:
        self._ended = self._running.pop()
        for unit in self._ended.units:
            unit.end_use()

    def _after_forward(self, module: nn.Module, _args: object, output: object) -> None:
        call = self._ended
        for unit in call.units:
            if not unit.uses and not self._schedule.in_backward:
                self._release_if_done(unit, module)
        if not self._running and module is self._model and not self._schedule.in_backward:
            self._end_forward()
        # The first gradient of any output marks the start of this call's backward.
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                edge = Edge()
                tensor.register_hook(partial(self._before_backward, call, edge))
                self._edges[tensor] = edge

    def _release_if_done(self, unit: Unit, module: nn.Module) -> None:
        if module in unit.modules:
            called = self._called[unit]
            called.add(module)
            if len(called) < len(unit.modules):
                return
            called.clear()
        self._schedule.after_forward(unit)

    def _end_forward(self) -> None:
        """Release the units that were gathered ahead but not used, or not used by all of their modules."""
        if self._lent is not None and not self._lent.in_graph:
            self._return_lent()
        for unit in self._units:
            self._called[unit].clear()
            if not unit.uses:
                self._schedule.after_forward(unit)

    def _on_read(self, unit: Unit) -> None:
        """Handle a read of a parameter whose unit no running call has declared: gather the unit if that is safe.

        A gather is safe where all ranks make the same reads: inside a call of the model or of a part of it, and inside
        a backward.
        """
        if self._running:
            self._running[-1].units.append(unit)
            self._begin_use(unit, self._running[-1])
        elif self._schedule.in_backward:
            self._schedule.before_backward(unit)
        else:
            part = self._called_part(sys._getframe(1))
            if part is not None:
                self._lend(unit, part)

    def _called_part(self, frame: FrameType | None) -> nn.Module | None:
        """The outermost module of the model in whose call the frame runs; None outside of any call."""
        found = None
        while frame is not None:
            if frame.f_code is _MODULE_CALL and frame.f_locals["self"] in self._parts:
                found = frame.f_locals["self"]
            frame = frame.f_back
        return found

    def _lend(self, unit: Unit, part: nn.Module) -> None:
        lent = self._lent
        if lent is not None and lent.module is not part and not lent.in_graph:
            self._end_forward()  # the previous part has no graph, so its loans end with the call of another part
        if self._lent is None:
            self._lent = Call(part, [])
        self._lent.in_graph |= torch.is_grad_enabled()
        if unit in self._lent.units:  # lent before, but a backward or a write has released it since
            self._schedule.before_forward(unit)
            return
        self._lent.units.append(unit)
        self._begin_use(unit, self._lent)

    def end_part(self) -> None:
        """End the loans to a separately called part, when no graph of it can have a backward any more.

        The units are then released together with all others.
        """
        if self._lent is not None:
            self._return_lent()

    def _return_lent(self) -> None:
        assert self._lent is not None
        for unit in self._lent.units:
            unit.end_use()
        self._lent = None

    # ---- backward ----------------------------------------------------------------------------------------------

    def _before_backward(self, call: Call, edge: Edge, grad: torch.Tensor) -> None:
        self._close(edge, grad)  # first, so that units of ended calls are released before this call's are gathered
        if self._backward != self._schedule.backwards:
            self._backward = self._schedule.backwards
            self._open.clear()
            self._graph_task = _current_graph_task()
        if call.opened_in != self._backward:
            call.opened_in = self._backward
            self._open.update(call.units)
        for unit in call.units:
            self._schedule.before_backward(unit)

    def _close_with_inputs(self, call: Call, inputs: list[torch.Tensor]) -> None:
        """Call `_after_backward` when the gradients of all inputs have arrived; never if the call has no inputs."""
        if len(inputs) > 1:
            register_multi_grad_hook(inputs, lambda _grads: self._after_backward(call))
        elif inputs:
            edge = self._edges.get(inputs[0])
            if edge is None:
                edge = self._edges[inputs[0]] = Edge()
                inputs[0].register_hook(partial(self._close, edge))
            edge.closing.append(call)

    def _close(self, edge: Edge, _grad: torch.Tensor) -> None:
        for ended in edge.closing:
            self._after_backward(ended)

    def _after_backward(self, call: Call) -> None:
        if not call.opened_in or call.opened_in != self._schedule.backwards:
            return
        call.opened_in = 0
        for unit in call.units:
            self._open[unit] -= 1
            self._unclosed[unit] -= call.in_graph
            if not unit.trainable:
                self._release_if_frozen(unit)
            elif call.in_graph and self._unclosed[unit] == 0 and not unit.grads_arrived:
                self._schedule.after_backward(unit)  # see [Note: done on every rank]

    def _release_if_frozen(self, unit: Unit) -> None:
        lent = self._lent is not None and unit in self._lent.units  # a lent unit's reader reports no gradients
        done = self._open[unit] == 0 and not lent and all(other.grads_arrived for other in self._companions[unit])
        if not unit.trainable and done:
            self._schedule.after_backward(unit)

    def _grad_hook(self, unit: Unit, index: int) -> Callable[[torch.Tensor], None]:
        def hook(param: torch.Tensor) -> None:
            if not self._schedule.in_backward:
                param.grad = None
                raise CallOrderError(
                    f"a gradient for parameter {unit.layout.segments[index].name!r} came outside of the runtime's "
                    "backward, which reduces gradients and scales the loss: call engine.backward(loss) (the drop-in) "
                    "or runtime.backward(loss) in place of loss.backward()"
                )
            complete = unit.take_grad(index, sums_locally=self._schedule.sums_locally)
            if not complete or self._may_come_again(unit):
                return
            self._schedule.after_backward(unit)
            # Frozen units in the same modules may have been kept only for these gradients.
            for other in self._beside[unit]:
                self._release_if_frozen(other)

        return hook

    def _may_come_again(self, unit: Unit) -> bool:
        """Whether gradients of the unit may arrive more than once in this backward.

        A backward inside the backward (reentrant checkpointing) delivers a gradient for each use of a parameter.
        """
        inner = _current_graph_task() != self._graph_task
        return inner and (unit.shared or self._calls[unit] > 1)

    # ---- loading weights -----------------------------------------------------------------------------------------

    def _before_load(self, module: nn.Module, _state_dict: object, prefix: str, *_others: object) -> None:
        raise ParameterReadError(
            f"load_state_dict of {type(module).__name__} at {prefix or 'the root'!r}: the weights are the runtime's "
            "and what is written here would be lost; write them in `with runtime.full_params(write=True)`, or load "
            "them before the runtime is made"
        )


def _companions(unit: Unit, units: list[Unit]) -> list[Unit]:
    """For a frozen unit: the trained units with parameters inside its modules. Empty for a trained unit."""
    if unit.trainable:
        return []
    inside = {module for own in unit.modules for module in own.modules()}
    return [other for other in units if other.trainable and not inside.isdisjoint(other.modules)]


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Every tensor in a module's arguments or result: a nesting of tensors, tuples, lists, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            yield from tensors_in(getattr(value, item.name))
