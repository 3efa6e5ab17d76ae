"""Muon on shards: equal bits at every stage, messages of the closed form's size, checkpoints that load anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness.checkpoints import GOES_ON, SAVED_AFTER, Setting, assert_states, load_into, save_after, train, whole
from harness.models import TinySpec, TinyTransformer
from harness.oracle import LR, Case
from harness.ranks import run_alone, run_ranks
from harness.trainee import backwards_of_step, build_runtime, full_tensors

from zero_runtime.errors import CheckpointError
from zero_runtime.flat_layout import FlatLayout
from zero_runtime.optim.configs import MuonConfig
from zero_runtime.optim.matrix_owners import most_sent_elements, owned_matrices, sent_elements, working_bytes
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.messages import CollectiveCounts, collective_elements
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime

MUON = MuonConfig()
STEPS = 3
Counted = tuple[int, int, int, int]  # calls, elements and bytes of the parts of matrices; their elements in closed form


def _trained(case: Case, stages: tuple[int, ...]) -> dict[int, tuple[dict[str, torch.Tensor], Counted]]:
    """By stage: the weights after some steps, and what this rank sent for the matrices in the last one."""
    found = {}
    for stage in stages:
        runtime = build_runtime(case, stage, optimizer=MUON)
        for step in range(STEPS):
            backwards_of_step(runtime, case, step)
            runtime.reset_ledger()
            runtime.step(LR)
        found[stage] = (full_tensors(runtime, "master_shard"), _counted(runtime))
        runtime.close()
    return found


def _counted(runtime: ZeroRuntime) -> Counted:
    volume = runtime.reset_ledger().data.get("all_to_all")
    layouts = [unit.layout for unit in runtime.units if unit.matrices]
    matrices = owned_matrices(layouts, runtime.collectives.shard_count)
    elements = sent_elements(matrices, runtime.collectives.shard_rank)
    return (0, 0, 0, elements) if volume is None else (volume.calls, volume.elements, volume.bytes, elements)


@pytest.mark.parametrize(
    "case",
    [
        Case(4),
        pytest.param(Case(4, shard_ranks=2), marks=pytest.mark.full),
        pytest.param(Case(2, precision=MixedPrecision("bf16"), clip_norm=0.5), marks=pytest.mark.full),
        pytest.param(Case(3, model=TinySpec(tied=True, frozen=True)), marks=pytest.mark.full),
    ],
    ids=["world4", "shard2xreplicate2", "bf16", "tied_frozen"],
)
def test_every_stage_has_the_same_bits_and_sends_what_the_closed_form_says(case: Case) -> None:
    stages = (1, 2, 3) if case.shard_ranks else (0, 1, 2, 3)  # groups of shards sum the gradients in another order
    for by_stage in run_ranks(_trained, case.world, case, stages):
        for stage, (weights, (calls, elements, nbytes, closed)) in by_stage.items():
            assert all(torch.equal(value, by_stage[1][0][name]) for name, value in weights.items()), stage
            assert (calls, elements, nbytes) == ((2, closed, 2 * closed) if stage else (0, 0, 0))


# ---- owners ----------------------------------------------------------------------------------------------------------


def layouts_of(blocks: int, ranks: int) -> list[FlatLayout]:
    """Units of the matrices of blocks like those of a Llama model, small."""
    shapes = [("q", (64, 64)), ("k", (16, 64)), ("v", (16, 64)), ("o", (64, 64))]
    shapes += [("gate", (172, 64)), ("up", (172, 64)), ("down", (64, 172))]
    return [
        FlatLayout.build([(f"{block}.{name}", shape) for name, shape in shapes], shard_count=ranks, world=ranks)
        for block in range(blocks)
    ]


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_every_element_that_its_owner_does_not_hold_travels_once_in_each_direction(ranks: int) -> None:
    matrices = owned_matrices(layouts_of(12, ranks), ranks)
    away = sum(part.numel for matrix in matrices for part in matrix.parts if part.holder != matrix.owner)
    sent = [sent_elements(matrices, rank) for rank in range(ranks)]
    assert sum(sent) == 2 * away
    assert max(sent) == most_sent_elements(matrices, ranks)
    assert all(sum(part.numel for part in matrix.parts) == matrix.numel for matrix in matrices)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_no_rank_orthogonalises_more_than_the_mean_and_one_matrix(ranks: int) -> None:
    """The bound of giving each piece of work, the largest first, to the rank with the least."""
    matrices = owned_matrices(layouts_of(12, ranks), ranks)
    work = [0] * ranks
    for matrix in matrices:
        small, large = sorted(matrix.shape)
        work[matrix.owner] += small * small * (2 * large + small)
    largest = max(min(m.shape) ** 2 * (2 * max(m.shape) + min(m.shape)) for m in matrices)
    assert max(work) <= sum(work) / ranks + largest


def test_one_rank_alone_needs_one_matrix_at_a_time_and_several_the_parts_they_trade() -> None:
    alone = owned_matrices(layouts_of(12, 1), 1)
    assert working_bytes(alone, 1, 2) == 5 * 172 * 64 * 2
    several = owned_matrices(layouts_of(12, 4), 4)
    total = sum(matrix.numel for matrix in several)
    assert 2 * 2 * total / 4 <= working_bytes(several, 4, 2) <= 2 * (3 * total / 4 + 4 * 172 * 64)


def _dry_step() -> tuple[int, int, int, int]:
    """Rank 3 of 64: elements that its second step sent as collectives and as parts of matrices, and both in theory."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=64)
    with FakeTensorMode():
        settings = RuntimeSettings(clip_norm=1.0, read_host=lambda numbers: [1.0] * numbers.numel())
        model = TinyTransformer(TinySpec(vocab=512, width=256, blocks=4))
        runtime = ZeroRuntime(
            model, ZeroPlan.from_stage(3), MixedPrecision("bf16"), MUON, settings, torch.device("cpu")
        )
        ids = torch.zeros((2, 16), dtype=torch.int64)
        for _ in range(2):
            runtime.reset_ledger()
            runtime.backward(runtime.model(ids).float().sum())
            runtime.step(1e-3)
        ledger = runtime.reset_ledger()
        padded = sum(unit.layout.padded_numel for unit in runtime.units)
        parts = ledger.data["all_to_all"].elements
        closed = sent_elements(owned_matrices([unit.layout for unit in runtime.units if unit.matrices], 64), 3)
    theory = collective_elements(CollectiveCounts.of(runtime.plan), padded, world=64, shard_count=64)
    return ledger.data_elements - parts, parts, theory, closed


