"""A speculative step: the order of drafts, the order in which they become current, and when they are not used."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Event
from types import SimpleNamespace
from typing import cast

import pytest

from zero_runtime.offload.speculation import Guess, SpeculativeTier
from zero_runtime.offload.tier import StateTier, Update
from zero_runtime.unit import Unit


class RecordedTier(StateTier):
    """Records the units of each call, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str]]] = []

    def _record(self, call: str, units: Sequence[Unit]) -> None:
        self.calls.append((call, [unit.name for unit in units]))

    def update(self, units: Sequence[Unit], update: Update) -> None:
        self._record("update", units)

    def draft(self, units: Sequence[Unit], update: Update, ready: Callable[[Unit], None]) -> None:
        for unit in units:
            ready(unit)
        self._record("draft", units)

    def adopt(self, units: Sequence[Unit], drafted: Future[None]) -> None:
        drafted.result()
        self._record("adopt", units)


UNITS = [cast("Unit", SimpleNamespace(name=name, grad_sent=Event())) for name in ("first", "second", "third")]
EXPECTED = Update((0.1,), 1.0, lambda unit, shards: None)


def step(update: Update, *, sent: Sequence[Unit] = UNITS) -> list[tuple[str, list[str]]]:
    """The calls of the tier in a step that ends with `update`, when the gradients of `sent` have arrived."""
    tier = RecordedTier()
    speculative = SpeculativeTier(tier)
    speculative.expect(UNITS, EXPECTED)
    for unit in sent:
        unit.grad_sent.set()
    speculative.update(UNITS, update)
    return tier.calls


def test_drafts_follow_the_gradients_and_are_adopted_in_the_order_of_the_next_forward() -> None:
    assert step(EXPECTED) == [("draft", ["third", "second", "first"]), ("adopt", ["first", "second", "third"])]


@pytest.mark.parametrize("other", [Update((0.2,), 1.0, EXPECTED.apply), Update((0.1,), 0.5, EXPECTED.apply)])
def test_after_another_update_than_expected_no_draft_is_adopted(other: Update) -> None:
    assert step(other)[-1] == ("update", ["first", "second", "third"])


def test_a_draft_without_all_gradients_is_discarded() -> None:
    assert step(EXPECTED, sent=UNITS[1:]) == [("update", ["first", "second", "third"])]


def test_a_cancelled_draft_leaves_no_thread_and_no_traceback_with_tensors() -> None:
    """A thread that ends later, or the frames of a traceback, would keep the tensors of the step alive."""
    for unit in UNITS:
        unit.grad_sent.clear()
    guess = Guess(RecordedTier(), UNITS, EXPECTED)
    guess.drafted.add_done_callback(lambda _: time.sleep(0.2))  # in the thread, after the result is known
    guess.cancel()
    assert not guess.thread.is_alive()
    error = guess.drafted.exception()
    assert error is not None
    assert "cancel" not in [frame.name for frame in traceback.extract_tb(error.__traceback__)]
