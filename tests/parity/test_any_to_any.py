"""A checkpoint saved at any stage, world and precision, and loaded at any other, continues as plain torch does.

The loaded states have the saved bits. The continued run is compared with two references. If world, precision and
accumulation class are the same: the run that was never interrupted, bit for bit, including weights and states. In all
cases: plain torch from the same states at the target's setting, with the same bits at worlds 1 and 2. At worlds 3 and 4
the first loss is a sum in fp64 of n = world * micro-batches fp32 numbers, which are the same in both runs, so two
orders of summation differ by at most 2 (n-1) 2^-53 of the sum (Higham, eq. 4.4). Later losses are within 20 times the
difference between two orders of summation, plus the spacing of fp32, to which each rank's loss is rounded.

`make test` runs a cut that covers every pair of values of two axes, up to world 2; `make test-full` runs every pair of
settings.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from harness.checkpoints import GOES_ON, SAVED_AFTER, Setting, assert_states, load_into, train, whole
from harness.oracle import Nudge, Start, Trace, oracle
from harness.ranks import run_ranks
from test_matrix import covering_cut
from test_rows import drift_between

from zero_runtime.checkpoint.save import save_checkpoint
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision

STAGES, WORLDS, PRECISIONS = (0, 1, 2, 3), (1, 2, 3, 4), ("fp32", "bf16")
SETTINGS = list(product(STAGES, WORLDS, PRECISIONS))
CELLS = [(*saved, *target) for saved in SETTINGS for target in SETTINGS]
SHORT_CUT = covering_cut([cell for cell in CELLS if cell[1] <= 2 and cell[4] <= 2])
Cell = tuple


def setting(stage: int, world: int, precision: str) -> Setting:
    return Setting(stage, world, MixedPrecision(precision))


def source(cell: Cell) -> Setting:
    return setting(*cell[:3])


def target(cell: Cell) -> Setting:
    """The target setting, with another unit size at worlds 1 and 2, where that keeps the order of sums."""
    found = setting(*cell[3:])
    return replace(found, unit_numel=500) if found.world <= 2 else found


class Continued(NamedTuple):
    """Losses and final states of a run that continued from a checkpoint."""

    losses: list[float]
    states: dict[str, torch.Tensor]


def folder(root: Path, saved: Setting) -> Path:
    return root / f"stage{saved.stage}-world{saved.world}-{saved.precision.param}"


def save_all(root: Path, settings: list[Setting]) -> None:
    """Save every source of one world. Next to it, torch.save stores the full states and the uninterrupted run."""
    for saved in settings:
        own = folder(root, saved)
        runtime = saved.runtime()
        train(runtime, saved.case(), 0, SAVED_AFTER)
        save_checkpoint(runtime, own, step=SAVED_AFTER, trainer={})
        states = whole(runtime)
        unbroken = Continued(train(runtime, saved.case(), SAVED_AFTER, GOES_ON), whole(runtime))
        runtime.close()
        if dist.get_rank() == 0:
            torch.save((states, tuple(unbroken)), own / "reference.pt")


def reference(root: Path, saved: Setting) -> tuple[dict[str, torch.Tensor], Continued]:
    states, unbroken = torch.load(folder(root, saved) / "reference.pt")
    return states, Continued(*unbroken)


def continue_all(root: Path, cells: list[Cell]) -> list[list[float]]:
    """For every cell of one target world: load, compare the states, continue. Returns the losses of each cell."""
    found = []
    for cell in cells:
        saved, wanted = source(cell), target(cell)
        states, unbroken = reference(root, saved)
        runtime, _ = load_into(folder(root, saved) / f"step-{SAVED_AFTER:08d}", wanted)
        assert_states(whole(runtime), states)
        losses = train(runtime, wanted.case(), SAVED_AFTER, steps_of(cell))
        same_class = reduces_every_backward(saved) == reduces_every_backward(wanted)
        if len(losses) == GOES_ON and same_class and (saved.world, saved.precision) == (wanted.world, wanted.precision):
            assert losses == unbroken.losses, cell
            assert_states(whole(runtime), unbroken.states)
        runtime.close()
        found.append(losses)
    return found


def steps_of(cell: Cell) -> int:
    """Equal states continue in the same way, so one source of each class runs GOES_ON steps. For the others two steps
    are enough: the second depends on the loaded moments and update count."""
    saved = source(cell)
    return GOES_ON if cell in SHORT_CUT or saved == of_class(saved) else 2


def reduces_every_backward(one: Setting) -> bool:
    return ZeroPlan.from_stage(one.stage).reduces_every_backward


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("any_to_any")


@pytest.fixture(scope="module")
def full_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("any_to_any_full")


@cache
def make_sources(root: Path, cells: tuple[Cell, ...]) -> None:
    for world in sorted({cell[1] for cell in cells}):
        settings = {source(cell) for cell in cells if cell[1] == world}
        run_ranks(save_all, world, root, sorted(settings, key=str))


@cache
def plain_traces(root: Path, saved: Setting, wanted: Setting) -> tuple[Trace, Trace]:
    """Plain torch from the saved states at the target's setting, and the same with the ranks summed in reverse."""
    states, _ = reference(root, saved)
    every, case = reduces_every_backward(wanted), wanted.case(steps=GOES_ON)
    start = Start(SAVED_AFTER, states)
    right = oracle(case, reduces_every_backward=every, start=start)
    if wanted.world <= 2:
        return right, right
    return right, oracle(case, reduces_every_backward=every, start=start, nudge=Nudge(reversed_ranks=True))


