"""Lossy rows stay near plain PyTorch on a real text, the verdict can say that one does not, and bytes have a formula.

The long form trains a cut of benchmarks/lossy_margins.py: some rows, one seed, and 60 steps, which the schedule of the
learning rate is compressed to. One seed has no interval, so the difference alone is compared with the row's margin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from harness.ranks import run_alone, run_ranks

from benchmarks.lossy_margins import (
    OPEN,
    OUTSIDE,
    WITHIN,
    WORSE,
    Difference,
    Seed,
    Spread,
    failures,
    judged,
    judged_rows,
    learned,
    spread_of,
)
from benchmarks.lossy_rows import COARSE, FINE, ORACLES, ROWS, WARMUP, LossyTask, Trained, train_oracle, train_row
from zero_runtime.kernels import wire_format
from zero_runtime.kernels.wire_format import dequantise_, quantise_
from zero_runtime.quantised.sums import QuantisedSums

CUT = LossyTask(steps=60, validation_batches=16)
CONTROL = "control: a tenth of the rate"
TRAINED = {
    2: (
        *("bf16 states", "bf16 masters", "8-bit states", "int8 gathers (qwZ)", "int8 reductions"),
        *("int4 reductions, feedback", "8-bit states + qwZ + qgZ", "1-bit Adam after 30", CONTROL),
    ),
    4: ("qwZ + qgZ, groups",),
}


# ---- the verdict -----------------------------------------------------------------------------------------------------


def made(validation: float, losses: list[float]) -> Trained:
    return {"validation": validation, "losses": losses}


def test_a_row_is_within_its_margin_only_if_its_whole_interval_is() -> None:
    assert Difference(0.01, -0.01, 0.03).verdict(0.03) == WITHIN
    assert Difference(0.01, -0.02, 0.04).verdict(0.03) == OPEN
    assert Difference(0.05, 0.04, 0.06).verdict(0.03) == OUTSIDE
    assert Difference(-0.05, -0.06, -0.04).verdict(0.03) == OUTSIDE
    assert Difference(math.nan, math.nan, math.nan).verdict(0.03) == OUTSIDE


def seeds_with(name: str, *rows: Trained, oracle: Trained) -> list[Seed]:
    """A seed for each of the row's results; the others have their oracles' results."""
    oracles = dict.fromkeys(ORACLES, oracle)
    return [{"oracles": oracles, "rows": {**dict.fromkeys(ROWS, oracle), name: row}} for row in rows]


def test_the_interval_is_students_of_a_spread_that_rows_share() -> None:
    printed = {8: 1.86, 12: 1.78, 30: 1.70}  # of Student's table
    assert {freedom: round(Spread(1.0, freedom).student, 2) for freedom in printed} == printed
    low = Spread(0.02, 8).interval([0.01, 0.02, 0.03]).low
    assert low == pytest.approx(0.02 - 1.86 * 0.02 / math.sqrt(3), abs=1e-4)
    name, steps = "qwZ + qgZ", [5.0] * (WARMUP + 1)
    seeds = seeds_with(name, made(2.1, steps), made(2.3, steps), oracle=made(2.0, steps))
    rows = [one for one, row in ROWS.items() if row.share == COARSE and one not in WORSE]
    assert spread_of(COARSE, seeds) == (pytest.approx(math.sqrt(0.02 / len(rows))), len(rows))
    assert spread_of(FINE, seeds).deviation == 0


def test_the_margin_is_a_share_of_what_the_oracle_learns_and_the_worst_step_is_after_the_warm_up() -> None:
    name, rising = "qwZ + qgZ", [5.0] * (WARMUP + 2)
    early, late = list(rising), list(rising)
    early[WARMUP - 1], late[WARMUP] = 9.0, 6.0
    found = judged(name, seeds_with(name, made(2.0, early), made(2.0, late), oracle=made(2.0, rising)), Spread(0.01, 8))
    assert found.margin == pytest.approx(COARSE * 3.0)
    assert found.worst == pytest.approx(1.0)
    assert (found.worst_step, found.verdict) == (WARMUP + 1, WITHIN)


def test_a_loss_that_is_not_finite_is_the_worst_step_and_outside() -> None:
    name, right = "qwZ + qgZ", made(2.0, [5.0] * (WARMUP + 3))
    broken = made(math.nan, [5.0] * (WARMUP + 2) + [math.nan])
    seeds = seeds_with(name, broken, right, oracle=right)
    found = judged_rows(seeds)
    assert (found[name].worst, found[name].worst_step, found[name].verdict) == (math.inf, WARMUP + 3, OUTSIDE)
    assert f"{name}: {OUTSIDE}" in failures(found)
    assert {one for one, row in found.items() if row.verdict != WITHIN} == {name}  # the others' interval is not spoilt
    assert f"{WORSE[0]}: {WITHIN}" in failures(found)  # which must be outside, and is as good as the oracle here


# ---- training --------------------------------------------------------------------------------------------------------


def _rows(names: Sequence[str], task: LossyTask) -> dict[str, Trained]:
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
@pytest.mark.parametrize("world", TRAINED)
def test_rows_learn_as_plain_pytorch_does_and_send_what_their_formula_says(
    world: int, oracles: dict[str, Trained], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run_ranks(_rows, world, TRAINED[world], CUT)[0]
    shares = {name: share(name, trained, oracles) for name, trained in rows.items()}
    with capsys.disabled():
        print("\n" + "\n".join(f"{name}: {100 * found:+.2f} %" for name, found in shares.items()))
    assert {name: trained["sent"] for name, trained in rows.items()} == {
        name: trained["formula"] for name, trained in rows.items()
    }
    assert {name for name, found in shares.items() if not abs(found) <= ROWS[name].share} == {CONTROL} & rows.keys()


def _keeps_what_was_sent() -> None:
    """The feedback keeps what the codes hold instead of what they lost."""

    def feed_back(self: QuantisedSums, codes: torch.Tensor, values: torch.Tensor, errors: torch.Tensor) -> None:
        errors.add_(values)
        quantise_(codes, errors, self._bits)
        dequantise_(errors, codes, self._bits)

    QuantisedSums._feed_back = feed_back  # type: ignore[method-assign]


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
    assert not abs(share(name, broken, oracles)) <= ROWS[name].share
