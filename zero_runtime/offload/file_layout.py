"""Layout of an offloaded unit's shards in the scratch file.

Each offloaded unit has a record in the file: the master if it is a separate tensor, then the optimizer's states, each
at a multiple of ALIGN_BYTES. If parameters are stored in the file too, param_shard follows as a separate part, since
gathers read it alone. A slot is a host buffer laid out like a record. The shards of a resident unit are views of a
slot. An update also reads the record into a slot, but does not bind the unit's shards to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from zero_runtime.offload.pipeline import Waits
from zero_runtime.offload.scratch_file import Transfer
from zero_runtime.offload_plan import aligned
from zero_runtime.state_tier import MASTER, PARAM, Shards
from zero_runtime.unit import Unit


@dataclass(frozen=True)
class Region:
    """One tensor of a record: `numel` elements of `dtype`, starting at byte `offset` of the record."""

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
    """One offloaded unit and its record. `param_at`: byte where the part for gathers begins; `size`: bytes in total."""

    unit: Unit
    states: dict[str, torch.Tensor]  # the optimizer's states by name; empty tensors while they are only in the file
    regions: dict[str, Region]
    param_at: int
    size: int
    offset: int = 0  # in the file, in bytes
    is_bound: bool = False  # the record is in a slot, and the unit's shards are views of it
    is_written_back: bool = False
    param_slot: torch.Tensor | None = None  # while the parameters alone are in memory or being read
    reading: Transfer | None = None  # the read into param_slot

    @classmethod
    def of(cls, unit: Unit, states: dict[str, torch.Tensor], *, holds_params: bool) -> OffloadedUnit:
        """A record without an offset yet. `holds_params`: offloaded parameters are stored in the file."""
        regions: dict[str, Region] = {}
        end = 0

        def add(name: str, dtype: torch.dtype, numel: int = unit.layout.shard_numel) -> None:
            nonlocal end
            regions[name] = Region(end, numel, dtype)
            end = aligned(end + regions[name].nbytes)

        if unit.parameters.master_offloaded:
            add(MASTER, unit.parameters.master_dtype)
        for name, state in states.items():
            add(name, state.dtype, state.numel())
        param_at = end
        if unit.parameters.params_offloaded and holds_params:
            add(PARAM, unit.parameters.param_dtype)
        return cls(unit, states, regions, param_at, end)

    @property
    def name(self) -> str:
        return self.unit.name

    @property
    def what(self) -> str:
        """The name in error messages."""
        return f"unit {self.unit.name}"

    @property
    def holds_params(self) -> bool:
        """Whether the record contains the unit's param_shard."""
        return PARAM in self.regions

    @property
    def update_end(self) -> int:
        """Number of bytes that an update reads: parameters that are not the master are only written."""
        return self.size if self.unit.parameters.master_is_param else self.param_at

    def views(self, slot: torch.Tensor) -> dict[str, torch.Tensor]:
        """The record's tensors as views of a slot, by name."""
        return {name: region.of(slot) for name, region in self.regions.items()}

    def lent(self, slot: torch.Tensor, grad: torch.Tensor | None, param: torch.Tensor) -> Shards:
        """The shards that an update works on. `param` [S] takes new parameters that are not stored in the record."""
        views = self.views(slot)
        param = views.get(PARAM, param)
        master = param if self.unit.parameters.master_is_param else views[MASTER]
        return Shards(self.unit.layout, master, grad, param, {name: views[name] for name in self.states})

    def bind(self, slot: torch.Tensor) -> None:
        """Make the unit's shards and states views of the slot."""
        self.is_bound = True
        views = self.views(slot)
        self.unit.parameters.bind_shards(views.get(PARAM), views.get(MASTER))
        for name in self.states:
            self.states[name] = views[name]

    def unbind(self) -> None:
        """Give the unit empty tensors: using them before the next `bind` is a shape error, not a wrong value."""
        self.is_bound = False
        self.unit.parameters.bind_shards(
            torch.empty(0, dtype=self.unit.parameters.param_dtype) if self.holds_params else None,
            torch.empty(0, dtype=self.unit.parameters.master_dtype) if MASTER in self.regions else None,
        )
        for name in self.states:
            self.states[name] = torch.empty(0, dtype=self.regions[name].dtype)


@dataclass
class Visit:
    """One record in one slot, from the start of its read to the end of its write."""

    record: OffloadedUnit
    slot: torch.Tensor | None = None
    reading: Waits | None = None  # the read of the record into the slot, if it was started ahead of its update


def lay_out(records: Iterable[OffloadedUnit]) -> int:
    """Assign every record its offset; return the total bytes."""
    end = 0
    for record in records:
        record.offset, end = end, end + record.size
    return end
