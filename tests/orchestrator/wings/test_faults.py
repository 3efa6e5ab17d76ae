from __future__ import annotations

import pytest

from orchestrator.wings.faults import VARIABLE, Faults, InjectedFault


def test_nothing_happens_without_the_variable() -> None:
    Faults.from_env({}).at_step(0, 0)


def test_a_fault_occurs_only_at_its_step_and_on_its_rank() -> None:
    faults = Faults.from_env({VARIABLE: "raise@step3:rank1"})
    for step, rank in ((3, 0), (2, 1), (4, 1)):
        faults.at_step(step, rank)
    with pytest.raises(InjectedFault, match="rank 1 at step 3"):
        faults.at_step(3, 1)


@pytest.mark.parametrize("text", ["hang@step7:rank0", "hang@step0:rank0", "slow@step1:rank2"])
def test_a_fault_that_can_never_occur_is_reported_with_the_valid_ranges(text: str) -> None:
    told = Faults.from_env({VARIABLE: text}).problem(ranks=2, steps=6)
    assert told.startswith("ZLAB_FAULT: expected a rank from 0 to 1 and a step from 1 to 6, found " + text)


@pytest.mark.parametrize("text", ["", "hang@step1:rank0", "raise@step6:rank1"])
def test_a_fault_that_can_occur_is_not_reported(text: str) -> None:
    assert Faults.from_env({VARIABLE: text}).problem(ranks=2, steps=6) == ""


def test_a_slow_rank_is_late_by_as_much_as_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = list[float]()
    monkeypatch.setattr("time.sleep", slept.append)
    for text in ("slow@step2:rank0:7.5ms", "slow@step2:rank0"):
        faults = Faults.from_env({VARIABLE: text})
        for step, rank in ((1, 0), (2, 1), (2, 0), (3, 0)):
            faults.at_step(step, rank)
    assert slept == [0.0075, 0.0075, 1.0, 1.0]


@pytest.mark.parametrize(
    "text", ["raise", "boom@step3:rank1", "raise@step:rank1", "raise@step3:rank1 ", "hang@step3:rank1:7ms"]
)
def test_a_fault_that_cannot_be_parsed_is_refused_with_the_expected_form(text: str) -> None:
    with pytest.raises(ValueError, match=r"raise\|sigkill\|hang\|oom\|slow@step3:rank1"):
        Faults.from_env({VARIABLE: text})
