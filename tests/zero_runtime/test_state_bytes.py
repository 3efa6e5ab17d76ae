"""The memory model agrees with the ZeRO paper (arXiv 1910.02054): figure 1 and table 1."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import pytest

from zero_runtime.flat_layout import FlatLayout
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.state_bytes import StateBytes, UnitSize, formula, model_state_bytes

STAGES = (0, 1, 2, 3)
PAPER = MixedPrecision("bf16", reduce="bf16")
FP32 = MixedPrecision()
DEFAULT_BF16 = MixedPrecision("bf16")
GB = 10**9

# By stage: bytes per element that every rank holds, and bytes per element that are split over the ranks.
CLOSED_FORMS = {
    PAPER: [(16, 0), (4, 12), (2, 14), (0, 16)],
    FP32: [(16, 0), (8, 8), (4, 12), (0, 16)],
    DEFAULT_BF16: [(18, 0), (6, 12), (2, 16), (0, 18)],
}
ROWS = [(precision, stage) for precision in CLOSED_FORMS for stage in STAGES]
IDS = [f"{'-'.join(dtype for dtype in vars(precision).values() if dtype)}_stage{stage}" for precision, stage in ROWS]


def predict(plan: ZeroPlan, precision: MixedPrecision, units: Sequence[UnitSize], **others: int) -> StateBytes:
    """Of units of one precision."""
    return model_state_bytes(plan, [(unit, precision) for unit in units], **others)


def whole(numel: int) -> UnitSize:
    """A trainable unit that needs no padding."""
    return UnitSize(numel, numel, trainable=True)


@pytest.mark.parametrize("world", [1, 2, 4, 64, 1024])
@pytest.mark.parametrize(("precision", "stage"), ROWS, ids=IDS)
def test_predicted_bytes_equal_the_closed_form(precision: MixedPrecision, stage: int, world: int) -> None:
    units = [whole(1024 * 7), whole(1024 * 3)]
    found = predict(ZeroPlan.from_stage(stage), precision, units, world=world)
    full, split = CLOSED_FORMS[precision][stage]
    assert Fraction(found.total) == 10240 * (full + Fraction(split, world))
    assert found.padding == 0


@pytest.mark.parametrize(("precision", "stage"), ROWS, ids=IDS)
def test_the_formula_prints_the_closed_form(precision: MixedPrecision, stage: int) -> None:
    full, split = CLOSED_FORMS[precision][stage]
    terms = ([f"{full}Ψ"] if full else []) + ([f"{split}Ψ/N"] if split else [])
    assert formula(ZeroPlan.from_stage(stage), precision) == " + ".join(terms)


def test_the_formulas_read_as_in_the_paper() -> None:
    texts = [formula(ZeroPlan.from_stage(stage), PAPER) for stage in STAGES]
    assert texts == ["16Ψ", "4Ψ + 12Ψ/N", "2Ψ + 14Ψ/N", "16Ψ/N"]


def test_accumulated_gradients_are_kept_in_the_accumulate_dtype() -> None:
    texts = [formula(ZeroPlan.from_stage(stage), PAPER, micro_batches=2) for stage in STAGES]
    assert texts == ["18Ψ", "6Ψ + 12Ψ/N", "2Ψ + 16Ψ/N", "18Ψ/N"]
    found = predict(ZeroPlan.from_stage(1), PAPER, [whole(64)], world=2, micro_batches=2)
    assert found == StateBytes(params=2 * 64, grads=4 * 64, optimizer=12 * 32, padding=0)


# Table 1's exact values in GB; the paper prints them rounded (7.5B) or cut (1T). By ranks: stages 1, 2, 3.
TABLE_1 = {
    7_500_000_000: {
        1: (120, 120, 120),
        4: (52.5, 41.25, 30),
        16: (35.625, 21.5625, 7.5),
        64: (31.40625, 16.640625, 1.875),
        256: (30.3515625, 15.41015625, 0.46875),
        1024: (30.087890625, 15.1025390625, 0.1171875),
    },
    1_000_000_000_000: {
        1: (16000, 16000, 16000),
        4: (7000, 5500, 4000),
        16: (4750, 2875, 1000),
        64: (4187.5, 2218.75, 250),
        256: (4046.875, 2054.6875, 62.5),
        1024: (4011.71875, 2013.671875, 15.625),
    },
}


@pytest.mark.parametrize("numel", TABLE_1)
def test_predictions_equal_table_1_of_the_paper(numel: int) -> None:
    for world, row in TABLE_1[numel].items():
        unit = UnitSize.of(FlatLayout.build([("all", (numel,))], shard_count=world, world=world), trainable=True)
        for stage, gigabytes in zip((1, 2, 3), row, strict=True):
            found = predict(ZeroPlan.from_stage(stage), PAPER, [unit], world=world)
            # Tolerance of half a byte: padding is reported in whole bytes. The table's values are exact in binary.
            wanted = Fraction(gigabytes) * GB
            assert abs(found.total - found.padding - wanted) <= Fraction(1, 2), f"stage {stage} over {world}"


def test_predictions_equal_figure_1_of_the_paper() -> None:
    totals = [predict(ZeroPlan.from_stage(s), PAPER, [whole(7_500_000_000)], world=64).total / GB for s in STAGES]
    assert [round(total, 1) for total in totals] == [120.0, 31.4, 16.6, 1.9]


def test_bytes_at_stage_0_do_not_depend_on_the_number_of_ranks() -> None:
    plan = ZeroPlan.from_stage(0)
    assert len({predict(plan, PAPER, [whole(7680)], world=world).total for world in (1, 2, 3, 64)}) == 1


def test_a_master_of_the_same_dtype_as_the_parameters_costs_nothing() -> None:
    plan = ZeroPlan.from_stage(0)
    assert predict(plan, FP32, [whole(32)], world=1).optimizer == 32 * 8
    assert predict(plan, DEFAULT_BF16, [whole(32)], world=1).optimizer == 32 * 12
    assert predict(plan, MixedPrecision("bf16", master="bf16"), [whole(32)], world=1).optimizer == 32 * 8


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_units_have_parameters_only(stage: int) -> None:
    plan = ZeroPlan.from_stage(stage)
    frozen = UnitSize(128, 128, trainable=False)
    found = predict(plan, PAPER, [frozen], world=2)
    assert found == StateBytes(params=128 * 2 // (2 if stage == 3 else 1), grads=0, optimizer=0, padding=0)
    both = predict(plan, PAPER, [frozen, whole(64)], world=2)
    assert both.total == found.total + predict(plan, PAPER, [whole(64)], world=2).total


@pytest.mark.parametrize(("precision", "stage"), ROWS, ids=IDS)
def test_padding_is_reported_separately_to_the_nearest_byte(precision: MixedPrecision, stage: int) -> None:
    units = [UnitSize(70, 96, trainable=True), UnitSize(91, 96, trainable=True)]
    found = predict(ZeroPlan.from_stage(stage), precision, units, world=3)
    full, split = CLOSED_FORMS[precision][stage]
    assert found.total == 192 * full + 64 * split
    # Below half a byte: padding is reported in whole bytes; 161 elements over 3 ranks never fall half-way between two.
    assert abs(found.total - found.padding - 161 * (full + Fraction(split, 3))) < Fraction(1, 2)
