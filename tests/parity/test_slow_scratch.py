"""A slow disk changes only the timing: runs with states on it keep their bits, and the other ranks wait."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from harness.checkpoints import Setting, assert_states
from harness.copies import LateCopies
from harness.late_scratch import ORDERS, LateDrive, late_scratch
from harness.oracle import LR
from harness.ranks import run_ranks
from harness.trainee import backwards_of_step
from test_matrix import covering_cut
from test_offload import BF16, FP32, SPEC, offload_to, runtime_of

from zero_runtime.checkpoint.load import CheckpointReader, load_checkpoint
from zero_runtime.checkpoint.save import save_checkpoint
from zero_runtime.errors import OffloadError
from zero_runtime.offload.scratch_file import ALIGN_BYTES, ScratchFile, aligned_buffer
from zero_runtime.offload_plan import OffloadPlan, ScratchSettings
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import ZeroRuntime

STEPS = range(4)


class Cell(NamedTuple):
    """separate_memory: as with a GPU; the copies between the two memories are late too."""

    order: str
    ahead: int
    params: bool
    separate_memory: bool = False

    def plan(self, folder: Path) -> OffloadPlan:
        plan = offload_to(folder, params=self.params, ahead=self.ahead)
        return replace(plan, copies=LateCopies if self.separate_memory else None)


class Trained(NamedTuple):
    """reports: as text, so that nan equals nan."""

    reports: list[str]
    norms: list[float]


def train(runtime: ZeroRuntime, setting: Setting, steps: range) -> Trained:
    case, found = setting.case(model=SPEC), Trained([], [])
    for step in steps:
        backwards_of_step(runtime, case, step)
        report = runtime.step(LR)
        found.reports.append(str(report))
        found.norms.append(report.grad_norm)
    return found


def states_of(runtime: ZeroRuntime) -> dict[str, torch.Tensor]:
    found = {}
    for unit in runtime.units:
        with runtime.resident(unit):
            shards = {"master": unit.weights_shard, **runtime.optimizer.states_of(unit)}
            for state, shard in shards.items():
                found |= {f"{state}/{name}": values.clone() for name, values in unit.full_of(shard).items()}
    return found


def cells_of(stage: int) -> list[Cell]:
    """Every depth, one of them with separate memory too; the order of transfers and whether parameters are offloaded
    alternate."""
    orders = list(ORDERS)
    depths = [(0, False), (1, False), (2, False), (1, True)]
    return [
        Cell(orders[(index + stage) % len(orders)], ahead, stage == 3 and index % 3 != 2, separate)
        for index, (ahead, separate) in enumerate(depths)
    ]


def long_cells_of(stage: int) -> list[Cell]:
    """Cells that cover every three values of the axes, the order of transfers and depth among them; four
    axes at the same time would add nothing, because separate memory and offloaded parameters add transfers of their
    own, which wait for those of their own buffers."""
    params = (False, True) if stage == 3 else (False,)
    cells = list(product(ORDERS, (0, 1, 2), params, (False, True)))
    return [Cell(*each) for each in covering_cut(cells, 3)]


def _late(folder: Path, setting: Setting, cells: list[Cell]) -> None:
    """Some of the steps are clipped."""
    plain = runtime_of(setting, None)
    norms = sorted(train(plain, setting, STEPS).norms)
    plain.close()
    clip_norm = (norms[1] + norms[2]) / 2
    plain = runtime_of(setting, None, clip_norm=clip_norm)
    wanted, states = train(plain, setting, STEPS).reports, states_of(plain)
    plain.close()
    for cell in cells:
        with late_scratch(cell.order) as drive:
            runtime = runtime_of(setting, cell.plan(folder), clip_norm=clip_norm)
            found = train(runtime, setting, STEPS)
            assert found.reports == wanted, cell
            assert_states(states_of(runtime), states)
            runtime.close()
        assert bool(drive.late_reads) is (cell.order != "writes late"), cell
        assert bool(drive.late_writes) is (cell.order != "reads late"), cell


@pytest.mark.parametrize(
    ("stage", "precision"),
    [(3, BF16), *(pytest.param(*one, marks=pytest.mark.full) for one in ((0, FP32), (1, BF16), (2, FP32)))],
)
def test_a_slow_disk_does_not_change_the_bits(stage: int, precision: MixedPrecision, tmp_path: Path) -> None:
    run_ranks(_late, 2, tmp_path, Setting(stage, 2, precision), cells_of(stage))


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("stage", "world", "precision"), [(0, 2, BF16), (1, 2, FP32), (2, 2, BF16), (3, 2, FP32), (3, 1, BF16)]
)
def test_every_read_ahead_depth_and_order_of_transfers_keeps_the_bits(
    stage: int, world: int, precision: MixedPrecision, tmp_path: Path
) -> None:
    """Each rank has a separate disk, so other combinations of world and precision would add nothing."""
    run_ranks(_late, world, tmp_path, Setting(stage, world, precision), long_cells_of(stage), timeout_s=3000)


def _saves_late(folder: Path) -> None:
    """Save from a slow disk and resume on one: the checkpoint holds all that was written, late or not."""
    setting = Setting(3, 2, BF16)
    for order in ("all late", "writes late"):
        plan = Cell(order, 1, params=True).plan(folder)
        with late_scratch(order):
            runtime = runtime_of(setting, plan)
            train(runtime, setting, range(2))
            path = save_checkpoint(runtime, folder / order, step=2, trainer={})
            wanted, states = train(runtime, setting, range(2, 4)).reports, states_of(runtime)
            runtime.close()
        for other in (None, plan):
            with late_scratch(order):
                again = runtime_of(setting, other)
                load_checkpoint(again, CheckpointReader.open(path, verify=False))
                assert train(again, setting, range(2, 4)).reports == wanted
                assert_states(states_of(again), states)
                again.close()


@pytest.mark.full
def test_states_on_a_slow_disk_are_saved_and_loaded(tmp_path: Path) -> None:
    run_ranks(_saves_late, 2, tmp_path)


def _fails(folder: Path) -> None:
    setting = Setting(3, 1, FP32, micro_batches=1)
    plan = Cell("all late", 1, params=True).plan(folder)

    def moves_until(failing: int, steps: range) -> int:
        """Number of transfers of a run in which transfer number `failing` fails; with 0, none fails."""
        moves = 0

        def gate() -> None:
            nonlocal moves
            moves += 1
            if moves == failing:
                raise OffloadError("the drive is gone")

        with late_scratch("all late", gate):
            runtime = runtime_of(setting, plan)
            try:
                train(runtime, setting, steps)
            finally:
                runtime.close()
        return moves

    born, after_a_step = moves_until(0, range(0)), moves_until(0, range(1))
    assert after_a_step > born + 10
    for failing in range(born + 1, after_a_step + 1):
        with pytest.raises(OffloadError, match="the drive is gone"):
            moves_until(failing, range(2))


def test_any_failed_transfer_ends_training_however_late_it_fails(tmp_path: Path) -> None:
    run_ranks(_fails, 1, tmp_path)


# ---- one rank's slow disk --------------------------------------------------------------------------------------------


class Gate:
    """Blocks rank 1's disk until rank 0 has ended its step: a pipe into which rank 0 writes one byte per step."""

    def __init__(self, path: Path) -> None:
        self._pipe = os.open(path, os.O_RDWR)
        self._closed = False
        self.stops = 0

    def close(self) -> None:
        self._closed = True

    def open(self) -> None:
        os.write(self._pipe, b"x")

    def passed(self) -> None:
        """If the gate is closed, block until it is opened."""
        if self._closed:
            self._closed = False
            self.stops += 1
            os.read(self._pipe, 1)


