"""Compares the dtypes of one step's real tensors and messages with those that the configuration asks for.

A tensor in the wrong dtype raises no error. A master in bf16 loses small updates, a reduction in bf16 loses small
gradients, and the loss still falls. So a run counts once what its tensors are: parameters, masters, optimizer states
and gradients between the last backward of a step and its update, wherever they are stored; sums over micro-batches
before the next one begins; messages by the dtype of the tensor that was sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from zero_runtime import dtype_rules
from zero_runtime.dtype_rules import AskedDTypes, DTypeCount, SizedUnit
from zero_runtime.dtypes import short_name
from zero_runtime.errors import DTypeError, some
from zero_runtime.ledger import Ledger
from zero_runtime.runtime import ZeroRuntime
from zero_runtime.state_tier import MASTER, PARAM, Stored
from zero_runtime.unit import Unit


class DTypeAudit:
    """The dtypes of one step. Enter it around all forwards and backwards of the step, and call `conclude` after its
    update."""

    def __init__(self, runtime: ZeroRuntime, asked: AskedDTypes) -> None:
        self._runtime, self._asked = runtime, asked
        self._units = [_sized(unit, runtime) for unit in runtime.units]
        self._found: list[DTypeCount] = []
        self._accumulated: dict[tuple[str, str], DTypeCount] = {}  # by unit and dtype: micro-batches add to one sum
        self._autocast: dict[tuple[int, str], DTypeCount] = {}  # by parameter and dtype: modules are called repeatedly
        self._hook: RemovableHandle | None = None

    def __enter__(self) -> DTypeAudit:
        self._hook = register_module_forward_pre_hook(self._before_module)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._hook is not None
        self._hook.remove()
        if kind is None:
            self._found = list(counts_now(self._runtime))

    def conclude(self, ledger: Ledger) -> dict[str, dict[str, int]]:
        """This rank's bytes by component and dtype; `ledger`: of the step. Every rank must call it.

        DTypeError on every rank if what was counted on one of them is not what was asked for.
        """
        refuse(self._runtime.collectives.gather_objects(self.differences(ledger)))
        return dtype_rules.bytes_by_dtype(self._counted(ledger))

    def differences(self, ledger: Ledger) -> list[str]:
        """What on this rank is not what was asked for."""
        return dtype_rules.differences(self._asked, self._units, self._counted(ledger))

    def _counted(self, ledger: Ledger) -> list[DTypeCount]:
        return [*self._found, *self._accumulated.values(), *self._autocast.values(), *_sent(ledger)]

    def _before_module(self, module: nn.Module, args: Any) -> None:
        if module is self._runtime.model:  # a micro-batch begins
            for count in _sums_now(self._runtime.units):
                self._accumulated[count.unit, count.dtype] = count
        device = self._runtime.device.type
        if torch.is_autocast_enabled(device):  # which casts the parameters that the module reads
            self._note_autocast(module, torch.get_autocast_dtype(device))

    def _note_autocast(self, module: nn.Module, dtype: torch.dtype) -> None:
        own = {id(param) for param in module.parameters(recurse=False)}
        for unit in self._runtime.units:
            for param in unit.params:
                if id(param) in own:
                    name = short_name(dtype)
                    self._autocast[id(param), name] = _count(dtype_rules.AUTOCAST, unit, Stored(param.numel(), dtype))


def refuse(troubles: Sequence[list[str]]) -> None:
    """Raise DTypeError if a rank has found differences; `troubles` is in rank order."""
    ranks = [rank for rank, texts in enumerate(troubles) if texts]
    if not ranks:
        return
    raise DTypeError(
        f"dtypes on rank {some(map(str, ranks))}: {'; '.join(troubles[ranks[0]])}. The numbers of this run would not "
        "be those of its configuration, so it ends without a result: remove what changes the dtype, or ask for it by "
        "the setting in brackets"
    )


def counts_now(runtime: ZeroRuntime) -> Iterator[DTypeCount]:
    """The tensors of every unit between the last backward of a step and its update."""
    for unit in runtime.units:
        stored = runtime.tier.stored(unit)
        param = stored.get(PARAM) or Stored.of(unit.param_shard)
        yield _count(dtype_rules.PARAMS, unit, param)
        for one in unit.params:
            yield _count(dtype_rules.GATHERED, unit, Stored.of(one))
        if unit.master_shard is not None:
            own = param if unit.parameters.master_is_param else Stored.of(unit.master_shard)
            yield _count(dtype_rules.MASTER, unit, stored.get(MASTER) or own)
        for name, state in runtime.optimizer.tensors_of(unit).items():
            yield _count(name, unit, stored.get(name) or Stored.of(state))
        if unit.grad_shard is not None:
            yield _count(dtype_rules.GRADS, unit, Stored.of(unit.grad_shard))
        if unit.gradients.reduced_in is not None:
            yield _count(dtype_rules.REDUCED, unit, Stored(unit.layout.padded_numel, unit.gradients.reduced_in))


def _sums_now(units: Iterable[Unit]) -> Iterator[DTypeCount]:
    """The gradients of earlier micro-batches: full ones, or shards of their sum over the ranks."""
    for unit in units:
        grad = unit.grad_shard if unit.gradients.unsharded_grad is None else unit.gradients.unsharded_grad
        if grad is not None:
            yield _count(dtype_rules.ACCUMULATED, unit, Stored.of(grad))


def _sent(ledger: Ledger) -> Iterator[DTypeCount]:
    for (kind, unit, dtype), volume in ledger.sent.items():
        yield DTypeCount(kind, unit, short_name(dtype), volume.elements, volume.bytes)


def _count(component: str, unit: Unit, stored: Stored) -> DTypeCount:
    numel, dtype = stored
    return DTypeCount(component, unit.name, short_name(dtype), numel, numel * dtype.itemsize)


def _sized(unit: Unit, runtime: ZeroRuntime) -> SizedUnit:
    layout = unit.layout
    params = tuple((segment.name, segment.numel) for segment in layout.segments)
    config = runtime.optimizer.config
    own = None if config.matrix_patterns is None else config.held_by(matrices=unit.matrices)
    codes = unit.param_shard.numel() if unit.parameters.is_coded else 0
    return SizedUnit(unit.name, params, layout.padded_numel, layout.shard_numel, unit.trainable, own, codes)
