"""The speculative step: offloaded units are updated during backward, before the norm of the gradients is known.

[Note: guessing]
When the last backward of a step begins, the guess is that nothing will be clipped, that all gradients are finite and
that the step has the expected rate. Each unit is updated when its gradient has arrived, in a second copy of its shards
(a draft). If the guess was right, the drafts become current. If it was wrong, they are discarded, and the step updates
the units as usual; this is exact, because the current copy was never written.

Only this file knows when to guess and when drafts are used; a tier writes them and can make them current.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from threading import Thread

import torch

from zero_runtime.offload.tier import StateTier, Stored, Update
from zero_runtime.unit import Unit


class _Cancelled(Exception):
    """The draft will not be used."""


class Guess:
    """One update that is drafted in a separate thread."""

    def __init__(self, tier: StateTier, units: Sequence[Unit], update: Update) -> None:
        self.update = update
        self.units = list(reversed(units))  # in this order their gradients arrive
        self._cancelled = False
        for unit in self.units:
            unit.grad_sent.clear()
        self.drafted: Future[None] = Future()
        # A daemon, since gradients never arrive after an error in backward: it must not keep the process from ending.
        self.thread = Thread(target=self._draft, args=(tier,), name="speculation", daemon=True)
        self.thread.start()

    def _draft(self, tier: StateTier) -> None:
        try:
            tier.draft(self.units, self.update, self._wait_for_grad)
        except BaseException as error:
            self.drafted.set_exception(error)
        else:
            self.drafted.set_result(None)

    def _wait_for_grad(self, unit: Unit) -> None:
        unit.grad_sent.wait()
        if self._cancelled:
            raise _Cancelled

    @property
    def has_all_grads(self) -> bool:
        return all(unit.grad_sent.is_set() for unit in self.units)

    def cancel(self) -> None:
        """Block until the thread has ended, without waiting for gradients. Raises the error of a draft."""
        self._cancelled = True
        for unit in self.units:
            unit.grad_sent.set()
        self.thread.join()
        # Not `result`, which would raise the cancellation here: its traceback would keep the tensors of this step.
        error = self.drafted.exception()
        if error is not None and not isinstance(error, _Cancelled):
            raise error


class SpeculativeTier(StateTier):
    """A tier whose units are updated during backward if the update is expected; see [Note: guessing]."""

    def __init__(self, tier: StateTier) -> None:
        self._tier = tier
        self._guess: Guess | None = None

    def expect(self, units: Sequence[Unit], update: Update | None = None) -> None:
        if update is not None:
            assert self._guess is None, "a step guesses once"
            self._guess = Guess(self._tier, units, update)
        elif self._guess is None:
            self._tier.expect(units)

    def forget(self) -> None:
        self.reject()
        self._tier.forget()

    def update(self, units: Sequence[Unit], update: Update) -> None:
        if not self.confirm(update):
            self._tier.update(units, update)

    def confirm(self, update: Update) -> bool:
        """Use the drafts if they were made by an equal update; return whether they were."""
        guess, self._guess = self._guess, None
        if guess is None:
            return False
        if guess.update != update or not guess.has_all_grads:
            guess.cancel()
            return False
        self._tier.adopt(guess.units[::-1], guess.drafted)
        return True

    def reject(self) -> None:
        """Discard the drafts."""
        guess, self._guess = self._guess, None
        if guess is not None:
            guess.cancel()

    def resident(self, unit: Unit, *, writes: bool, fresh: bool = False) -> AbstractContextManager[None]:
        if writes:
            self.reject()  # the drafts were made from other values
        return self._tier.resident(unit, writes=writes, fresh=fresh)

    def close(self) -> None:
        with suppress(Exception):  # already reported, or from a step that was never taken
            self.reject()
        self._tier.close()

    # ---- the same as in the tier ---------------------------------------------------------------------------------

    @property
    def scratch_bytes(self) -> int:
        return self._tier.scratch_bytes

    def reader(self, unit: Unit, state: str) -> Callable[[int, int], torch.Tensor] | None:
        return self._tier.reader(unit, state)

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        return self._tier.tensors()

    def stored(self, unit: Unit) -> dict[str, Stored]:
        return self._tier.stored(unit)
