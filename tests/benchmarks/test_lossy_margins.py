"""Lossy rows stay near plain PyTorch on a real text, the verdict can say that one does not, and bytes have a formula.

The long form trains a cut of benchmarks/lossy_margins.py: 100 steps of one seed, whose schedule is compressed to them.
One seed has no interval, so the difference alone is compared with CUT, a share of what the oracle learns.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from harness.ranks import run_alone, run_ranks

from benchmarks.lossy_margins import OPEN, OUTSIDE, WITHIN, Difference, difference_of, judged, learned
from benchmarks.lossy_rows import COARSE, ORACLES, ROWS, WARMUP, LossyTask, Trained, train_oracle, train_row
from zero_runtime.kernels import wire_format
from zero_runtime.kernels.wire_format import dequantise_, quantise_
from zero_runtime.unit_gradients import UnitGradients

CUT = LossyTask(steps=100, validation_batches=16)
MARGIN = 0.03
CONTROL = "control: half the rate"
BY_WORLD = {world: [name for name, row in ROWS.items() if row.world == world] for world in (2, 4)}


# ---- the verdict -----------------------------------------------------------------------------------------------------


def made(validation: float, losses: list[float]) -> Trained:
    return {"validation": validation, "losses": losses}


def test_a_row_is_within_its_margin_only_if_its_whole_interval_is() -> None:
    assert Difference(0.01, -0.01, 0.03).verdict(0.03) == WITHIN
    assert Difference(0.01, -0.02, 0.04).verdict(0.03) == OPEN
    assert Difference(0.05, 0.04, 0.06).verdict(0.03) == OUTSIDE
    assert Difference(-0.05, -0.06, -0.04).verdict(0.03) == OUTSIDE
    assert Difference(math.nan, math.nan, math.nan).verdict(0.03) == OUTSIDE


def test_the_interval_is_students_of_paired_differences() -> None:
    mean, low, high = difference_of([0.01, 0.02, 0.03])
    assert (mean, high - mean) == (pytest.approx(0.02), pytest.approx(2.920 * 0.01 / math.sqrt(3)))
    assert mean - low == pytest.approx(high - mean)


def test_the_margin_is_a_share_of_what_the_oracle_learns_and_the_worst_step_is_after_the_warm_up() -> None:
    rising = [5.0] * (WARMUP + 2)
    oracles = [made(2.0, rising), made(2.2, rising)]
    early, late = list(rising), list(rising)
    early[WARMUP - 1], late[WARMUP] = 9.0, 6.0
    found = judged(ROWS["qwZ + qgZ"], [made(2.0, early), made(2.2, late)], oracles)
    assert learned(oracles) == pytest.approx(2.9)
    assert found.margin == pytest.approx(COARSE * 2.9)
    assert (found.worst, found.worst_step, found.verdict) == (pytest.approx(1.0), WARMUP + 1, WITHIN)


def test_a_loss_that_is_not_finite_is_the_worst_step_and_outside() -> None:
    right = made(2.0, [5.0] * (WARMUP + 3))
    broken = made(math.nan, [5.0] * (WARMUP + 2) + [math.nan])
    found = judged(ROWS["qwZ + qgZ"], [broken, right], [right, right])
    assert (found.worst, found.worst_step, found.verdict) == (math.inf, WARMUP + 3, OUTSIDE)


# ---- training --------------------------------------------------------------------------------------------------------


def _rows(names: list[str], task: LossyTask) -> dict[str, Trained]:
    return {name: train_row(name, task) for name in names}


def _oracles(task: LossyTask) -> dict[str, Trained]:
    return {name: train_oracle(name, task) for name in ORACLES}


@pytest.fixture(scope="module")
def oracles() -> dict[str, Trained]:
    return dict(run_alone(_oracles, CUT))


def share(name: str, trained: Trained, oracles: dict[str, Trained]) -> float:
    """By how much the row's validation loss is above its oracle's, as a share of what that learned."""
    right = oracles[ROWS[name].oracle]
    return float(trained["validation"] - right["validation"]) / learned([right])


@pytest.mark.full
@pytest.mark.parametrize("world", sorted(BY_WORLD))
def test_rows_learn_as_plain_pytorch_does_and_send_what_their_formula_says(
    world: int, oracles: dict[str, Trained], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run_ranks(_rows, world, BY_WORLD[world], CUT)[0]
    shares = {name: share(name, trained, oracles) for name, trained in rows.items()}
    with capsys.disabled():
        print("\n" + "\n".join(f"{name}: {100 * found:+.2f} %" for name, found in shares.items()))
    assert {name: trained["sent"] for name, trained in rows.items()} == {
        name: trained["formula"] for name, trained in rows.items()
    }
    assert {name for name, found in shares.items() if not abs(found) <= MARGIN} == {CONTROL} & rows.keys()


def _keeps_what_was_sent() -> None:
    """The feedback keeps what the codes hold instead of what they lost."""

    def feed_back(
        self: UnitGradients, codes: torch.Tensor, values: torch.Tensor, errors: torch.Tensor, bits: int
    ) -> None:
        errors.add_(values)
        quantise_(codes, errors, bits)
        dequantise_(errors, codes, bits)

    UnitGradients._feed_back = feed_back  # type: ignore[method-assign]


def _scales_are_those_of_five_bits() -> None:
    """Codes of 4 bits overflow into their neighbours."""
    wire_format.LEVELS[4] = 15


def _with_fault(fault: Callable[[], None], name: str, task: LossyTask) -> Trained:
    fault()  # in this rank's process
    return train_row(name, task)


@pytest.mark.full
@pytest.mark.parametrize("fault", [_keeps_what_was_sent, _scales_are_those_of_five_bits])
def test_a_row_whose_messages_are_wrong_is_found(fault: Callable[[], None], oracles: dict[str, Trained]) -> None:
    name = "int4 reductions, feedback"
    broken = run_ranks(_with_fault, 2, fault, name, CUT)[0]
    assert not abs(share(name, broken, oracles)) <= MARGIN
