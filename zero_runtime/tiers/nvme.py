"""Units whose shards rest in a scratch file, and come into buffers of the host while they are used.

[Note: records]
Each resting unit has a record in the file: the master where it is a tensor of its own, then the optimizer's states,
each at a multiple of ALIGN_BYTES. Where parameters rest too, param_shard lies behind them, apart, since gathers read it
alone. A slot is a buffer of the host laid out like a record; a resident unit has its shards as views of a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from zero_runtime.residency import Home
from zero_runtime.tiers.pipeline import pipeline
from zero_runtime.tiers.resting import MASTER, PARAM, Compute, Shards
from zero_runtime.tiers.scratch import ALIGN_BYTES, ScratchFile, ScratchSettings, Transfer, aligned, aligned_buffer
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
    offset: int
    regions: dict[str, Region]
    param_at: int
    size: int
    slot: torch.Tensor | None = None  # while resident, or while only its parameters are here
    is_whole: bool = False  # all of it is in the slot
    is_written_back: bool = False
    reading: Transfer | None = None  # of its parameters alone

    @property
    def name(self) -> str:
        return self.unit.name


class NvmeTier:
    """All resting units of one rank. `settings.ahead` is the depth of the pipeline of a step."""

    def __init__(
        self,
        units: Iterable[Unit],
        states_of: Callable[[Unit], dict[str, torch.Tensor]],
        settings: ScratchSettings,
        rank: int,
    ) -> None:
        self._records: dict[str, Record] = {}
        offset = 0
        for unit in units:
            record = _record(unit, states_of(unit), offset)
            self._records[unit.name] = record
            offset += record.size
        self.nbytes = offset
        self._settings = settings
        self._file = ScratchFile(settings, offset, rank)
        self._slot_bytes = max((record.size for record in self._records.values()), default=0)
        self._early: dict[str, _Moving] = {}  # reads that have begun before their update, by unit
        self._slots: list[torch.Tensor] = []  # all of both kinds
        self._free: list[torch.Tensor] = []
        self._free_params: list[torch.Tensor] = []
        self._param_bytes = max((record.size - record.param_at for record in self._records.values()), default=0)
        for record in self._records.values():
            record.unit.rest_in(_Place(self, record))

    def holds(self, unit: Unit) -> bool:
        """Whether some of the unit's shards rest here."""
        return unit.name in self._records

    # ---- whole units -------------------------------------------------------------------------------------------

    @contextmanager
    def resident(self, unit: Unit, *, writes: bool, fresh: bool = False) -> Iterator[None]:
        """All shards of a unit are in memory inside. `writes`: they are written back at the end; `fresh`: nothing is
        read first, and states are zero. It nests; what writes must not be inside what does not."""
        record = self._records[unit.name]
        if record.is_whole:
            assert record.is_written_back or not writes, f"{self._what(record)}: what is written here would be lost"
            yield
            return
        if fresh:
            self._bind(record)
            for state in record.states.values():
                state.zero_()
        else:
            self._settle(record)
            self._fetch(record).wait()
        record.is_written_back = writes
        try:
            yield
        finally:
            if writes:
                self._flush(record).wait()
            else:
                self._release(record)

    def update(self, units: Sequence[Unit], compute: Compute) -> None:
        """`compute` each unit while it is resident, in order; the next are read and the last written meanwhile."""
        records = [self._records[unit.name] for unit in units]
        for record in records:
            if record.name not in self._early:
                self._settle(record)
        pipeline(
            records,
            self._fetch_for_update,
            lambda record: compute(record.unit, Shards.of(record.unit, record.states)),
            self._flush,
            depth=self._settings.ahead,
        )

    def _settle(self, record: Record) -> None:
        """No gather may still read the parameters' own buffer, and none may be about to."""
        if PARAM in record.regions:
            record.unit.drop_full()
            self.drop_params(record)

    def reader(self, unit: Unit, name: str) -> Callable[[int, int], torch.Tensor] | None:
        """How elements [start, stop) of one tensor (param, master or a state) are read where it rests here."""
        record = self._records.get(unit.name)
        if record is None or name not in record.regions:
            return None
        return partial(self._read, record, record.regions[name])

    def _read(self, record: Record, region: Region, start: int, stop: int) -> torch.Tensor:
        """In memory of their own."""
        low = region.offset + start * region.dtype.itemsize
        high = region.offset + stop * region.dtype.itemsize
        first = low // ALIGN_BYTES * ALIGN_BYTES
        buffer = aligned_buffer(aligned(high - first))
        self._file.read(record.offset + first, buffer, self._what(record)).wait()
        return buffer[low - first : high - first].view(region.dtype).clone()

    def begin_update(self, units: Sequence[Unit]) -> None:
        """Start reading what `update` needs first; nothing may use the parameters until it or `forget_update`."""
        for unit in units[: 1 + self._settings.ahead]:
            record = self._records[unit.name]
            self._settle(record)
            self._early[record.name] = self._fetch_for_update(record)

    def forget_update(self) -> None:
        """No update follows: what was read is let go."""
        for name, moving in self._early.items():
            moving.wait()
            self._release(self._records[name])
        self._early.clear()

    def _fetch_for_update(self, record: Record) -> _Moving:
        """Parameters that are not the master are written by an update and never read by it."""
        if record.name in self._early:
            return self._early.pop(record.name)
        self._bind(record)
        is_master = record.unit.master_shard is record.unit.param_shard
        return self._reading(record, record.size if is_master else record.param_at)

    def _fetch(self, record: Record) -> _Moving:
        """Bind the unit to a slot and start reading all of it."""
        self._bind(record)
        return self._reading(record, record.size)

    def _reading(self, record: Record, end: int) -> _Moving:
        assert record.slot is not None
        return _Moving(self._moves(self._file.read, record, record.slot, end))

    def _flush(self, record: Record) -> _Moving:
        """Start writing all of it back; the slot is free when that is done."""
        assert record.slot is not None
        moves = self._moves(self._file.write, record, record.slot, record.size)
        return _Moving(moves, lambda: self._release(record))

    def _moves(
        self, move: Callable[[int, torch.Tensor, str], Transfer], record: Record, slot: torch.Tensor, end: int
    ) -> list[Transfer]:
        """The two parts of a record up to `end`, each always in the same blocks."""
        parts = [(0, min(record.param_at, end)), (record.param_at, end)]
        what = self._what(record)
        return [move(record.offset + low, slot[low:high], what) for low, high in parts if low < high]

    def _bind(self, record: Record) -> None:
        record.slot = self._slot(self._free, self._slot_bytes)
        record.is_whole = True
        views = {name: region.of(record.slot) for name, region in record.regions.items()}
        record.unit.bind_shards(views.get(PARAM), views.get(MASTER))
        for name in record.states:
            record.states[name] = views[name]

    def _slot(self, free: list[torch.Tensor], size: int) -> torch.Tensor:
        if not free:
            free.append(aligned_buffer(size))
            self._slots.append(free[-1])
        return free.pop()

    def _release(self, record: Record) -> None:
        assert record.slot is not None
        self._free.append(record.slot)
        record.slot, record.is_whole = None, False
        _unbind(record)

    # ---- parameters alone --------------------------------------------------------------------------------------

    def begin_params(self, record: Record) -> None:
        """Start reading the unit's param_shard; a no-op while it is here or on its way."""
        if record.slot is not None:
            return
        record.slot = self._slot(self._free_params, self._param_bytes)
        part = record.slot[: record.size - record.param_at]
        record.reading = self._file.read(record.offset + record.param_at, part, self._what(record))

    def fetch_params(self, record: Record) -> torch.Tensor:
        """[S] the unit's param_shard in memory; blocks until it is there."""
        if record.is_whole:
            return record.unit.param_shard
        self.begin_params(record)
        assert record.slot is not None
        if record.reading is not None:
            record.reading.wait()
            record.reading = None
        region = record.regions[PARAM]
        return record.slot[: region.nbytes].view(region.dtype)

    def drop_params(self, record: Record) -> None:
        """The gather has read them, or nobody will."""
        if record.is_whole or record.slot is None:
            return
        if record.reading is not None:
            record.reading.wait()
            record.reading = None
        self._free_params.append(record.slot)
        record.slot = None

    def _what(self, record: Record) -> str:
        return f"unit {record.unit.name}"

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        return {"staging": self._slots}

    def close(self) -> None:
        """Give file and buffers back. Idempotent."""
        self._file.close()
        self._slots.clear()
        self._free.clear()
        self._free_params.clear()


