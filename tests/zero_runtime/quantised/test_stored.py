"""Frozen weights in codes: what a checkpoint keeps of them, what exists between uses, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness.models import TinySpec, TinyTransformer
from harness.oracle import Case
from harness.ranks import run_ranks
from harness.trainee import backwards_of_step, build_runtime
from harness.unsharded import unsharded_peak

from zero_runtime.checkpoint.load import CheckpointReader, load_checkpoint
from zero_runtime.checkpoint.save import save_checkpoint
from zero_runtime.errors import PlanError
from zero_runtime.precision import MixedPrecision
from zero_runtime.unit_planner import UnitRules, plan_units

CASE = Case(2, precision=MixedPrecision("bf16", weights="int4"), model=TinySpec(frozen=True))


def _codes(case: Case, stage: int, root: Path, loads: bool) -> dict[str, torch.Tensor]:
    """The codes of each unit, on all ranks, before a save or after a load."""
    runtime = build_runtime(case, stage)
    if loads:
        load_checkpoint(runtime, CheckpointReader.open(root / "step-00000001"))
    else:
        save_checkpoint(runtime, root, step=1, trainer={})
    coded = [unit for unit in runtime.units if unit.parameters.is_coded]
    found = {}
    for unit in coded:
        full = unit.param_shard.new_empty(unit.param_shard.numel() * unit.layout.shard_count)
        runtime.collectives.all_gather_uncounted(full, unit.param_shard)
        kept = (segment.offset // 64 * 34 for segment in unit.layout.segments)
        found |= {f"{unit.name} {at}": full[at : at + 34] for at in kept}  # the first block of each parameter
    with unsharded_peak(coded) as peak:
        backwards_of_step(runtime, case, 0)
    assert max(peak.counts) > 0
    assert all(unit.parameters.unsharded_param.untyped_storage().size() == 0 for unit in coded)
    runtime.close()
    return found


@pytest.mark.parametrize(("stage", "other"), [(3, 1), pytest.param(2, 3, marks=pytest.mark.full)])
def test_a_checkpoint_restores_the_codes_at_another_stage_and_nothing_else_stays_of_a_use(
    stage: int, other: int, tmp_path: Path
) -> None:
    saved = run_ranks(_codes, 2, CASE, stage, tmp_path, False)[0]
    elsewhere = replace(CASE, model=replace(CASE.model, seed=1))  # whose own weights are others
    loaded = run_ranks(_codes, 2, elsewhere, other, tmp_path, True)[1]
    assert saved
    assert all(torch.equal(loaded[name], codes) for name, codes in saved.items())


def test_weights_of_which_none_is_frozen_are_refused() -> None:
    with pytest.raises(PlanError, match=r"precision\.weights: expected frozen matrices .*adapter=lora"):
        plan_units(TinyTransformer(TinySpec()), UnitRules(CASE.precision))


def test_the_matrices_of_a_single_block_are_stored_as_codes() -> None:
    model = TinyTransformer(TinySpec(blocks=1)).requires_grad_(False)
    assert {spec.name for spec in plan_units(model, UnitRules(CASE.precision)) if spec.is_coded} == {
        "blocks.0 (frozen) (int4)"
    }


def test_what_keeps_its_dtype_is_not_stored_as_codes() -> None:
    rules = UnitRules(CASE.precision, keep_dtype=("*.mix.weight",))
    coded = [
        name for spec in plan_units(TinyTransformer(CASE.model), rules) if spec.is_coded for name, _ in spec.params
    ]
    assert coded == ["blocks.1.up.weight", "blocks.1.down.weight", "blocks.2.up.weight"]
