"""A checkpoint saved at any stage, world and precision, and loaded at any other, continues as plain torch does.

The loaded states have the saved bits. The continued run is compared with two references. If world, precision and
accumulation class are the same: the run that was never interrupted, bit for bit, including weights and states. In all
cases: plain torch from the same states at the target's setting, with the same bits at worlds 1 and 2. At worlds 3 and 4
the first loss is a sum in fp64 of n = world * micro-batches fp32 numbers, which are the same in both runs, so two
orders of summation differ by at most 2 (n-1) 2^-53 of the sum (Higham, eq. 4.4). Later losses are within 20 times the
difference between two orders of summation, plus the spacing of fp32, to which each rank's loss is rounded.

`make test` runs a cut that covers every pair of values of two axes, up to world 2. `make test-full` runs every pair of
a saved and a target layout (stage and world), half of them with equal precisions and half with two: every saved setting
meets every target layout, and every target setting every saved layout. Loading reads ranges of bytes, which follow from
the layouts, and converts each value by the precisions, so the other half would repeat both.

Equal states continue in the same way, so not every cell needs many steps: see `steps_of`.
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
Cell = tuple


def is_chosen(saved: Cell, target: Cell) -> bool:
    """Equal precisions for half of the pairs of layouts: among them all that keep the world and accumulation class."""
    kept = (saved[0] // 2 + saved[1] + target[0] // 2 + target[1]) % 2 == 0
    return kept is (saved[2] == target[2])


CELLS = [(*saved, *target) for saved, target in product(SETTINGS, SETTINGS) if is_chosen(saved, target)]
SHORT_CUT = covering_cut([cell for cell in CELLS if cell[1] <= 2 and cell[4] <= 2])
LONG_CUT = covering_cut(CELLS)
UNBROKEN_STEPS = 2  # of the uninterrupted runs, after the save


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
        unbroken = Continued(train(runtime, saved.case(), SAVED_AFTER, UNBROKEN_STEPS), whole(runtime))
        runtime.close()
        if dist.get_rank() == 0:
            torch.save((states, tuple(unbroken)), own / "reference.pt")


@cache
def reference(root: Path, saved: Setting) -> tuple[dict[str, torch.Tensor], Continued]:
    states, unbroken = torch.load(folder(root, saved) / "reference.pt")
    return states, Continued(*unbroken)


def continue_all(root: Path, cells: list[Cell]) -> list[list[float]]:
    """For every cell of one target world: load, compare the states, continue. Returns the losses of each cell."""
    found = []
    after_a_step: dict[tuple[Setting, Setting], dict[str, torch.Tensor]] = {}
    for cell in cells:
        saved, wanted = source(cell), target(cell)
        states, unbroken = reference(root, saved)
        runtime, _ = load_into(folder(root, saved) / f"step-{SAVED_AFTER:08d}", wanted)
        assert_states(whole(runtime), states)
        losses = train(runtime, wanted.case(), SAVED_AFTER, 1)
        stepped = whole(runtime)
        assert_states(stepped, after_a_step.setdefault((of_class(saved), wanted), stepped))
        if is_same_run(saved, wanted):
            losses += train(runtime, wanted.case(), SAVED_AFTER + 1, UNBROKEN_STEPS - 1)
            assert losses == unbroken.losses, cell
            assert_states(whole(runtime), unbroken.states)
        done = len(losses)
        losses += train(runtime, wanted.case(), SAVED_AFTER + done, steps_of(cell) - done)
        runtime.close()
        found.append(losses)
    return found


def is_same_run(saved: Setting, wanted: Setting) -> bool:
    """Whether the continued run must have the bits of the run that was never interrupted."""
    kept = of_class(saved), saved.world, saved.precision
    return kept == (of_class(wanted), wanted.world, wanted.precision)


def steps_of(cell: Cell) -> int:
    """Sources of one class save equal states, and their runs at a target have equal states after a step, which depends
    on the loaded moments and update count: `continue_all` compares both. So only the first source of a class takes a
    second step, which is compared with plain torch, and only the cells of a cut take GOES_ON."""
    if cell in SHORT_CUT or cell in LONG_CUT:
        return GOES_ON
    return 2 if source(cell) == of_class(source(cell)) else 1


def reduces_every_backward(one: Setting) -> bool:
    return ZeroPlan.from_stage(one.stage).reduces_every_backward


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("any_to_any")


def make_sources(root: Path, cells: list[Cell]) -> None:
    """Save the sources of these cells that no earlier test has saved."""
    missing = {setting for setting in map(source, cells) if not folder(root, setting).exists()}
    for world in sorted({setting.world for setting in missing}):
        run_ranks(save_all, world, root, sorted((one for one in missing if one.world == world), key=str))


def plain_traces(root: Path, saved: Setting, wanted: Setting, steps: int) -> tuple[Trace, Trace]:
    """Plain torch from the saved states at the target's setting, and the same with the ranks summed in reverse."""
    states, _ = reference(root, saved)
    every, case = reduces_every_backward(wanted), wanted.case(steps=steps)
    start = Start(SAVED_AFTER, states)
    right = oracle(case, reduces_every_backward=every, start=start)
    if wanted.world <= 2:
        return right, right
    return right, oracle(case, reduces_every_backward=every, start=start, nudge=Nudge(reversed_ranks=True))


