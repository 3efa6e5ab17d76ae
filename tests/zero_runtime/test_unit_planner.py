"""plan_units puts every parameter into the right unit, whether modules own, share, tie, freeze or borrow it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.models import TinySpec, TinyTransformer
from torch import nn

from zero_runtime.errors import PlanError
from zero_runtime.precision import MixedPrecision
from zero_runtime.unit_planner import UnitRules, move_buffers, plan_units


def units_of(model: nn.Module) -> dict[str, list[str]]:
    return {spec.name: [name for name, _ in spec.params] for spec in plan_units(model)}


def test_an_untied_model_has_units_for_the_embedding_each_block_the_head_and_the_rest() -> None:
    model = TinyTransformer(TinySpec(blocks=2))
    units = units_of(model)
    block = ["norm.weight", "norm.bias", "mix.weight", "up.weight", "up.bias", "down.weight", "down.bias"]
    assert units == {
        "embed": ["embed.weight"],
        "blocks.0": [f"blocks.0.{name}" for name in block],
        "blocks.1": [f"blocks.1.{name}" for name in block],
        "root": ["norm.weight", "norm.bias"],
        "head": ["head.weight"],
    }


def test_tied_embedding_and_head_weights_belong_to_the_root_once() -> None:
    model = TinyTransformer(TinySpec(blocks=2, tied=True))
    units = units_of(model)
    assert list(units) == ["root", "blocks.0", "blocks.1"]
    assert units["root"] == ["embed.weight", "norm.weight", "norm.bias"]
    root = plan_units(model)[0]
    assert root.modules == (model,)
    assert root.params[0][1] is model.head.weight


def test_every_parameter_is_in_one_unit_in_the_order_of_registration() -> None:
    for tied in (False, True):
        model = TinyTransformer(TinySpec(tied=tied))
        found = [pair for spec in plan_units(model) for pair in spec.params]
        assert {name for name, _ in found} == {name for name, _ in model.named_parameters()}
        assert len(found) == len({id(param) for _, param in found})
        order = [name for name, _ in model.named_parameters()]
        for spec in plan_units(model):
            places = [order.index(name) for name, _ in spec.params]
            assert places == sorted(places)
        firsts = [order.index(spec.params[0][0]) for spec in plan_units(model)]
        assert firsts == sorted(firsts)


def test_the_module_of_a_unit_is_the_one_whose_forward_uses_its_parameters() -> None:
    model = TinyTransformer(TinySpec(blocks=2))
    modules = {spec.name: spec.modules for spec in plan_units(model)}
    assert modules["blocks.1"] == (model.blocks[1],)
    assert modules["head"] == (model.head,)
    assert modules["root"] == (model,)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2, bias=False)
        self.b = nn.Linear(2, 2, bias=False)


def blocks_of(count: int) -> Any:
    """A model whose attribute `blocks` is a list of pairs."""
    model = nn.Module()
    model.blocks = nn.ModuleList(Pair() for _ in range(count))
    return model


def test_a_weight_shared_inside_a_block_stays_in_the_block() -> None:
    model = blocks_of(2)
    model.blocks[0].b.weight = model.blocks[0].a.weight
    assert units_of(model) == {
        "blocks.0": ["blocks.0.a.weight"],
        "blocks.1": ["blocks.1.a.weight", "blocks.1.b.weight"],
    }


def test_a_weight_shared_by_two_blocks_belongs_to_their_lowest_common_ancestor() -> None:
    model = blocks_of(3)
    model.blocks[2].b.weight = model.blocks[1].b.weight
    assert units_of(model) == {
        "blocks.0": ["blocks.0.a.weight", "blocks.0.b.weight"],
        "blocks.1": ["blocks.1.a.weight"],
        "root": ["blocks.1.b.weight"],
        "blocks.2": ["blocks.2.a.weight"],
    }


def test_a_block_used_in_two_places_belongs_to_the_root() -> None:
    model = blocks_of(2)
    model.blocks.append(model.blocks[0])
    assert units_of(model)["root"] == ["blocks.0.a.weight", "blocks.0.b.weight"]


def test_a_module_list_inside_a_block_creates_no_separate_units() -> None:
    model = blocks_of(2)
    for block in model.blocks:
        block.experts = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
    assert list(units_of(model)) == ["blocks.0", "blocks.1"]


def test_a_list_of_one_member_is_a_block_if_no_list_has_more() -> None:
    model = blocks_of(1)
    assert list(units_of(model)) == ["blocks.0"]
    model.layers = nn.ModuleList(Pair() for _ in range(2))
    assert [spec.name for spec in plan_units(model) if spec.modules[0] not in [*model.layers]] == [
        "blocks.0.a",
        "blocks.0.b",
    ]


def test_a_module_list_of_different_classes_creates_no_block_units() -> None:
    model = nn.Module()
    model.parts = nn.ModuleList([nn.LayerNorm(2), nn.RMSNorm(2)])
    assert list(units_of(model)) == ["root"]


def test_a_weight_read_without_calling_its_module_is_in_no_unit_of_that_module() -> None:
    """nn.MultiheadAttention reads out_proj's weight itself: hooks on out_proj would never run, so never gather it."""
    model = nn.Sequential(nn.MultiheadAttention(4, 2, bias=False), nn.Linear(4, 4))
    assert "0.out_proj" not in units_of(model)


