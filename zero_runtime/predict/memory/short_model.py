"""Removes most of the equal blocks of a model that is to be traced: see repeated_blocks.py."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from zero_runtime.activations.rule import RecomputeRule
from zero_runtime.predict.memory.repeated_blocks import MIDDLE, SHORT, BlockUnits, equal_units
from zero_runtime.unit_planner import UnitRules, block_modules, plan_units

# Attributes in which equal blocks differ by their place.
PLACES = ("idx", "index", "layer_id")


class Shortened(NamedTuple):
    """The number of blocks before, and where the units of the five that are left are."""

    blocks: int
    units: BlockUnits


def treats_alike(recompute: RecomputeRule) -> bool:
    """Whether the rule treats all blocks alike, whatever their place, so that five of them stand for all."""
    return recompute.kind != "every_nth" and recompute.offload == "none"


class FewerBlocks(NamedTuple):
    """A model that has lost most of its equal blocks, and where the units of those left are."""

    model: nn.Module
    left: Shortened


def short_copy(model: nn.Module, rules: UnitRules, recompute: RecomputeRule) -> FewerBlocks | None:
    """A copy with the first two and the last three blocks, if all but the first and the last are equal.

    None if they are not, if the rule treats blocks by their place, or if units span blocks. The model is unchanged.
    """
    blocks = _equal_blocks(model, recompute)
    if blocks is None:
        return None
    complete, count = blocks._modules, len(blocks)
    kept = [*list(blocks)[:MIDDLE], *list(blocks)[MIDDLE + count - SHORT :]]
    try:  # a copy of all blocks takes longer than their tracing
        blocks._modules = type(complete)((str(number), block) for number, block in enumerate(kept))
        copied = copy.deepcopy(model)
    finally:
        blocks._modules = complete
    left = _left(copied, rules, count)
    return None if left is None else FewerBlocks(copied, left)


def _equal_blocks(model: nn.Module, recompute: RecomputeRule) -> nn.ModuleList | None:
    """The list of the blocks, if they are more than five and all but the first and the last are equal."""
    blocks = block_modules(model)
    if len(blocks) <= SHORT or not treats_alike(recompute):
        return None
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and list(module) == blocks]
    if len(lists) != 1 or len({_signature(block) for block in blocks[1:-1]}) > 1:
        return None
    return lists[0]


def _left(model: nn.Module, rules: UnitRules, blocks: int) -> Shortened | None:
    """Where the units of a shortened model's blocks are; None if units span blocks."""
    left = block_modules(model)
    place = {module: number for number, block in enumerate(left) for module in block.modules()}
    of_units = [{place.get(module) for module in spec.modules} for spec in plan_units(model, rules)]
    units = None if any(len(found) > 1 for found in of_units) else equal_units([found.pop() for found in of_units])
    return None if units is None else Shortened(blocks, units)


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