def _one_rank_is_slow(pipe: Path, folder: Path, setting: Setting, cell: Cell) -> None:
    plain = runtime_of(setting, None)
    wanted, states = train(plain, setting, STEPS).reports, states_of(plain)
    plain.close()
    gate, case = Gate(pipe), setting.case(model=SPEC)
    reports = []
    with late_scratch(cell.order, gate.passed) if dist.get_rank() else nullcontext():
        runtime = runtime_of(setting, cell.plan(folder))
        for step in STEPS:
            backwards_of_step(runtime, case, step)
            if dist.get_rank():
                gate.close()
            reports.append(str(runtime.step(LR)))
            if not dist.get_rank():
                gate.open()  # only now does rank 1's disk continue
        assert_states(states_of(runtime), states)
        runtime.close()
    assert reports == wanted
    assert gate.stops == (len(STEPS) if dist.get_rank() else 0)


@pytest.mark.parametrize(
    "stage",
    [1, pytest.param(3, marks=pytest.mark.full)],
)
def test_a_rank_with_a_slow_disk_only_makes_the_others_wait(stage: int, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    cell = Cell("all late", 1, params=False)
    run_ranks(_one_rank_is_slow, 2, tmp_path / "pipe", tmp_path, Setting(stage, 2, BF16), cell)


# ---- the harness can fail --------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Iterator[ScratchFile]:
    found = ScratchFile(ScratchSettings(tmp_path), 8 * ALIGN_BYTES, rank=0)
    yield found
    found.close()


@pytest.fixture
def drive() -> Iterator[LateDrive]:
    with late_scratch("all late") as found:
        yield found


def page(value: int = 0) -> torch.Tensor:
    return aligned_buffer(ALIGN_BYTES).fill_(value)


def test_the_target_of_a_late_read_is_nan_until_the_read_is_waited_for(file: ScratchFile, drive: LateDrive) -> None:
    file.write(0, page(7), "unit").wait()
    target = page()
    reading = file.read(0, target, "unit")
    assert bool(target.view(torch.float32).isnan().all())
    assert bool(target.view(torch.bfloat16).isnan().all())
    reading.wait()
    reading.wait()
    assert bool((target == 7).all())


def test_a_late_write_takes_its_buffers_content_when_it_is_waited_for(file: ScratchFile, drive: LateDrive) -> None:
    source, target = page(1), page()
    writing = file.write(0, source, "unit")
    source.fill_(2)
    writing.settle()
    file.read(0, target, "unit").wait()
    assert bool((target == 2).all())


def test_overlapping_transfers_raise(file: ScratchFile, drive: LateDrive) -> None:
    here, there = page(), page()
    writing = file.write(0, here, "unit")
    for move, offset, tensor in ((file.read, 0, there), (file.write, 0, there), (file.read, ALIGN_BYTES, here)):
        with pytest.raises(AssertionError, match="begins while a write of bytes 0 to 4096 is under way in"):
            move(offset, tensor, "unit")
    file.write(ALIGN_BYTES, here, "unit").wait()
    writing.wait()
    file.read(0, there, "unit").wait()
