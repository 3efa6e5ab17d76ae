"""The backwards of a step: their beginning and end, how many there were, and whether the step's gradients are complete.

A step ends after the expected number of backwards, or where the caller says so. After that its gradients are reduced
and wait for the update; a caller that says for each backward whether it is the last may still add to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from zero_runtime.collectives import Collectives
from zero_runtime.errors import CallOrderError
from zero_runtime.module_hooks import ModuleHooks
from zero_runtime.schedule import Schedule
from zero_runtime.shared_backward import refuse_foreign
from zero_runtime.unit import Unit
from zero_runtime.users_backward import UsersBackward, UsersBackwards


class Collaborators(NamedTuple):
    """What takes part in a backward. guess: called before a backward that completes the gradients."""

    units: list[Unit]
    schedule: Schedule
    hooks: ModuleHooks
    collectives: Collectives
    device: torch.device
    scale: Callable[[], float]


class StepBackwards:
    """The state of a step between its first backward and its update.

    expected: backwards of a step, unless each one says whether it is the last.
    """

    def __init__(self, expected: int, parts: Collaborators) -> None:
        self._expected = expected
        self._parts = parts
        self.count = 0  # backwards since the last step, of this runtime
        self.synced = True  # False inside no_sync
        self.has_foreign = False  # the next step has gradients that no backward of this runtime computed
        self._is_complete = False  # the last backward of the step was called
        self._is_unreduced = False  # the latest backward ran inside no_sync
        self.failed = False  # a backward ended with an error, so gradients are missing
        self._users: UsersBackwards | None = None
        parts.hooks.follow_runtimes(self._take_foreign)

    # ---- one backward --------------------------------------------------------------------------------------------

    def check_begin(self, last: bool | None) -> None:
        """Raise CallOrderError if no backward may begin now."""
        self._check_failed("backward")
        if self._is_complete and last is None:
            raise CallOrderError(
                f"backward: call number {self.count + 1} of this step, expected step() after {self.count}; give "
                "RuntimeSettings the micro_batches that you use"
            )

    def begin(self, last: bool | None) -> None:
        """A backward begins: count it. last: whether it is the step's last; None: if it is the expected one."""
        units, schedule, _, collectives, device, _ = self._parts
        if self._is_complete:
            for unit in units:
                unit.reopen_grad()
        self.count += 1
        self._is_complete = self.count == self._expected if last is None else last
        self._is_unreduced = not self.synced
        collectives.journal.begin("backward")
        order = schedule.own_reduction_order
        if order is not None:  # before the first backward
            schedule.set_reduction_order(collectives.order_of_rank_0(order, device))
        schedule.begin_backward(boundary=self._is_complete, synced=self.synced)

    def end(self) -> None:
        """The backward has ended: issue the remaining reductions and release the parameters."""
        self._parts.hooks.end_graphs()
        self._parts.schedule.end_backward()
        self._parts.collectives.journal.begin("forward")

    def abandon(self) -> None:
        """The backward has ended with an error: release the parameters. The step begins anew after `clear`."""
        self.failed = True
        self._parts.hooks.end_graphs()
        self._parts.schedule.abandon_backward()
        self._parts.collectives.journal.begin("forward")

    # ---- backwards that this runtime did not start -----------------------------------------------------------------

    def follow_users(self, begin: Callable[[], UsersBackward]) -> None:
        """Take part in backwards that the user starts with `tensor.backward()`, which are errors without this call.

        begin: called when one begins. It may raise, which ends that backward. The loss is not in the step's report.
        """

        def begun() -> UsersBackward:
            found = begin()
            self.check_begin(found.last)
            self.begin(found.last)
            return found

        self._users = UsersBackwards(begun, self.end)
        self._parts.hooks.follow_users(self._users)

    def end_failed(self) -> None:
        """Call it outside of backwards: a backward of the user's that ended with an error is abandoned."""
        if self._users is not None and self._users.failed:
            self._users.parts = None
            self.abandon()

    def _take_foreign(self, name: str, scale: float) -> None:
        """Called when the backward of another runtime has a gradient for a parameter here, which is then added."""
        if self._is_complete or scale != self._parts.scale():
            refuse_foreign(name, scale, self._parts.scale())
        self.has_foreign = True

    def take_written(self, parts: int) -> None:
        """Take what was written into `param.grad` by hand as this rank's gradients, divided by `parts`.

        CallOrderError if backwards have left gradients, which it would have to replace.
        """
        with torch._C.DisableTorchFunctionSubclass():  # as in agreed_parameters.py
            written = [
                (unit, index, param.grad)
                for unit in self._parts.units
                if unit.trainable
                for index, param in enumerate(unit.params)
                if param.grad is not None
            ]
        for unit, index, grad in written:
            if self.has_gradients:
                raise CallOrderError(
                    f"parameter {unit.layout.segments[index].name!r}: expected no gradient in .grad after a backward, "
                    "found one that was written by hand; it has no effect there: write gradients in place of a backward"
                )
            unit.gradients.take(index, grad / parts, sums_locally=True)
            unit.params[index].grad = None
        self.has_foreign = self.has_foreign or bool(written)

    # ---- the step ------------------------------------------------------------------------------------------------

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients since the last step, also of other runtimes' backwards."""
        return self.count > 0 or self.has_foreign

    def finish(self) -> None:
        """Reduce the gradients that are left on each rank (by no_sync, other runtimes or by hand): the step may follow.

        Every rank must call it. A no-op if there are none.
        """
        self._check_failed("step")
        if not self._is_complete or self._is_unreduced:
            self.begin(last=True)
            self.end()

    def check_step(self) -> None:
        """Raise CallOrderError if the step has not all its gradients."""
        self._check_failed("step")
        if not self._is_complete:
            raise CallOrderError(
                f"step: expected {self._expected} backward calls since the last step, found {self.count}"
            )
        if self._is_unreduced:
            raise CallOrderError("step: the last backward ran inside no_sync; expected it outside, to be reduced")

    def _check_failed(self, call: str) -> None:
        if self.failed:
            raise CallOrderError(
                f"{call}: the last backward ended with an error, so gradients of this step are missing; call "
                "zero_grad(), which drops the others, and begin the step anew with a forward"
            )

    def clear(self) -> None:
        """The gradients were dropped: the next backward is the first of a step."""
        self.count, self.has_foreign, self._is_complete, self.failed = 0, False, False, False