def test_nested_module_lists_create_units_only_for_modules_that_are_called() -> None:
    model = nn.Module()
    model.towers = nn.ModuleList(nn.ModuleList(Pair() for _ in range(2)) for _ in range(2))
    called = {module for spec in plan_units(model) for module in spec.modules}
    assert not any(isinstance(module, nn.ModuleList) for module in called)


def test_frozen_parameters_of_a_block_form_a_separate_unit() -> None:
    model = TinyTransformer(TinySpec(blocks=2))
    model.blocks[0].up.requires_grad_(False)
    model.head.requires_grad_(False)
    specs = {spec.name: spec for spec in plan_units(model)}
    frozen = specs["blocks.0 (frozen)"]
    assert [name for name, _ in frozen.params] == ["blocks.0.up.weight", "blocks.0.up.bias"]
    assert frozen.modules == specs["blocks.0"].modules == (model.blocks[0],)
    assert {name for name, spec in specs.items() if not spec.trainable} == {"blocks.0 (frozen)", "head (frozen)"}
    for spec in specs.values():
        assert {param.requires_grad for _, param in spec.params} == {spec.trainable}


def test_a_model_without_parameters_has_no_units() -> None:
    assert plan_units(nn.ReLU()) == []


def test_a_model_on_the_meta_device_has_the_same_units() -> None:
    with torch.device("meta"):
        model = TinyTransformer(TinySpec())
    assert units_of(model) == units_of(TinyTransformer(TinySpec()))


class Quantised(nn.Parameter):
    pass


def test_a_subclass_of_parameter_is_refused_by_name() -> None:
    model = blocks_of(2)
    model.blocks[1].a.weight = Quantised(torch.zeros(2, 2))
    with pytest.raises(PlanError, match=r"'blocks\.1\.a\.weight' is a Quantised: expected a plain nn\.Parameter"):
        plan_units(model)


def test_an_integer_parameter_is_refused_by_name() -> None:
    model = nn.Module()
    model.table = nn.Parameter(torch.zeros(3, dtype=torch.int32), requires_grad=False)
    with pytest.raises(PlanError, match=r"'table' has dtype torch\.int32: expected a floating-point dtype"):
        plan_units(model)


def test_move_buffers_keeps_their_dtype_and_persistence() -> None:
    model = nn.Module()
    model.register_buffer("rotary", torch.ones(3, dtype=torch.float32), persistent=False)
    model.register_buffer("mask", torch.ones(3, dtype=torch.bool))
    move_buffers(model, torch.device("meta"))
    assert {name: (b.device.type, b.dtype) for name, b in model.named_buffers()} == {
        "rotary": ("meta", torch.float32),
        "mask": ("meta", torch.bool),
    }
    assert list(model.state_dict()) == ["mask"]


