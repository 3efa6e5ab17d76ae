"""The dtypes that a configuration asks for, and the words for what differs from them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from torch import nn

from zero_runtime.dtype_rules import AskedDTypes, DTypeCount, SizedUnit, bytes_by_dtype, differences
from zero_runtime.dtypes import TORCH_DTYPE
from zero_runtime.optim.configs import AdamW8bitConfig, AdamWConfig
from zero_runtime.precision import ITEMSIZE_BYTES, MixedPrecision
from zero_runtime.unit_planner import UnitRules, plan_units

BF16 = MixedPrecision("bf16")
UNIT = SizedUnit("block", (("block.norm", 100), ("block.up", 400)), padded_numel=512, shard_numel=256, trainable=True)
ASKED = AskedDTypes(BF16, 1, AdamWConfig().held_states, ("*norm",), {"block.norm": "bf16", "block.up": "bf16"})


def asked_of(asked: AskedDTypes = ASKED, unit: SizedUnit = UNIT) -> dict[str, DTypeCount]:
    return {one.component: one for one in asked.of_unit(unit)}


def changed(component: str, **values: object) -> list[DTypeCount]:
    return [one._replace(**values) if one.component == component else one for one in ASKED.of_unit(UNIT)]


def test_what_is_asked_for_differs_from_itself_in_nothing() -> None:
    assert differences(ASKED, [UNIT], ASKED.of_unit(UNIT)) == []


@pytest.mark.parametrize("component", ["params", "gathered", "master", "exp_avg", "exp_avg_sq", "grads", "reduced"])
def test_another_dtype_another_size_or_nothing_at_all_is_told_of_with_its_unit(component: str) -> None:
    (other,) = differences(ASKED, [UNIT], changed(component, dtype="fp16"))
    assert other.startswith(f"{component} of unit block: expected ")
    assert ", found fp16 (" in other
    (larger,) = differences(ASKED, [UNIT], changed(component, nbytes=4096))
    assert larger.endswith(("(4,096 bytes)", "(8,192 bytes)")), "gathered has two parameters"
    (missing,) = differences(ASKED, [UNIT], changed(component, elements=0))
    assert missing.endswith("found none")


def test_a_state_that_nobody_asked_for_is_told_of() -> None:
    extra = DTypeCount("max_exp_avg_sq", "block", "fp32", 256, 1024)
    assert differences(ASKED, [UNIT], [*ASKED.of_unit(UNIT), extra]) == [
        "max_exp_avg_sq of unit block: expected none (optimizer), found fp32 (1,024 bytes)"
    ]


@pytest.mark.parametrize(
    ("component", "right", "wrong", "key"),
    [
        ("all_gather", "bf16", "fp32", "param"),
        ("reduce_scatter", "fp32", "bf16", "reduce"),
        ("all_reduce", "fp32", "bf16", "reduce"),
        ("accumulated", "fp32", "bf16", "accumulate"),
        ("autocast", "bf16", "fp32", "compute"),
    ],
)
def test_of_messages_and_sums_only_the_dtype_is_fixed(component: str, right: str, wrong: str, key: str) -> None:
    size, small = ({"fp32": 4, "bf16": 2}[dtype] for dtype in (right, wrong))
    for numel in (1, 77):
        fine = DTypeCount(component, "block", right, numel, numel * size)
        assert differences(ASKED, [UNIT], [*ASKED.of_unit(UNIT), fine]) == []
    both = [fine, DTypeCount(component, "block", wrong, 3, 3 * small)]
    assert differences(ASKED, [UNIT], [*ASKED.of_unit(UNIT), *both]) == [
        f"{component} of unit block: expected {right} ({80 * size} bytes) (precision.{key}), found {right} "
        f"({77 * size} bytes) and {wrong} ({3 * small} bytes)"
    ]


def test_slices_and_parts_are_sent_in_the_dtype_of_the_computation_and_a_divided_loss_in_fp32() -> None:
    right = [DTypeCount("tensor_all_reduce", "", "bf16", 8, 16), DTypeCount("tensor_all_gather", "", "fp32", 3, 12)]
    right.append(DTypeCount("sequence_all_to_all", "", "bf16", 8, 16))
    assert differences(ASKED, [UNIT], [*ASKED.of_unit(UNIT), *right]) == []
    wrong = right[0]._replace(dtype="fp32", nbytes=32)
    (text,) = differences(ASKED, [UNIT], [*ASKED.of_unit(UNIT), wrong])
    assert text.startswith("tensor_all_reduce of unit none: expected bf16 (16 bytes) (precision.compute), found fp32")


def test_a_reduction_of_a_frozen_or_unknown_unit_is_told_of() -> None:
    frozen = replace(UNIT, trainable=False)
    assert set(asked_of(unit=frozen)) == {"params", "gathered"}
    sent = DTypeCount("reduce_scatter", "block", "fp32", 8, 32)
    assert differences(ASKED, [frozen], [*ASKED.of_unit(frozen), sent])[0].endswith("found fp32 (32 bytes)")
    elsewhere = DTypeCount("all_gather", "head", "bf16", 8, 16)
    assert "all_gather of unit head: expected none" in differences(ASKED, [UNIT], [*ASKED.of_unit(UNIT), elsewhere])[0]


def test_units_with_the_same_fault_share_one_text() -> None:
    units = [replace(UNIT, name=f"block{index}") for index in range(5)]
    found = [
        one._replace(dtype="bf16", nbytes=one.nbytes // 2) if one.component == "master" else one
        for unit in units
        for one in ASKED.of_unit(unit)
    ]
    assert differences(ASKED, units, found) == [
        "master of unit block0, block1, block2 and 2 more: expected fp32 (5,120 bytes) (precision.master), found bf16 "
        "(2,560 bytes)"
    ]


def test_8_bit_states_have_a_code_for_each_element_and_a_scale_for_each_block() -> None:
    found = asked_of(replace(ASKED, states=AdamW8bitConfig().held_states))
    assert found["exp_avg"] == DTypeCount("exp_avg", "block", "uint8", 256, 256)
    assert found["exp_avg_scale"] == DTypeCount("exp_avg_scale", "block", "fp32", 1, 4)


def test_gradients_are_kept_in_the_dtype_of_their_reduction_or_accumulation() -> None:
    mixed = replace(ASKED, precision=MixedPrecision("bf16", reduce="bf16"))
    assert asked_of(mixed)["grads"].dtype == "bf16"
    assert asked_of(replace(mixed, micro_batches=2))["grads"].dtype == "fp32"
    assert mixed.setting("grads") == "precision.reduce"
    assert replace(mixed, micro_batches=2).setting("grads") == "precision.accumulate"


def test_bytes_are_summed_over_units_by_component_and_dtype() -> None:
    units = [replace(UNIT, name="a"), replace(UNIT, name="b")]
    found = bytes_by_dtype(one for unit in units for one in ASKED.of_unit(unit))
    assert found["gathered"] == {"bf16": 2 * 500 * 2}
    assert found["exp_avg"] == {"fp32": 2 * 256 * 4}


def test_kept_parameters_are_asked_for_in_the_dtypes_of_their_planned_units() -> None:
    """Two statements of one rule, by separate code, over every valid precision and every given dtype."""
    names = list(ITEMSIZE_BYTES)
    checked = 0
    for given, param, master, compute in product(names, names, names, (None, "fp32")):
        if ITEMSIZE_BYTES[master] < ITEMSIZE_BYTES[param] or master == "fp16":
            continue
        precision = MixedPrecision(param, master=master, compute=compute)
        model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)).to(TORCH_DTYPE[given])
        asked = AskedDTypes(precision, 1, (), ("1.*",), {name: given for name, _ in model.named_parameters()})
        for spec in plan_units(model, UnitRules(precision, keep_dtype=("1.*",))):
            for name, _ in spec.params:
                found, planned = asked.of_param(name), spec.precision
                assert (found.param, found.master, found.reduce) == (planned.param, planned.master, planned.reduce)
                assert (found.compute or found.param) == (planned.compute or planned.param)
                checked += 1
    assert checked > 50
