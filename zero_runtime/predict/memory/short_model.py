"""Removes most of the repeating blocks of a model that is to be traced: see repeated_blocks.py."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

from torch import nn

from zero_runtime.activations.rule import RecomputeRule
from zero_runtime.predict.memory.activation_count import LinearTrace
from zero_runtime.predict.memory.repeated_blocks import EDGE, BlockUnits, ShortLayout, equal_units, linear_with_blocks
from zero_runtime.predict.timing.segments import SegmentTable
from zero_runtime.unit_planner import UnitRules, block_modules, plan_units

Value = TypeVar("Value")
# Attributes in which equal blocks differ by their place.
PLACES = ("idx", "index", "layer_id")


class Shortened(NamedTuple):
    """The blocks that a model had: for each list that lost some the number before, and where the units of those left
    are; the lists in the order of their units. left: the blocks of all lists that the short model has."""

    lists: Sequence[tuple[int, BlockUnits]]
    left: int

    def complete(self, linear: LinearTrace) -> LinearTrace | None:
        """The trace of all blocks from that of those left; None if it does not determine that."""
        found: LinearTrace | None = linear
        all_blocks = self.left
        for blocks, units in reversed(self.lists):  # the last list first: it moves no unit of an earlier one
            others = all_blocks - units.layout.blocks
            found, all_blocks = found and linear_with_blocks(found, units, blocks, others), others + blocks
        return found

    def complete_table(self, table: SegmentTable[Value]) -> SegmentTable[Value]:
        for blocks, units in reversed(self.lists):
            table = table.with_blocks(units, blocks)
        return table


def treats_alike(recompute: RecomputeRule) -> bool:
    """Whether the rule treats all blocks alike, whatever their place, so that a few of them stand for all."""
    return recompute.kind != "every_nth" and recompute.offload == "none"


class FewerBlocks(NamedTuple):
    """A model that has lost most of its blocks, and where the units of those left are."""

    model: nn.Module
    left: Shortened


def short_copy(model: nn.Module, rules: UnitRules, recompute: RecomputeRule) -> FewerBlocks | None:
    """A copy with the first two blocks of each list, one period of those that repeat, and the rest, at least the last
    two.

    None if blocks do not repeat, but for the first and the last one; if the rule treats blocks by their place, or if
    units span blocks. The model is unchanged.
    """
    found = [(blocks, _layout([_signature(one) for one in blocks])) for blocks in _lists_of_blocks(model)]
    shorter = [(blocks, len(blocks), layout) for blocks, layout in found if layout is not None]
    if not shorter or not treats_alike(recompute):
        return None
    complete = [blocks._modules for blocks, _, _ in shorter]
    names = {module: name for name, module in model.named_modules()}
    try:  # a copy of all blocks takes longer than their tracing
        for blocks, count, layout in shorter:
            kept = [blocks[number] for number in layout.kept(count)]
            blocks._modules = type(blocks._modules)((str(place), block) for place, block in enumerate(kept))
        copied = copy.deepcopy(model)
    finally:
        for (blocks, _, _), modules in zip(shorter, complete, strict=True):
            blocks._modules = modules
    left = []
    for blocks, count, layout in shorter:
        _keep_in_configs(copied, count, layout.kept(count))
        units = _units_of(copied, copied.get_submodule(names[blocks]), rules, layout)
        if units is None:
            return None
        left.append((count, units))
    return FewerBlocks(copied, Shortened(left, len(block_modules(copied))))


def _lists_of_blocks(model: nn.Module) -> list[nn.ModuleList]:
    """The lists that hold the blocks of the model and nothing else, in their order; none if a block is in no list.

    A model of an encoder and a decoder has two.
    """
    blocks = block_modules(model)
    lists = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) and set(module) <= set(blocks)
    ]
    return lists if [block for one in lists for block in one] == blocks else []


def _layout(kinds: Sequence[object]) -> ShortLayout | None:
    """The fewest blocks that stand for all: the shortest period of the kinds of all blocks but the first and the last;
    None if a model without one of the periods is not shorter."""
    inner, most = kinds[1:-1], len(kinds) - 2 * EDGE
    for period in range(1, most // 2 + 1):
        if inner[period:] == inner[:-period]:
            return ShortLayout(2 * EDGE + period + most % period, period)
    return None


def _keep_in_configs(model: nn.Module, count: int, kept: Sequence[int]) -> None:
    """Lists of the model's configuration with an entry for each block lose those of the removed ones: models read some
    of them by a block's place."""
    configs = {id(one): one for module in model.modules() if (one := getattr(module, "config", None)) is not None}
    for config in configs.values():
        for name, value in vars(config).items():
            if isinstance(value, list) and len(value) == count:
                setattr(config, name, [value[number] for number in kept])


def _units_of(model: nn.Module, blocks: nn.Module, rules: UnitRules, layout: ShortLayout) -> BlockUnits | None:
    """Find the units of a shortened list's blocks; None if units span blocks."""
    place = {module: number for number, block in enumerate(blocks.children()) for module in block.modules()}
    of_units = [{place.get(module) for module in spec.modules} for spec in plan_units(model, rules)]
    return None if any(len(found) > 1 for found in of_units) else equal_units([one.pop() for one in of_units], layout)


def _signature(block: nn.Module) -> tuple[object, ...]:
    """What decides the operations of a block, as far as its modules show it: types, shapes and plain attributes."""
    return tuple(_facts(block))


def _facts(block: nn.Module) -> Iterator[object]:
    for name, module in block.named_modules():
        yield name, type(module)
        for key, value in vars(module).items():
            is_place = any(part in key for part in PLACES)
            if not is_place and isinstance(value, (bool, int, float, str, tuple, type(None))):
                yield key, repr(value)
    for name, param in block.named_parameters():
        yield name, param.shape, param.dtype, param.requires_grad