# ---- unit size, dtypes, and weights that other modules hold ----------------------------------------------------------


def sizes_of(model: nn.Module, unit_numel: int) -> dict[str, int]:
    return {spec.name: spec.numel for spec in plan_units(model, UnitRules(unit_numel=unit_numel))}


def test_small_adjacent_units_are_merged_up_to_unit_numel() -> None:
    assert sizes_of(blocks_of(5), 16) == {
        "blocks.0 .. blocks.1": 16,
        "blocks.2 .. blocks.3": 16,
        "blocks.4": 8,
    }
    assert sizes_of(blocks_of(5), 10**9) == {"blocks.0 .. blocks.4": 40}
    (spec,) = plan_units(model := blocks_of(2), UnitRules(unit_numel=16))
    assert spec.modules == tuple(model.blocks)


def test_large_blocks_are_split_into_submodules_but_parameters_are_not_split() -> None:
    assert sizes_of(blocks_of(2), 4) == {f"blocks.{i}.{part}": 4 for i in range(2) for part in "ab"}
    assert sizes_of(blocks_of(2), 1) == sizes_of(blocks_of(2), 4), "a parameter may be larger than the bound"
    sequential = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.LayerNorm(2))
    assert sizes_of(sequential, 6) == {"0.0": 6, "0.1": 6, "root": 4}


def test_units_of_any_size_hold_every_parameter_once() -> None:
    for model in (TinyTransformer(TinySpec()), TinyTransformer(TinySpec(tied=True)), blocks_of(3)):
        for unit_numel in (1, 30, 1000, 5000, 10**9):
            specs = plan_units(model, UnitRules(unit_numel=unit_numel))
            found = [name for spec in specs for name, _ in spec.params]
            assert sorted(found) == sorted(name for name, _ in model.named_parameters())
            merged = [spec for spec in specs if len(spec.modules) > 1]
            assert all(spec.numel <= unit_numel for spec in merged)
            assert not any(model in spec.modules for spec in merged), "the root's life is the whole forward"


def test_frozen_and_trainable_units_are_not_merged_with_each_other() -> None:
    model = blocks_of(3)
    for block in model.blocks:
        block.a.requires_grad_(False)
    assert sizes_of(model, 100) == {"blocks.0 (frozen) .. blocks.2 (frozen)": 12, "blocks.0 .. blocks.2": 12}


def test_a_unit_size_below_1_is_refused() -> None:
    with pytest.raises(PlanError, match=r"zero\.unit_numel: expected at least 1.* found 0"):
        UnitRules(unit_numel=0)


def test_a_weight_that_another_module_holds_in_a_list_belongs_to_their_common_ancestor() -> None:
    model = TinyTransformer(TinySpec(blocks=2))
    model.norm.borrowed = [model.embed.weight]
    units = units_of(model)
    assert "embed.weight" in units["root"]
    assert next(spec for spec in plan_units(model) if spec.name == "root").shared


def test_parameters_that_match_a_keep_dtype_pattern_keep_their_dtype() -> None:
    model = TinyTransformer(TinySpec(blocks=2))
    model.norm.half()
    rules = UnitRules(MixedPrecision("bf16"), keep_dtype=("*norm*",))
    found = {spec.name: (spec.precision.param, spec.precision.master) for spec in plan_units(model, rules)}
    assert found == {
        "embed": ("bf16", "fp32"),
        "blocks.0 (fp32)": ("fp32", "fp32"),
        "blocks.0": ("bf16", "fp32"),
        "blocks.1 (fp32)": ("fp32", "fp32"),
        "blocks.1": ("bf16", "fp32"),
        "root (fp16)": ("fp16", "fp32"),
        "head": ("bf16", "fp32"),
    }
    model.norm.double()
    with pytest.raises(PlanError, match=r"keep_dtype: parameter 'norm\.weight' has dtype torch\.float64"):
        plan_units(model, rules)
