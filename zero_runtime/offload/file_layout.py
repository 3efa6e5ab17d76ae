"""How the shards of a resting unit lie in the scratch file.

[Note: records]
Each resting unit has a record in the file: the master where it is a tensor of its own, then the optimizer's states,
each at a multiple of ALIGN_BYTES. Where parameters rest in the file too, param_shard lies behind them, apart, since
gathers read it alone. A slot is a buffer of the host laid out like a record. A resident unit has its shards as views of
a slot; an update visits the record in one, and the unit has nothing to do with that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from zero_runtime.offload.memory import aligned
from zero_runtime.offload.scratch_file import Transfer
from zero_runtime.offload.tier import MASTER, PARAM, Shards
from zero_runtime.unit import Unit


@dataclass(frozen=True)
class Region:
    """One tensor of a record: `numel` elements of `dtype` from byte `offset` of the record."""

    offset: int
    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def of(self, slot: torch.Tensor) -> torch.Tensor:
        """This tensor as a view of a slot."""
        return slot[self.offset : self.offset + self.nbytes].view(self.dtype)


@dataclass
class OffloadedUnit:
    """One resting unit. `param_at`: where the part that gathers read begins; `size`: bytes of all of it."""

    unit: Unit
    states: dict[str, torch.Tensor]  # the optimizer's, by name: empty while they rest
    regions: dict[str, Region]
    param_at: int
    size: int
    offset: int = 0  # in the file
    other: int | None = None  # of a second place for what a speculative step writes
    is_bound: bool = False  # all of it is in a slot that the unit's shards are views of
    is_written_back: bool = False
    param_slot: torch.Tensor | None = None  # while its parameters alone are here, or on their way
    reading: Transfer | None = None  # of these

    @classmethod
    def of(cls, unit: Unit, states: dict[str, torch.Tensor], *, holds_params: bool) -> OffloadedUnit:
        """A record without a place yet. `holds_params`: those that rest do so in the file."""
        regions: dict[str, Region] = {}
        end = 0

        def add(name: str, dtype: torch.dtype, numel: int = unit.layout.shard_numel) -> None:
            nonlocal end
            regions[name] = Region(end, numel, dtype)
            end = aligned(end + regions[name].nbytes)

        if unit.master_rests:
            add(MASTER, unit.master_dtype)
        for name, state in states.items():
            add(name, state.dtype, state.numel())
        param_at = end
        if unit.params_rest and holds_params:
            add(PARAM, unit.param_dtype)
        return cls(unit, states, regions, param_at, end)

    @property
    def name(self) -> str:
        return self.unit.name

    @property
    def what(self) -> str:
        """As errors call it."""
        return f"unit {self.unit.name}"

    @property
    def holds_params(self) -> bool:
        """Whether the unit's param_shard rests in it."""
        return PARAM in self.regions

    @property
    def update_end(self) -> int:
        """Bytes that an update reads: parameters that are not the master are written by it alone."""
        return self.size if self.unit.master_is_param else self.param_at

    def views(self, slot: torch.Tensor) -> dict[str, torch.Tensor]:
        """Its tensors in a slot, by name."""
        return {name: region.of(slot) for name, region in self.regions.items()}

    def lent(self, slot: torch.Tensor, grad: torch.Tensor | None, param: torch.Tensor) -> Shards:
        """What an update of it works on. `param`: [S], for new parameters that do not rest in the record."""
        views = self.views(slot)
        param = views.get(PARAM, param)
        master = param if self.unit.master_is_param else views[MASTER]
        return Shards(self.unit.layout, master, grad, param, {name: views[name] for name in self.states})

    def bind(self, slot: torch.Tensor) -> None:
        """The unit's shards are views of the slot."""
        self.is_bound = True
        views = self.views(slot)
        self.unit.bind_shards(views.get(PARAM), views.get(MASTER))
        for name in self.states:
            self.states[name] = views[name]

    def unbind(self) -> None:
        """While it rests the unit has empty tensors: using them is an error of shape, not of value."""
        self.is_bound = False
        self.unit.bind_shards(
            torch.empty(0, dtype=self.unit.param_dtype) if self.holds_params else None,
            torch.empty(0, dtype=self.unit.master_dtype) if MASTER in self.regions else None,
        )
        for name in self.states:
            self.states[name] = torch.empty(0, dtype=self.regions[name].dtype)


@dataclass
class Visit:
    """One record in one slot, from the beginning of its reading to the end of its writing."""

    record: OffloadedUnit
    slot: torch.Tensor | None = None


def lay_out(records: Iterable[OffloadedUnit], *, doubled: bool) -> int:
    """Give every record its offset, and a second one where a step may guess; the bytes of all."""
    end = 0
    for record in records:
        record.offset, end = end, end + record.size
        if doubled and record.unit.states_rest:
            record.other, end = end, end + record.size
    return end