def test_a_dry_run_step_at_world_64_sends_the_predicted_volume() -> None:
    collectives, parts, theory, closed = run_alone(_dry_step)
    assert (collectives, parts) == (theory, closed)
    assert parts > 0


# ---- checkpoints -----------------------------------------------------------------------------------------------------

TARGETS = [Setting(0, 1), Setting(3, 2), Setting(1, 2, unit_numel=500), Setting(2, 3), Setting(3, 4, shard_ranks=2)]


def _save(root: Path, saved: Setting) -> dict[str, torch.Tensor]:
    return save_after(root, saved, MUON)[1]


def _load(path: Path, setting: Setting) -> dict[str, torch.Tensor]:
    runtime, _ = load_into(path, setting, MUON)
    return whole(runtime)


@pytest.mark.full
def test_a_checkpoint_loads_at_any_stage_and_number_of_ranks(tmp_path: Path) -> None:
    wanted = run_ranks(_save, 2, tmp_path, Setting(2, 2))[0]
    assert "momentum_buffer/blocks.0.up.weight" in wanted
    assert "exp_avg_sq/blocks.0.up.weight" not in wanted
    path = next(tmp_path.glob("step-*"))
    for target in TARGETS:
        assert_states(run_ranks(_load, target.world, path, target)[0], wanted)


def _continues(root: Path, setting: Setting) -> None:
    path, _ = save_after(root, setting, MUON)
    unbroken = setting.runtime(MUON)
    train(unbroken, setting.case(), 0, SAVED_AFTER)
    wanted = train(unbroken, setting.case(), SAVED_AFTER, GOES_ON)
    resumed, _ = load_into(path, setting, MUON)
    assert train(resumed, setting.case(), SAVED_AFTER, GOES_ON) == wanted
    assert_states(whole(resumed), whole(unbroken))
    with pytest.raises(CheckpointError, match=r"blocks\.0\.up\.weight: expected the states .*optimizer\.matrices"):
        load_into(path, setting, MuonConfig(matrices=["*.mix.weight"]))


@pytest.mark.full
def test_a_resumed_run_has_the_bits_of_the_uninterrupted_run_and_other_matrices_are_refused(tmp_path: Path) -> None:
    run_ranks(_continues, 2, tmp_path, Setting(3, 2))
