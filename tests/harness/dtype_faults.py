"""Faults of precision: each makes the runtime hold, compute or send something in another dtype than it was asked for.

Each is a function that returns a context in which a runtime has to be built and used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from harness.models import TinyTransformer
from zero_runtime import unit_planner
from zero_runtime.collectives import Collectives, Pending
from zero_runtime.offload.file_layout import OffloadedUnit
from zero_runtime.offload.host import HostLocation
from zero_runtime.optim import sharded
from zero_runtime.optim.configs import HeldState
from zero_runtime.unit import Unit
from zero_runtime.unit_gradients import UnitGradients
from zero_runtime.unit_parameters import UnitParameters

Patch = AbstractContextManager[Any]


def around(owner: type, name: str, change: Callable[..., None], *, before: bool = False) -> Patch:
    """Calls `change(self, ...)` after (or before) the method."""
    method = getattr(owner, name)

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if before:
            change(self)
        result = method(self, *args, **kwargs)
        if not before:
            change(self)
        return result

    return mock.patch.object(owner, name, changed)


def setting(owner: type, method: str, *, before: bool = False, **attributes: Any) -> Patch:
    return around(owner, method, lambda self: vars(self).update(attributes), before=before)


def master_in_bf16() -> Patch:
    return setting(UnitParameters, "_decide_aliases", before=True, master_dtype=torch.bfloat16)


def master_of_one_unit_in_bf16() -> Patch:
    def change(self: UnitParameters) -> None:
        if self.name == "blocks.1":
            self.master_dtype = torch.bfloat16

    return around(UnitParameters, "_decide_aliases", change, before=True)


@contextmanager
def states_as(dtype: torch.dtype, *names: str, rank: int | None = None) -> Iterator[None]:
    make = sharded._zeros

    def zeros(unit: Unit, held: HeldState) -> torch.Tensor:
        state = make(unit, held)
        return state.to(dtype) if held.name in names and rank in (None, dist.get_rank()) else state

    with mock.patch.object(sharded, "_zeros", zeros):
        yield


def exp_avg_in_bf16() -> Patch:
    return states_as(torch.bfloat16, "exp_avg")


def exp_avg_of_rank_1_in_bf16() -> Patch:
    return states_as(torch.bfloat16, "exp_avg", rank=1)


def codes_left_in_fp32() -> Patch:
    return states_as(torch.float32, "exp_avg", "exp_avg_sq")


def reduced_in_bf16() -> Patch:
    return setting(UnitGradients, "__init__", _reduce_dtype=torch.bfloat16)


def reduced_in_fp32() -> Patch:
    return setting(UnitGradients, "__init__", _reduce_dtype=torch.float32)


def accumulated_in_bf16() -> Patch:
    return setting(UnitGradients, "__init__", grad_dtype=torch.bfloat16)


def local_sums_in_bf16() -> Patch:
    """Only the full gradients between micro-batches; their sum over the ranks is in fp32 again."""

    def change(self: UnitGradients) -> None:
        if self.unsharded_grad is not None and not self._filled:
            self._keep(self.unsharded_grad.to(torch.bfloat16))

    return around(UnitGradients, "_open", change)


def computed_in_bf16() -> Patch:
    return setting(UnitParameters, "_decide_aliases", before=True, _compute_dtype=torch.bfloat16)


def frozen_shards_in_bf16() -> Patch:
    def change(self: UnitParameters) -> None:
        if not self.trainable:
            self.param_dtype = torch.bfloat16

    return around(UnitParameters, "_decide_aliases", change, before=True)


def norms_of_one_block_not_kept() -> Patch:
    keeps = unit_planner._keeps_dtype
    return mock.patch.object(
        unit_planner, "_keeps_dtype", lambda name, rules: not name.startswith("blocks.1.") and keeps(name, rules)
    )


def host_states_in_bf16() -> Patch:
    allocate = HostLocation._allocate

    def changed(self: HostLocation) -> dict[str, torch.Tensor]:
        found = allocate(self)
        return {name: one.to(torch.bfloat16) if name == "exp_avg_sq" else one for name, one in found.items()}

    return mock.patch.object(HostLocation, "_allocate", changed)


def scratch_states_in_bf16() -> Patch:
    make = OffloadedUnit.of

    def changed(unit: Unit, states: dict[str, torch.Tensor], *, holds_params: bool) -> OffloadedUnit:
        record = make(unit, states, holds_params=holds_params)
        record.regions["exp_avg"] = replace(record.regions["exp_avg"], dtype=torch.bfloat16)
        return record

    return mock.patch.object(OffloadedUnit, "of", changed)


def gathered_in_fp32_messages() -> Patch:
    gather = Collectives.all_gather

    def changed(self: Collectives, full: torch.Tensor, shard: torch.Tensor, unit: str = "", **rest: Any) -> Pending:
        wide = full.float()
        gather(self, wide, shard.float(), unit, **rest).wait()
        full.copy_(wide)
        return Pending()

    return mock.patch.object(Collectives, "all_gather", changed)


def reduced_in_bf16_messages() -> Patch:
    """The gradient that is handed over, and the one that comes back, are in fp32."""
    reduce = Collectives.reduce

    def changed(self: Collectives, full: torch.Tensor, shard: torch.Tensor, unit: str = "") -> Pending:
        narrow, out = full.bfloat16(), shard.bfloat16()
        reduce(self, narrow, narrow if self.shard_count == 1 else out, unit).wait()
        shard.copy_(narrow if self.shard_count == 1 else out)
        return Pending()

    return mock.patch.object(Collectives, "reduce", changed)


def autocast_left_on() -> Patch:
    return torch.autocast("cpu", torch.bfloat16)


def autocast_inside_the_model() -> Patch:
    forward = TinyTransformer.forward

    def changed(self: TinyTransformer, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return forward(self, ids)

    return mock.patch.object(TinyTransformer, "forward", changed)
