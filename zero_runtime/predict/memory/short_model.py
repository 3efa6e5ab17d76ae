"""Removes most of the repeating blocks of a model that is to be traced: see repeated_blocks.py."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import nn

from zero_runtime.activations.rule import RecomputeRule
from zero_runtime.predict.memory.repeated_blocks import EDGE, BlockUnits, ShortLayout, equal_units
from zero_runtime.unit_planner import UnitRules, block_modules, plan_units

# Attributes in which equal blocks differ by their place.
PLACES = ("idx", "index", "layer_id")


class Shortened(NamedTuple):
    """The number of blocks before, and where the units of those that are left are."""

    blocks: int
    units: BlockUnits


def treats_alike(recompute: RecomputeRule) -> bool:
    """Whether the rule treats all blocks alike, whatever their place, so that a few of them stand for all."""
    return recompute.kind != "every_nth" and recompute.offload == "none"


class FewerBlocks(NamedTuple):
    """A model that has lost most of its blocks, and where the units of those left are."""

    model: nn.Module
    left: Shortened


def short_copy(model: nn.Module, rules: UnitRules, recompute: RecomputeRule) -> FewerBlocks | None:
    """A copy with the first two blocks, one period of those that repeat, and the rest, at least the last two.

    None if blocks do not repeat, but for the first and the last one; if the rule treats blocks by their place, or if
    units span blocks. The model is unchanged.
    """
    blocks = _list_of_blocks(model)
    layout = None if blocks is None or not treats_alike(recompute) else _layout([_signature(one) for one in blocks])
    if blocks is None or layout is None:
        return None
    complete, count = blocks._modules, len(blocks)
    kept = layout.kept(count)
    try:  # a copy of all blocks takes longer than their tracing
        blocks._modules = type(complete)((str(place), blocks[number]) for place, number in enumerate(kept))
        copied = copy.deepcopy(model)
    finally:
        blocks._modules = complete
    _keep_in_configs(copied, count, kept)
    left = _left(copied, rules, count, layout)
    return None if left is None else FewerBlocks(copied, left)


def _list_of_blocks(model: nn.Module) -> nn.ModuleList | None:
    """The list that holds the blocks of the model and nothing else."""
    blocks = block_modules(model)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and list(module) == blocks]
    return lists[0] if len(lists) == 1 else None


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


def _left(model: nn.Module, rules: UnitRules, blocks: int, layout: ShortLayout) -> Shortened | None:
    """Where the units of a shortened model's blocks are; None if units span blocks."""
    left = block_modules(model)
    place = {module: number for number, block in enumerate(left) for module in block.modules()}
    of_units = [{place.get(module) for module in spec.modules} for spec in plan_units(model, rules)]
    units = None if any(len(found) > 1 for found in of_units) else equal_units([one.pop() for one in of_units], layout)
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
