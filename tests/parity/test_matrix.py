"""The matrix: stages x worlds x dtypes x micro-batches x clipping x model shapes, each cell against the oracle.

`make test` runs one cell at world 2 (test_rows.py covers the other worlds). `make test-full` runs, each at every stage,
a cut that covers every pair of values of two axes for twenty steps, and for three steps enough other cells to cover
every three values of three axes. The cells left out would prove something new only about four axes at the same time.
No code depends on more than three: the size of a shard (world, and shape by its unit sizes), the dtype of a sum (dtype,
and micro-batches by what is accumulated), the order of a sum (world, micro-batches), the norm that clipping divides by
(clip, shape by its tied and frozen weights, dtype by the loss scale).
"""

from __future__ import annotations

from collections.abc import Sequence
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


def values_of(cell: Cell, axes: int) -> set[Cell]:
    """The values of every `axes` axes of the cell, each with its axis."""
    return set(combinations(enumerate(cell), axes))


def covering_cut(cells: list[Cell], axes: int = 2, covered: Sequence[Cell] = ()) -> list[Cell]:
    """A small, greedily chosen part of the cells that, with those `covered` already, covers all values of any `axes`
    axes that occur in a cell."""
    values = {cell: values_of(cell, axes) for cell in cells}
    wanted = set().union(*values.values())
    wanted -= set().union(*(values_of(cell, axes) for cell in covered))
    cut = []
    while wanted:
        best = max(cells, key=lambda cell: len(values[cell] & wanted))
        cut.append(best)
        wanted -= values[best]
    return cut


CUT = covering_cut(CELLS)
OTHERS = covering_cut(CELLS, 3, CUT)
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


def test_the_cells_cover_every_pair_and_every_three_values() -> None:
    for cells, axes in ((CUT, 2), (CUT + OTHERS, 3)):
        for chosen in combinations(enumerate(AXES.values()), axes):
            found = {tuple(cell[axis] for axis, _ in chosen) for cell in cells}
            assert found == set(product(*(values for _, values in chosen)))


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=() if cell in SHORT_CUT else pytest.mark.full, id=cell_name(cell)) for cell in CUT],
)
def test_a_cell_of_the_cut_matches_plain_torch(cell: Cell) -> None:
    check(cell)


@pytest.mark.full
@pytest.mark.parametrize("cell", OTHERS, ids=cell_name)
def test_a_cell_of_three_values_matches_plain_torch(cell: Cell) -> None:
    check(cell)
