"""Parameter groups give every element of a shard the right decay and learning rate. No ranks, no torch."""

from __future__ import annotations

import math
from typing import Any

import pytest

from zero_runtime.errors import PlanError
from zero_runtime.flat_layout import FlatLayout
from zero_runtime.optim.groups import GroupSettings, GroupTable, ParamGroup, goes_without_decay

SHAPES = {
    "embed.weight": (10, 8),
    "norm.weight": (8,),
    "up.weight": (8, 8),
    "up.bias": (8,),
    "scale": (),
    "head": (8, 10),
}
LAYOUT = FlatLayout.build(SHAPES.items(), shard_count=2, world=2)


def table(*groups: ParamGroup, no_decay: bool = True) -> GroupTable:
    return GroupTable(groups, SHAPES, weight_decay=0.1, no_decay=no_decay)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("h.0.mlp.weight", (4, 4), False),
        ("h.0.mlp.bias", (4,), True),
        ("h.0.attn.bias", (4, 4), True),
        ("model.layers.0.input_layernorm.weight", (4,), True),
        ("norm2d.weight", (4, 4), False),  # norm is not a separate word here
        ("norm2.weight", (4, 4), True),
        ("ln_f.weight", (4, 4), True),
        ("encoder.LayerNorm.weight", (4, 4), True),
        ("attn.q_norm.weight", (2, 4), True),
        ("normal_form.weight", (4, 4), False),
        ("linear.weight", (4, 4), False),
        ("temperature", (), True),
        ("embed.weight", (10, 4), False),
        ("bias", (3, 3), True),
    ],
)
def test_norms_biases_and_tensors_of_at_most_one_dimension_are_not_decayed(
    name: str, shape: tuple[int, ...], expected: bool
) -> None:
    assert goes_without_decay(name, shape) is expected


def test_by_default_all_parameters_are_in_one_group_without_decay_of_norms_and_biases() -> None:
    decays = {name: table().settings(name, shape).weight_decay for name, shape in SHAPES.items()}
    assert decays == {"embed.weight": 0.1, "norm.weight": 0, "up.weight": 0.1, "up.bias": 0, "scale": 0, "head": 0.1}
    assert {table(no_decay=False).settings(name, shape).weight_decay for name, shape in SHAPES.items()} == {0.1}


def test_a_group_without_decay_uses_the_default_and_one_with_decay_applies_it_to_all() -> None:
    groups = table(ParamGroup(("up.weight", "up.bias"), lr_scale=2.0), ParamGroup(("norm.weight",), weight_decay=0.3))
    assert groups.settings("up.weight", (8, 8)) == GroupSettings(0, 2.0, 0.1)
    assert groups.settings("up.bias", (8,)) == GroupSettings(0, 2.0, 0.0)
    assert groups.settings("norm.weight", (8,)) == GroupSettings(1, 1.0, 0.3)
    assert groups.settings("head", (8, 10)) == GroupSettings(2, 1.0, 0.1)


def test_runs_merge_adjacent_parameters_with_equal_settings_and_exclude_padding() -> None:
    whole = FlatLayout.build(SHAPES.items(), shard_count=1, world=1)
    assert [(run.start, run.stop, run.settings.weight_decay) for run in table().runs(whole, 0)] == [
        (0, 80, 0.1),
        (80, 88, 0.0),
        (88, 152, 0.1),
        (152, 161, 0.0),
        (161, 241, 0.1),
    ]
    assert [(run.start, run.stop) for run in table(no_decay=False).runs(whole, 0)] == [(0, 241)]


def test_runs_of_all_shards_cover_each_element_once_and_stop_at_a_shards_end() -> None:
    size = LAYOUT.shard_numel
    by_shard = [table().runs(LAYOUT, shard) for shard in range(2)]
    assert [run.stop - run.start for runs in by_shard for run in runs] == [80, 8, size - 88, 152 - size, 9, 80]
    assert by_shard[1][0].start == 0
    padding_only = FlatLayout.build([("a", (3,))], shard_count=4, world=4)
    assert GroupTable((), ["a"], weight_decay=0.0, no_decay=True).runs(padding_only, 3) == ()


def test_one_rate_is_scaled_by_each_groups_factor_and_several_rates_are_used_in_order() -> None:
    groups = table(ParamGroup(("head",), lr_scale=0.5), ParamGroup(()))
    first, rest = groups.settings("head", (8, 10)), groups.settings("scale", ())
    assert (groups.rate(0.2, first), groups.rate(0.2, rest)) == (0.1, 0.2)
    groups.check_rates((1.0, 2.0, 3.0))
    assert (groups.rate((1.0, 2.0, 3.0), first), groups.rate((1.0, 2.0, 3.0), rest)) == (1.0, 3.0)


def test_a_wrong_number_of_rates_is_refused() -> None:
    with pytest.raises(PlanError, match="2 for the groups and one more for the parameters in none, found 2"):
        table(ParamGroup(("head",)), ParamGroup(())).check_rates((1.0, 2.0))
    table(ParamGroup(tuple(SHAPES))).check_rates((1.0,))  # no parameter is left over


@pytest.mark.parametrize("rate", [math.nan, math.inf, -1e-9, "0.1", None])
def test_a_rate_that_would_destroy_the_weights_is_refused(rate: Any) -> None:
    for rates in ((1.0, rate), (rate, 1.0), (1.0, 1.0, rate), *([rate] if isinstance(rate, float) else [])):
        with pytest.raises(PlanError, match="expected a finite rate of at least 0, found"):
            table(ParamGroup(("head",))).check_rates(rates)


def test_unknown_names_and_names_in_two_groups_are_refused() -> None:
    with pytest.raises(PlanError, match="group 1: no parameter of the model is called 'haed'"):
        table(ParamGroup(()), ParamGroup(("haed",)))
    with pytest.raises(PlanError, match="group 1: 'head' is in group 0 already"):
        table(ParamGroup(("head",)), ParamGroup(("head",)))


def test_a_group_refuses_invalid_values() -> None:
    with pytest.raises(PlanError, match="found the text 'head'"):
        ParamGroup("head")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="lr_scale=-1"):
        ParamGroup(("head",), lr_scale=-1.0)
