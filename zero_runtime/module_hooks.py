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
when the next backward has ended. Units that a backward with create_graph=True reads are lent in the same way, because
the graph that it records reads them again.
Backward: a unit is gathered when the gradient of an output of a call that read it arrives. backward_tracker.py decides
when a unit is done; the hooks report calls and gradients to it, and release and reduce the units that it names.

[Note: hidden outputs]
A call may leave results where no search finds them: in an object of the model's own, an attribute, a closure, a
generator. Autograd numbers its nodes in the order in which they are made and runs the last first. So no node of a call
runs before the gradient of an output arrives, if that output is the last node that the call made. If none of the found
outputs is, the units of the call stay gathered until the next backward has ended. From the next forward on they are
tracked at the modules that own their parameters, which nearly always return tensors: the calls of these read the unit,
and the modules that bound it only keep it gathered, so that it is gathered once in a forward as before. A call may hide
results on one rank alone (`if rank == 0`), so a rank takes part in each gather that it would otherwise have needed.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import filterfalse
from operator import attrgetter
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from zero_runtime.backward_tracker import BackwardTracker, ModuleCall
from zero_runtime.compiled_models import untraced_if_compiled
from zero_runtime.errors import CallOrderError, ParameterReadError, ZeroError
from zero_runtime.graph_entries import CallNodes, units_entered
from zero_runtime.nested_tensors import tensors_in
from zero_runtime.parameter_reads import unwatch_parameters, watch_parameters
from zero_runtime.schedule import Schedule
from zero_runtime.shared_backward import SharedBackward, backward_under_way
from zero_runtime.skipped_modules import optional_units
from zero_runtime.unit import Unit
from zero_runtime.users_backward import UsersBackwards, receives_gradient

_current_graph_task = torch._C._current_graph_task_id
_count_nodes = torch.autograd._get_sequence_nr
_is_leaf = attrgetter("is_leaf")
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
class Edge:
    """A tensor between calls. `closing`: the calls whose backward has ended when the tensor's gradient arrives."""

    closing: list[ModuleCall[Unit]] = field(default_factory=list)


