"""The full matrix: stages x worlds x dtypes x micro-batches x clipping x model shapes, each cell against the oracle.

A cut of the cells covers every pair of values of two axes. `make test` runs one cell of the cut at world 2, `make
test-full` runs every cell. (test_rows.py covers the other worlds in the short form.)
"""

from __future__ import annotations

from itertools import combinations, product

import pytest
import torch
from harness.models import TinySpec
from harness.oracle import Case, Nudge, Trace, oracle
from harness.ranks import run_ranks
from harness.trainee import train
from test_rows import (
    CLIP_NORM,
    PARAMETERS_BOUND,
    STAGES,
    UNIT_ROUNDOFF,
    assert_losses_within,
    assert_same_bits,
    assert_within,
    drift_between,
    gradient_bound,
    update_bound,
)

from zero_runtime.optim.loss_scaler import UNSCALED, LossScaleRule
from zero_runtime.precision import MixedPrecision

AXES = {
    "world": (1, 2, 3, 4),
    "dtype": ("fp32", "bf16", "fp16"),
    "micro_batches": (1, 4),
    "clip": (False, True),
    "shape": ("plain", "tied", "frozen", "recomputed"),
}
Cell = tuple
CELLS: list[Cell] = list(product(*AXES.values()))
STEPS, FEW_STEPS = 20, 3  # for the cells of the cut, whose loss must fall, and for the others


def covering_cut(cells: list[Cell]) -> list[Cell]:
    """A small, greedily chosen part of the cells that covers every pair of values of two axes."""

    def pairs(cell: Cell) -> set:
        return {((i, cell[i]), (j, cell[j])) for i, j in combinations(range(len(cell)), 2)}

    wanted = set().union(*(pairs(cell) for cell in cells))
    cut = []
    while wanted:
        best = max(cells, key=lambda cell: len(pairs(cell) & wanted))
        cut.append(best)
        wanted -= pairs(best)
    return cut


CUT = covering_cut(CELLS)
SHORT_CUT = [cell for cell in CUT if cell[0] == 2 and cell[2] == 1][:1]


def case_of(cell: Cell) -> Case:
    world, dtype, micro_batches, clip, shape = cell
    return Case(
        world,
        micro_batches,
        STEPS if cell in CUT else FEW_STEPS,
        clip_norm=CLIP_NORM if clip else None,
        precision=MixedPrecision(dtype),
        # A scale that never overflows here; overflows have separate tests.
        loss_scale=LossScaleRule(initial_power=8, window=1000) if dtype == "fp16" else UNSCALED,
        model=TinySpec(tied=shape == "tied", frozen=shape == "frozen", recomputed=shape == "recomputed"),
    )


def check(cell: Cell) -> None:
    """Run one cell at every stage. Stages of one accumulation class must have equal bits; each class has an oracle."""
    case = case_of(cell)
    traces = run_ranks(train, case.world, case)[0]
    classes = [(0, 1), (2, 3)] if case.micro_batches > 1 else [STAGES]
    for first, *others in classes:
        for other in others:
            assert_same_bits(traces[other], traces[first])
            assert traces[other].norms == traces[first].norms
        compare(case, traces[first], every=first >= 2)


def compare(case: Case, found: Trace, *, every: bool) -> None:
    wanted = oracle(case, reduces_every_backward=every)
    assert case.steps < STEPS or wanted.losses[-1] < wanted.losses[0]
    if case.world <= 2 and case.clip_norm is None:
        assert_same_bits(found, wanted)
        return
    for name, grad in wanted.first_grads.items():
        bound = gradient_bound(case, wanted, name)
        assert_within(found.first_grads[name], grad, bound, name)
        if case.clip_norm is None:
            assert_within(found.first_update[name], wanted.first_update[name], update_bound(case, wanted, name), name)
    # Norms are 1-Lipschitz in the gradient, and a sum of n squares in any order is within a relative n u.
    shift = torch.cat([gradient_bound(case, wanted, name).flatten() for name in wanted.first_grads]).norm()
    relative = PARAMETERS_BOUND * UNIT_ROUNDOFF
    scale = case.loss_scale.start().scale
    assert abs(found.norms[0] - wanted.norms[0]) <= float(shift) / scale + relative * wanted.norms[0]
    nudge = Nudge(reversed_ranks=True, clip_factor=1 + relative)
    nudged = oracle(case, reduces_every_backward=every, nudge=nudge)
    assert_losses_within(found, wanted, drift_between(case, wanted, nudged))


def cell_name(cell: Cell) -> str:
    world, dtype, micro_batches, clip, shape = cell
    return f"world{world}-{dtype}-micro{micro_batches}-{'clip' if clip else 'noclip'}-{shape}"


def test_the_cut_covers_every_pair_of_values() -> None:
    for (i, first), (j, second) in combinations(enumerate(AXES.values()), 2):
        assert {(cell[i], cell[j]) for cell in CUT} == set(product(first, second))


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=() if cell in SHORT_CUT else pytest.mark.full, id=cell_name(cell)) for cell in CUT],
)
def test_a_cell_of_the_cut_matches_plain_torch(cell: Cell) -> None:
    check(cell)


@pytest.mark.full
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell not in CUT], ids=cell_name)
def test_a_cell_of_the_matrix_matches_plain_torch(cell: Cell) -> None:
    check(cell)