class _Place(Home):
    """Where one unit's shards rest, as the unit sees it."""

    def __init__(self, tier: NvmeTier, record: Record) -> None:
        self._tier, self._record = tier, record
        self._params_rest = PARAM in record.regions

    def begin_fetch(self) -> None:
        if self._params_rest:
            self._tier.begin_params(self._record)

    def fetch(self) -> torch.Tensor | None:
        return self._tier.fetch_params(self._record) if self._params_rest else None

    def drop(self) -> None:
        if self._params_rest:
            self._tier.drop_params(self._record)


class _Moving:
    """Several transfers as one, and what is done when they are."""

    def __init__(self, transfers: list[Transfer], then: Callable[[], None] = lambda: None) -> None:
        self._transfers = transfers
        self._then = then

    def wait(self) -> None:
        try:
            for transfer in self._transfers:
                transfer.wait()
        finally:
            for transfer in self._transfers:
                transfer.settle()
            self._then()


def _record(unit: Unit, states: dict[str, torch.Tensor], offset: int) -> Record:
    regions: dict[str, Region] = {}
    end = 0

    def add(name: str, dtype: torch.dtype) -> None:
        nonlocal end
        regions[name] = Region(end, unit.layout.shard_numel, dtype)
        end = aligned(end + regions[name].nbytes)

    if unit.master_rests:
        add(MASTER, unit.master_dtype)
    for name in states:
        add(name, torch.float32)
    param_at = end
    if unit.params_rest:
        add(PARAM, unit.param_dtype)
    return Record(unit, states, offset, regions, param_at, end)


def _unbind(record: Record) -> None:
    """While it rests the unit has empty tensors: using them is an error of shape, not of value."""
    record.unit.bind_shards(
        torch.empty(0, dtype=record.unit.param_dtype) if PARAM in record.regions else None,
        torch.empty(0, dtype=record.unit.master_dtype) if MASTER in record.regions else None,
    )
    for name in record.states:
        record.states[name] = torch.empty(0)