class ModuleHooks:
    """Registers the hooks of all units on construction; `remove` removes them all."""

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        schedule: Schedule,
    ) -> None:
        self._take_foreign: Callable[[str, float], None] | None = None
        self._compare_ranks: Callable[[], None] | None = None
        self._joined: SharedBackward | None = None  # the backward of another runtime that is under way here
        self._users: UsersBackwards | None = None  # backwards that the user starts; None: they are errors
        self._model = model
        self._units = units
        self._schedule = schedule
        self._tracker = BackwardTracker(
            {unit: len(unit.params) for unit in units if unit.trainable},
            {unit: _companions(unit, units) for unit in units if not unit.trainable},
            [unit for unit in units if unit.shared],
            lambda unit, arrived: any(
                receives_gradient(param) for index, param in enumerate(unit.params) if index not in arrived
            ),
        )
        self._running: list[ModuleCall[Unit]] = []
        self._ended: ModuleCall[Unit] = ModuleCall([])  # the call that ended last
        self._called: dict[Unit, set[nn.Module]] = {unit: set() for unit in units}  # since the unit's last release
        self._read_by: dict[nn.Module, list[Unit]] = {model: []}  # the units that a call of the module reads
        # See [Note: hidden outputs].
        self._finds_hidden = schedule.releases_in_forward
        self._hiding: set[Unit] = set()  # kept for hidden outputs, and not needed by the backward so far
        self._spans: list[CallNodes] = []  # see graph_entries.py; since the last backward
        self._found: set[int] = set()  # the nodes of their outputs
        self._kept_by: dict[nn.Module, list[Unit]] = {}  # the units that a call of the module only keeps gathered
        self._keepers: Counter[Unit] = Counter()  # running calls that keep the unit
        self._graph_task = -1  # torch's number of the latest backward
        self._edges: WeakIdKeyDictionary = WeakIdKeyDictionary()
        # The separately called part and its loans, see [Note: the life of a unit in a pass].
        self._part: nn.Module | None = None
        self._lent: ModuleCall[Unit] | None = None
        self._parts = set(model.modules())
        self._untraced = untraced_if_compiled(model)
        self._handles = list(self._attach())
        watch_parameters(model, units, self._on_read)

    def follow_runtimes(self, take_foreign: Callable[[str, float], None]) -> None:
        """Call it with a parameter's name and the loss scale before a gradient of a backward that another runtime
        started is added. It may raise."""
        self._take_foreign = take_foreign

    def compare_ranks_by(self, compare: Callable[[], None]) -> None:
        """Call it after each forward of the full model without gradients."""
        self._compare_ranks = compare

    def follow_users(self, users: UsersBackwards) -> None:
        """Take part in backwards that the user starts."""
        self._users = users

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.end_graphs()
        unwatch_parameters(self._model, self._units)

    def _attach(self) -> Iterator[RemovableHandle]:
        for unit in self._units:
            for module in unit.modules:
                self._read_by.setdefault(module, []).append(unit)
            if unit.trainable:
                for index, param in enumerate(unit.params):
                    yield param.register_post_accumulate_grad_hook(self._grad_hook(unit, index))
        if self._finds_hidden:
            self._schedule.reduced_last = optional = optional_units(self._model, self._units)
            self._read_by[self._model] += [unit for unit in optional if self._model not in unit.modules]
        for module, units in self._read_by.items():
            yield from self._attach_calls(module, units)
        for module in self._model.modules():
            if module._parameters:
                yield module.register_load_state_dict_pre_hook(RuntimeHook(self._before_load))

    def _attach_calls(self, module: nn.Module, units: list[Unit]) -> Iterator[RemovableHandle]:
        untraced = self._untraced
        yield module.register_forward_pre_hook(RuntimeHook(untraced(self._before_forward), units), with_kwargs=True)
        # The first runs even if forward raises, as a recomputation does to stop early. The second waits for
        # collectives, so it must not run on a rank whose forward failed.
        yield module.register_forward_hook(RuntimeHook(untraced(self._end_call)), always_call=True)
        yield module.register_forward_hook(RuntimeHook(untraced(self._after_forward)))

    # ---- forward -----------------------------------------------------------------------------------------------

    def _before_forward(
        self, units: list[Unit], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        call = ModuleCall(list(units), torch.is_grad_enabled() and not self._schedule.in_backward, _count_nodes())
        self._running.append(call)
        for unit in self._kept_by.get(module, ()):
            self._keepers[unit] += 1
            self._schedule.before_unit_forward(unit)
        for unit in units:
            self._begin_use(unit, call)
        if torch.is_grad_enabled():
            self._close_with_inputs(call, [one for one in tensors_in((args, kwargs)) if one.requires_grad])

    def _begin_use(self, unit: Unit, call: ModuleCall[Unit]) -> None:
        unit.begin_use()
        if not self._schedule.in_backward:
            self._tracker.read(unit, call)
        self._schedule.before_unit_forward(unit)

    def _end_call(self, module: nn.Module, _args: object, _output: object) -> None:
        self._ended = self._running.pop()
        for unit in self._ended.units:
            unit.end_use()
        for unit in self._kept_by.get(module, ()):
            self._keepers[unit] -= 1

    def _after_forward(self, module: nn.Module, _args: object, output: object) -> None:
        call, last_node = self._ended, _count_nodes() - 1
        hides = self._finds_hidden and call.in_graph and last_node >= call.nodes_before
        if hides:
            self._spans.append(CallNodes(call.nodes_before, last_node, call.units, not self._running))
        # The first gradient of any output marks the start of this call's backward.
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                edge = Edge()
                tensor.register_hook(partial(self._before_backward, call, edge))
                self._edges[tensor] = edge
                if self._finds_hidden and tensor.grad_fn is not None:
                    number = tensor.grad_fn._sequence_nr()
                    self._found.add(number)
                    hides = hides and number < last_node
        if hides and call.units:
            self._find_hidden(call.units)
        if self._schedule.in_backward:
            return
        for unit in (*call.units, *self._kept_by.get(module, ())):
            if not unit.uses and not (self._kept_by and self._keepers[unit]):
                self._release_if_done(unit, module)
        if not self._running and module is self._model:
            self._schedule.end_forward()
            self.release_unused()
            if self._compare_ranks is not None and not torch.is_grad_enabled():
                self._compare_ranks()

    def _release_if_done(self, unit: Unit, module: nn.Module) -> None:
        if module in unit.modules:
            called = self._called[unit]
            called.add(module)
            if len(called) < len(unit.modules):
                return
            called.clear()
        self._schedule.after_unit_forward(unit)

    def release_unused(self) -> None:
        """Release the units that were gathered ahead but not used, or not used by all of their modules."""
        if self._lent is not None and not self._lent.in_graph:
            self._return_lent()
        for unit in self._units:
            self._called[unit].clear()
            if not unit.uses:
                self._schedule.after_unit_forward(unit)

    def _on_read(self, unit: Unit) -> None:
        """Handle a read of a parameter whose unit no running call has declared: gather the unit if that is safe.

        A gather is safe where all ranks make the same reads: inside a call of the model or of a part of it, and inside
        a backward.
        """
        if self._running:
            self._running[-1].units.append(unit)
            self._begin_use(unit, self._running[-1])
        elif self._schedule.in_backward:
            self._schedule.before_unit_backward(unit)
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
        if self._lent is not None and self._part is not part and not self._lent.in_graph:
            self.release_unused()  # the previous part has no graph, so its loans end with the call of another part
        if self._lent is None:
            self._part, self._lent = part, ModuleCall([])
        self._lent.in_graph |= torch.is_grad_enabled()
        if unit in self._lent.units:  # lent before, but a backward or a write has released it since
            self._schedule.before_unit_forward(unit)
            return
        self._lent.units.append(unit)
        self._tracker.lend(unit)
        self._begin_use(unit, self._lent)

    def end_graphs(self) -> None:
        """Called when a backward or a step has ended: no more gradients arrive.

        Ends the loans to a separately called part, since no graph of it can have a backward any more; the units are
        then released together with all others.
        """
        self._tracker.end_backward()
        self._spans.clear()
        self._found.clear()
        if self._lent is not None:
            self._return_lent()

    def _return_lent(self) -> None:
        assert self._lent is not None
        for unit in self._lent.units:
            unit.end_use()
        self._tracker.end_loans()
        self._hiding.clear()
        self._part = self._lent = None

    # ---- backward ----------------------------------------------------------------------------------------------

    def _join(self) -> None:
        """Take part in the backward of another runtime, if there is one, as in one inside no_sync; or in the user's."""
        self._joined = backward_under_way()
        if self._joined is not None:
            self._schedule.begin_backward(boundary=False, synced=False)
            self._joined.ends.append(self._leave)
        elif self._users is not None:
            self._users.join(self._units)

    def _leave(self) -> None:
        self._joined = None
        self.end_graphs()
        self._schedule.end_backward()

    def enter(self, loss: torch.Tensor) -> None:
        """Called when the runtime's backward of a loss has begun: gather what no gradient of an output announces."""
        units = units_entered(loss.grad_fn, self._spans, self._found) if self._spans else []
        for unit in units:
            self._schedule.before_unit_backward(unit)
        if units:
            self._keep(units)

    def _begin_backward(self) -> None:
        """Called before the tracker hears of an event that may be the first of a backward, which has no hook."""
        if self._tracker.backward != self._schedule.backwards:
            self._tracker.begin_backward(self._schedule.backwards)
            self._graph_task = _current_graph_task()

    def _before_backward(self, call: ModuleCall[Unit], edge: Edge, grad: torch.Tensor) -> None:
        if not self._schedule.in_backward:
            self._join()
        self._close(edge, grad)  # first, so that units of ended calls are released before this call's are gathered
        self._begin_backward()
        self._tracker.open(call)
        for unit in call.units:
            if unit in self._hiding:
                self._hiding.discard(unit)
                unit.parameters.join_gather()
            self._schedule.before_unit_backward(unit)
        if torch.is_grad_enabled():  # create_graph: autograd records this backward, whose own backward has no hooks
            self._keep(call.units)

    def _keep(self, units: list[Unit]) -> None:
        """Keep the units gathered until the next backward of the runtime has ended."""
        if self._lent is None:
            self._part, self._lent = self._model, ModuleCall([])
        self._lent.in_graph = True
        for unit in units:
            if unit not in self._lent.units:
                self._lent.units.append(unit)
                self._tracker.lend(unit)
                unit.begin_use()

    def _find_hidden(self, units: list[Unit]) -> None:
        """Units are read by results that were not found: see [Note: hidden outputs]."""
        self._keep(units)
        self._hiding.update(units)
        for unit in units:
            own = set(map(id, unit.params))
            owners = [one for one in self._model.modules() if not own.isdisjoint(map(id, one._parameters.values()))]
            for module in unit.modules:
                if module not in owners and unit in self._read_by[module]:
                    self._read_by[module].remove(unit)
                    self._kept_by.setdefault(module, []).append(unit)
            for module in owners:
                if module not in self._read_by:
                    self._handles += self._attach_calls(module, self._read_by.setdefault(module, []))
                if unit not in self._read_by[module]:
                    self._read_by[module].append(unit)

    def _close_with_inputs(self, call: ModuleCall[Unit], inputs: list[torch.Tensor]) -> None:
        """Call `_after_backward` when the gradients of all inputs have arrived; never if the call has no inputs.

        Leaves count only if there are no others, see [Note: done on every rank] in backward_tracker.py.
        """
        computed = list(filterfalse(_is_leaf, inputs))  # without a Python call for each input
        call.has_leaves = not computed
        inputs = computed or inputs
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

    def _after_backward(self, call: ModuleCall[Unit]) -> None:
        self._begin_backward()
        for unit in self._tracker.close(call):
            self._schedule.after_unit_backward(unit)

    def _grad_hook(self, unit: Unit, index: int) -> Callable[[torch.Tensor], None]:
        def hook(param: torch.Tensor) -> None:
            if not self._schedule.in_backward:
                self._join()
            if not self._schedule.in_backward:
                param.grad = None
                raise CallOrderError(
                    f"a gradient for parameter {unit.layout.segments[index].name!r} came outside of the runtime's "
                    "backward, which reduces gradients and scales the loss: call runtime.backward(loss) in place of "
                    "loss.backward()"
                )
            if self._joined is not None and self._take_foreign is not None:
                try:
                    self._take_foreign(unit.layout.segments[index].name, self._joined.scale)
                except ZeroError:
                    param.grad = None
                    raise
            if self._users is not None and self._users.parts is not None and param.grad is not None:
                param.grad /= self._users.parts
            unit.take_grad(index, sums_locally=self._schedule.sums_locally)
            self._begin_backward()
            inner = _current_graph_task() != self._graph_task  # a backward inside the backward has its own number
            for done in self._tracker.take(unit, index, inner=inner):
                self._schedule.after_unit_backward(done)

        return hook

    # ---- loading weights -----------------------------------------------------------------------------------------

    def _before_load(self, module: nn.Module, _state_dict: object, prefix: str, *_others: object) -> None:
        raise ParameterReadError(
            f"load_state_dict of {type(module).__name__} at {prefix or 'the root'!r}: the weights are the runtime's "
            "and what is written here would be lost; write them in `with runtime.full_params(write=True)`, or load "
            "them before the runtime is made"
        )


def _companions(unit: Unit, units: list[Unit]) -> list[Unit]:
    """The trained units with parameters inside a frozen unit's modules."""
    inside = {module for own in unit.modules for module in own.modules()}
    return [other for other in units if other.trainable and not inside.isdisjoint(other.modules)]