def of_class(one: Setting) -> Setting:
    """The setting that represents its class: all settings whose runs have the same bits."""
    return replace(one, stage=2 if reduces_every_backward(one) else 0, unit_numel=None)


def check(root: Path, cells: list[Cell], world: int) -> None:
    made = {source(cell) for cell in cells}
    for cell, losses in zip(cells, run_ranks(continue_all, world, root, cells, timeout_s=3000)[0], strict=True):
        wanted = of_class(target(cell))
        # Sources of one class have equal references: use the representative's, if it was saved, so it is computed once.
        saved = source(cell)
        right, other_order = plain_traces(root, of_class(saved) if of_class(saved) in made else saved, wanted)
        if wanted.world <= 2:
            assert losses == right.losses[: len(losses)], cell
            continue
        terms = wanted.world * wanted.micro_batches
        assert abs(losses[0] - right.losses[0]) <= 2 * (terms - 1) * 2.0**-53 * right.losses[0], cell
        drift = drift_between(wanted.case(), right, other_order)
        for step, (loss, plain) in enumerate(zip(losses, right.losses, strict=False)):
            bound = 20 * drift + 2.0**-23 * plain  # plus the spacing of fp32, as in assert_losses_within
            assert abs(loss - plain) <= bound, f"{cell}, step {step}: {loss} against {plain}, drift {drift}"


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_cut_of_all_pairs_continues_as_plain_torch(world: int, root: Path) -> None:
    make_sources(root, tuple(SHORT_CUT))
    cells = [cell for cell in SHORT_CUT if cell[4] == world]
    assert cells
    check(root, cells, world)


def test_sources_of_one_class_save_the_same_states(root: Path) -> None:
    """The reason why the long form can share references: sources of one class saved the same bits."""
    make_sources(root, tuple(SHORT_CUT))
    seen: dict[Setting, dict[str, torch.Tensor]] = {}
    for saved in {source(cell) for cell in SHORT_CUT}:
        states, _ = reference(root, saved)
        assert_states(seen.setdefault(of_class(saved), states), states)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", WORLDS)
def test_all_pairs_continue_as_plain_torch(world: int, full_root: Path) -> None:
    make_sources(full_root, tuple(CELLS))
    check(full_root, [cell for cell in CELLS if cell[4] == world], world)
