"""How the shards of a resting unit lie in the scratch file.

[Note: records]
Each resting unit has a record in the file: the master where it is a tensor of its own, then the optimizer's states,
each at a multiple of ALIGN_BYTES. Where parameters rest too, param_shard lies behind them, apart, since gathers read it
alone. A slot is a buffer of the host laid out like a record; a resident unit has its shards as views of a slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zero_runtime.offload_memory import aligned
from zero_runtime.tiers.resting import MASTER, PARAM
from zero_runtime.tiers.scratch import Transfer
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
class Record:
    """One resting unit. `param_at`: where the part that gathers read begins; `size`: bytes of all of it."""

    unit: Unit
    states: dict[str, torch.Tensor]  # the optimizer's, by name: empty while they rest
    regions: dict[str, Region]
    param_at: int
    size: int
    offset: int = 0  # in the file
    other: int | None = None  # of a second place for what a speculative step writes
    staging: torch.Tensor | None = None  # [S] param_dtype: such a step's parameters, where they do not rest
    slot: torch.Tensor | None = None  # while resident, or while only its parameters are here
    is_whole: bool = False  # all of it is in the slot
    is_written_back: bool = False
    reading: Transfer | None = None  # of its parameters alone

    @classmethod
    def of(cls, unit: Unit, states: dict[str, torch.Tensor]) -> Record:
        """A record without a place yet."""
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
        if unit.params_rest:
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
    def update_end(self) -> int:
        """Bytes that an update reads: parameters that are not the master are written by it alone."""
        return self.size if self.unit.master_is_param else self.param_at

    def bind(self, slot: torch.Tensor) -> None:
        """The unit's shards are views of the slot."""
        views = {name: region.of(slot) for name, region in self.regions.items()}
        self.unit.bind_shards(views.get(PARAM), views.get(MASTER))
        for name in self.states:
            self.states[name] = views[name]

    def unbind(self) -> None:
        """While it rests the unit has empty tensors: using them is an error of shape, not of value."""
        self.unit.bind_shards(
            torch.empty(0, dtype=self.unit.param_dtype) if PARAM in self.regions else None,
            torch.empty(0, dtype=self.unit.master_dtype) if MASTER in self.regions else None,
        )
        for name in self.states:
            self.states[name] = torch.empty(0, dtype=self.regions[name].dtype)
