"""A unit is done at the right event of a backward, in every order of events and on every rank. Uses no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations

import pytest

from zero_runtime.backward_tracker import BackwardTracker, ModuleCall


class Rehearsal:
    """A tracker whose units are letters: upper case for trained ones with two parameters each, lower case for frozen.

    `number` is the current backward; forwards and backwards are reported as the hooks do.
    """

    def __init__(self, companions: Mapping[str, Sequence[str]] | None = None, shared: str = "") -> None:
        self.tracker: BackwardTracker[str] = BackwardTracker(dict.fromkeys("ABC", 2), companions or {}, shared)
        self.number = 0

    def call(self, units: str, *, in_graph: bool = True) -> ModuleCall[str]:
        """A call of a forward that reads these units."""
        call = ModuleCall(list(units), in_graph)
        for unit in units:
            self.tracker.read(unit, call)
        return call

    def begin(self) -> None:
        self.number += 1
        self.tracker.begin_backward(self.number)

    def opens(self, *calls: ModuleCall[str]) -> None:
        for call in calls:
            self.tracker.open(call)

    def closes(self, call: ModuleCall[str]) -> str:
        return "".join(self.tracker.close(call))

    def takes(self, *names: str, inner: bool = False) -> list[str]:
        """The units that are done after each gradient, such as `A0` for the first parameter of A."""
        return ["".join(self.tracker.take(name[0], int(name[1]), inner=inner)) for name in names]


# ---- trained units ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(permutations(["A0", "A1", "B0", "B1"])))
def test_a_trained_unit_is_done_when_the_last_of_its_gradients_arrives(order: tuple[str, ...]) -> None:
    rehearsal = Rehearsal()
    call = rehearsal.call("AB")
    rehearsal.begin()
    rehearsal.opens(call)
    last = {unit: max(order.index(f"{unit}{index}") for index in (0, 1)) for unit in "AB"}
    wanted = ["".join(unit for unit in "AB" if last[unit] == place) for place in range(4)]
    assert rehearsal.takes(*order) == wanted
    assert rehearsal.closes(call) == "", "reported already"


def test_a_parameter_without_a_gradient_counts_as_zero_when_all_calls_of_its_unit_are_closed() -> None:
    rehearsal = Rehearsal()
    first, second = rehearsal.call("A"), rehearsal.call("A")
    rehearsal.begin()
    rehearsal.opens(second)
    assert rehearsal.closes(second) == ""
    rehearsal.opens(first)
    assert rehearsal.takes("A1") == [""]
    assert rehearsal.closes(first) == "A"


def test_a_unit_without_any_gradient_is_done_at_the_same_event_as_on_the_other_ranks() -> None:
    """The calls of both ranks are the same; one rank uses no parameter of B, the other uses all."""
    events = {}
    for rank, gradients in enumerate((["B0", "B1"], [])):
        rehearsal = Rehearsal()
        before, call = rehearsal.call("A"), rehearsal.call("B")
        rehearsal.begin()
        rehearsal.opens(call)
        done = "".join(rehearsal.takes(*gradients)) + rehearsal.closes(call)
        rehearsal.opens(before)
        events[rank] = done
    assert events == {0: "B", 1: "B"}, "before the next unit is gathered"


def test_gradients_of_an_earlier_backward_do_not_count_in_the_next() -> None:
    rehearsal = Rehearsal()
    for _ in range(2):
        call = rehearsal.call("A")
        rehearsal.begin()
        rehearsal.opens(call)
        assert rehearsal.takes("A0", "A1") == ["", "A"]
        rehearsal.tracker.end_backward()
    rehearsal.begin()  # a retained graph: no forward in between
    assert rehearsal.takes("A1", "A0") == ["", "A"]


def test_a_call_that_never_had_a_backward_does_not_hold_back_the_next_step() -> None:
    rehearsal = Rehearsal()
    rehearsal.call("A")
    dropped = rehearsal.call("A")
    rehearsal.begin()
    rehearsal.opens(dropped)
    rehearsal.closes(dropped)
    rehearsal.tracker.end_backward()
    call = rehearsal.call("A")  # counts from zero again
    rehearsal.begin()
    rehearsal.opens(call)
    assert rehearsal.closes(call) == "A"


def test_a_recomputed_call_does_not_end_a_trained_unit() -> None:
    rehearsal = Rehearsal()
    call = rehearsal.call("A")
    rehearsal.begin()
    recomputed = ModuleCall(["A"])
    rehearsal.opens(call, recomputed)
    assert rehearsal.closes(recomputed) == ""
    assert rehearsal.takes("A0") == [""]
    assert rehearsal.closes(call) == "A"


def test_a_call_under_no_grad_does_not_hold_a_unit_back() -> None:
    rehearsal = Rehearsal()
    rehearsal.call("A", in_graph=False)
    call = rehearsal.call("A")
    rehearsal.begin()
    rehearsal.opens(call)
    assert rehearsal.closes(call) == "A"


def test_a_call_on_leaves_ends_frozen_units_and_no_trained_one() -> None:
    """The gradient of a leaf may come before those of the weights that were multiplied with it."""
    rehearsal = Rehearsal()
    call = rehearsal.call("Af")
    call.has_leaves = True
    other = rehearsal.call("A")
    rehearsal.begin()
    rehearsal.opens(other, call)
    assert rehearsal.closes(other) == ""
    assert rehearsal.closes(call) == "f"
    assert rehearsal.takes("A0", "A1") == ["", "A"]


# ---- reentrant checkpointing -----------------------------------------------------------------------------------------


def test_gradients_of_an_inner_backward_end_a_unit_that_one_call_reads() -> None:
    rehearsal = Rehearsal()
    rehearsal.call("A", in_graph=False)
    rehearsal.begin()
    assert rehearsal.takes("A0", "A1", inner=True) == ["", "A"]


@pytest.mark.parametrize(("calls", "shared"), [(2, ""), (1, "A")])
def test_gradients_of_an_inner_backward_may_come_again_if_a_parameter_is_used_several_times(
    calls: int, shared: str
) -> None:
    rehearsal = Rehearsal(shared=shared)
    for _ in range(calls):
        rehearsal.call("A", in_graph=False)
    rehearsal.begin()
    assert rehearsal.takes("A0", "A1", "A0", "A1", inner=True) == [""] * 4
    assert rehearsal.takes("A0") == ["A"], "outside, a gradient arrives once"


# ---- frozen units ----------------------------------------------------------------------------------------------------


def test_a_frozen_unit_is_done_when_no_open_call_reads_it_and_again_after_an_earlier_call() -> None:
    rehearsal = Rehearsal()
    first, second, third = rehearsal.call("f"), rehearsal.call("f"), rehearsal.call("f")
    rehearsal.begin()
    rehearsal.opens(third, second)
    assert rehearsal.closes(third) == ""
    assert rehearsal.closes(second) == "f"
    rehearsal.opens(first)
    assert rehearsal.closes(first) == "f"


def test_opening_a_call_again_counts_once() -> None:
    """A call with several outputs opens with the gradient of each of them."""
    rehearsal = Rehearsal()
    call = rehearsal.call("f")
    rehearsal.begin()
    rehearsal.opens(call, call, call)
    assert rehearsal.closes(call) == "f"


def test_a_frozen_unit_is_kept_for_the_gradients_of_its_companions() -> None:
    rehearsal = Rehearsal({"f": "AB"})
    call = rehearsal.call("fAB")
    rehearsal.begin()
    rehearsal.opens(call)
    assert rehearsal.takes("A0", "A1", "B0") == ["", "A", ""]
    rehearsal.tracker.take("B", 1, inner=False)
    assert rehearsal.closes(call) == "f"


def test_the_last_gradient_of_a_companion_releases_the_frozen_units_that_waited_for_it() -> None:
    rehearsal = Rehearsal({"f": "A", "g": "AB"})
    call = rehearsal.call("fg")
    rehearsal.begin()
    rehearsal.opens(call)
    assert rehearsal.closes(call) == ""
    assert rehearsal.takes("A0", "A1", "B0", "B1") == ["", "Af", "", "Bg"]


def test_a_companion_that_is_done_without_all_its_gradients_releases_its_frozen_units_too() -> None:
    """So the rank that leaves a parameter unused releases the same units, and gathers the same ones again."""
    rehearsal = Rehearsal({"f": "A"})
    first, second = rehearsal.call("fA"), rehearsal.call("f")
    rehearsal.begin()
    rehearsal.opens(second)
    assert rehearsal.closes(second) == "", "the companion's gradients are missing"
    rehearsal.opens(first)
    assert rehearsal.takes("A0") == [""]
    assert rehearsal.closes(first) == "Af"


def test_a_borrowed_frozen_unit_is_kept_until_the_borrowing_call_is_closed() -> None:
    rehearsal = Rehearsal()
    owner, borrower = rehearsal.call("f"), rehearsal.call("A")
    borrower.units.append("f")
    rehearsal.tracker.read("f", borrower)
    rehearsal.begin()
    rehearsal.opens(borrower, owner)
    assert rehearsal.closes(owner) == ""
    assert rehearsal.closes(borrower) == "Af"


def test_a_lent_frozen_unit_is_kept_until_the_loans_end() -> None:
    rehearsal = Rehearsal()
    rehearsal.tracker.lend("f")
    first, second = rehearsal.call("f"), rehearsal.call("f")
    rehearsal.begin()
    rehearsal.opens(second)
    assert rehearsal.closes(second) == ""
    rehearsal.tracker.end_loans()
    rehearsal.opens(first)
    assert rehearsal.closes(first) == "f"


def test_a_lent_trained_unit_is_done_by_its_gradients_and_not_by_its_calls() -> None:
    """The loan is itself a call in the graph, and nothing reports its end."""
    rehearsal = Rehearsal()
    rehearsal.tracker.lend("A")
    rehearsal.call("A")
    call = rehearsal.call("A")
    rehearsal.begin()
    rehearsal.opens(call)
    assert rehearsal.closes(call) == ""
    assert rehearsal.takes("A0", "A1") == ["", "A"]


# ---- backwards that overlap, or that the runtime did not start -------------------------------------------------------


def test_a_call_that_another_backward_opened_is_not_closed() -> None:
    rehearsal = Rehearsal()
    call = rehearsal.call("Af")
    assert rehearsal.closes(call) == "", "never opened"
    rehearsal.begin()
    rehearsal.opens(call)
    rehearsal.begin()
    assert rehearsal.closes(call) == ""
    rehearsal.opens(call)
    assert rehearsal.closes(call) == "Af"
    assert rehearsal.closes(call) == "", "closed already"


def test_before_the_first_backward_no_call_opens() -> None:
    rehearsal = Rehearsal()
    call = rehearsal.call("Af")
    rehearsal.opens(call)
    assert rehearsal.closes(call) == ""


def test_a_backward_that_the_runtime_did_not_start_ends_frozen_units_only() -> None:
    """autograd.grad after a step: it has the number of the last backward."""
    rehearsal = Rehearsal({"f": "A"})
    rehearsal.begin()
    rehearsal.tracker.end_backward()
    call = rehearsal.call("Af")
    assert rehearsal.tracker.backward == 0
    rehearsal.tracker.begin_backward(rehearsal.number)
    rehearsal.opens(call)
    assert rehearsal.closes(call) == "f"


def test_a_call_that_such_a_backward_closed_may_have_its_gradients_in_the_next() -> None:
    """autograd.grad with a retained graph, between the two forwards of a loss."""
    rehearsal = Rehearsal()
    rehearsal.begin()
    rehearsal.tracker.end_backward()
    first = rehearsal.call("A")
    rehearsal.tracker.begin_backward(rehearsal.number)
    rehearsal.opens(first)
    assert rehearsal.closes(first) == ""
    second = rehearsal.call("A")
    rehearsal.begin()
    rehearsal.opens(second)
    assert rehearsal.closes(second) == "", "the first call's gradients are missing"
    rehearsal.opens(first)
    assert rehearsal.closes(first) == "A"