def of_class(one: Setting) -> Setting:
    """The setting that represents its class: all settings whose runs have the same bits."""
    return replace(one, stage=2 if reduces_every_backward(one) else 0, unit_numel=None)


def check(root: Path, cells: list[Cell], world: int) -> None:
    """Runs all cells of one target world. Cells of one class of sources and one of targets share a run of plain torch,
    as long as the longest of them."""
    shared: dict[tuple[Setting, Setting], list[tuple[Cell, list[float]]]] = {}
    for cell, losses in zip(cells, run_ranks(continue_all, world, root, cells, timeout_s=3000)[0], strict=True):
        shared.setdefault((of_class(source(cell)), of_class(target(cell))), []).append((cell, losses))
    for (_, wanted), continued in shared.items():
        saved, longest = source(continued[0][0]), max(len(losses) for _, losses in continued)
        right, other_order = plain_traces(root, saved, wanted, longest)
        for cell, losses in continued:
            compare(cell, losses, right, other_order)


def compare(cell: Cell, losses: list[float], right: Trace, other_order: Trace) -> None:
    wanted = target(cell)
    if wanted.world <= 2:
        assert losses == right.losses[: len(losses)], cell
        return
    terms = wanted.world * wanted.micro_batches
    assert abs(losses[0] - right.losses[0]) <= 2 * (terms - 1) * 2.0**-53 * right.losses[0], cell
    drift = drift_between(wanted.case(), right, other_order)
    for step, (loss, plain) in enumerate(zip(losses, right.losses, strict=False)):
        bound = 20 * drift + 2.0**-23 * plain  # plus the spacing of fp32, as in assert_losses_within
        assert abs(loss - plain) <= bound, f"{cell}, step {step}: {loss} against {plain}, drift {drift}"


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_cut_of_all_pairs_continues_as_plain_torch(world: int, root: Path) -> None:
    make_sources(root, SHORT_CUT)
    cells = [cell for cell in SHORT_CUT if cell[4] == world]
    assert cells
    check(root, cells, world)


def test_sources_of_one_class_save_the_same_states(root: Path) -> None:
    """The reason why the long form can share references: sources of one class saved the same bits."""
    make_sources(root, SHORT_CUT)
    seen: dict[Setting, dict[str, torch.Tensor]] = {}
    for saved in {source(cell) for cell in SHORT_CUT}:
        states, _ = reference(root, saved)
        assert_states(seen.setdefault(of_class(saved), states), states)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", WORLDS)
def test_all_pairs_continue_as_plain_torch(world: int, root: Path) -> None:
    make_sources(root, CELLS)
    check(root, [cell for cell in CELLS if cell[4] == world], world)
