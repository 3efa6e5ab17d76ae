"""Units whose shards rest in a scratch file, and come into buffers of the host while they are used.

See [Note: records] in records.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import torch

from zero_runtime.errors import OffloadError
from zero_runtime.offload_memory import ALIGN_BYTES, aligned
from zero_runtime.residency import Home
from zero_runtime.tiers.nvme_guess import Guess, Try
from zero_runtime.tiers.pipeline import pipeline
from zero_runtime.tiers.records import Record, Region
from zero_runtime.tiers.resting import PARAM, Compute, Shards
from zero_runtime.tiers.scratch import ScratchFile, ScratchSettings, Transfer, aligned_buffer
from zero_runtime.unit import Unit


class NvmeTier:
    """All resting units of one rank. `settings.ahead` is the depth of the pipeline of a step."""

    def __init__(
        self,
        units: Iterable[Unit],
        states_of: Callable[[Unit], dict[str, torch.Tensor]],
        settings: ScratchSettings,
        rank: int,
        *,
        speculative: bool = False,
    ) -> None:
        self._records = {unit.name: Record.of(unit, states_of(unit)) for unit in units}
        self.nbytes = self._place(doubled=speculative)
        self._settings = settings
        self._file = ScratchFile(settings, self.nbytes, rank)
        self._slot_bytes = max((record.size for record in self._records.values()), default=0)
        self._guess: Guess | None = None
        self._early: dict[str, _Moving] = {}  # reads that have begun before their update, by unit
        self._lock = threading.Lock()
        self._slots: list[torch.Tensor] = []  # all of both kinds
        self._free: list[torch.Tensor] = []
        self._free_params: list[torch.Tensor] = []
        self._param_bytes = max((record.size - record.param_at for record in self._records.values()), default=0)
        for record in self._records.values():
            record.unit.rest_in(_Place(self, record))

    def _place(self, *, doubled: bool) -> int:
        """Give every record its place in the file, and a second one where a step may guess; the bytes of all."""
        offset = 0
        for record in self._records.values():
            unit = record.unit
            record.offset, offset = offset, offset + record.size
            if doubled and unit.states_rest:
                record.other, offset = offset, offset + record.size
                if not unit.params_rest:
                    record.staging = torch.zeros(unit.layout.shard_numel, dtype=unit.param_dtype)
        return offset

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
            assert record.is_written_back or not writes, f"{record.what}: what is written here would be lost"
            yield
            return
        if writes:
            self.reject()
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
        self._file.read(record.offset + first, buffer, record.what).wait()
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
        return self._reading(record, record.update_end)

    def _fetch(self, record: Record) -> _Moving:
        """Bind the unit to a slot and start reading all of it."""
        self._bind(record)
        return self._reading(record, record.size)

    def _reading(self, record: Record, end: int) -> _Moving:
        assert record.slot is not None
        return _Moving(self._moves(self._file.read, record, record.slot, end, record.offset))

    def _flush(self, record: Record) -> _Moving:
        """Start writing all of it back; the slot is free when that is done."""
        assert record.slot is not None
        moves = self._moves(self._file.write, record, record.slot, record.size, record.offset)
        return _Moving(moves, lambda: self._release(record))

    def _moves(
        self, move: Callable[[int, torch.Tensor, str], Transfer], record: Record, slot: torch.Tensor, end: int, at: int
    ) -> list[Transfer]:
        """The two parts of a record up to `end`, each always in the same blocks, to or from its place `at`."""
        parts = [(0, min(record.param_at, end)), (record.param_at, end)]
        return [move(at + low, slot[low:high], record.what) for low, high in parts if low < high]

    def _bind(self, record: Record) -> None:
        record.slot = self._slot(self._free, self._slot_bytes)
        record.is_whole = True
        record.bind(record.slot)

    def _slot(self, free: list[torch.Tensor], size: int) -> torch.Tensor:
        with self._lock:  # a guess takes slots in a thread of its own
            if not free:
                free.append(aligned_buffer(size))
                self._slots.append(free[-1])
            return free.pop()

    def _release(self, record: Record) -> None:
        assert record.slot is not None
        self._free.append(record.slot)
        record.slot, record.is_whole = None, False
        record.unbind()

    # ---- parameters alone --------------------------------------------------------------------------------------

    def begin_params(self, record: Record) -> None:
        """Start reading the unit's param_shard; a no-op while it is here or on its way."""
        if record.slot is not None:
            return
        record.slot = self._slot(self._free_params, self._param_bytes)
        part = record.slot[: record.size - record.param_at]
        record.reading = self._file.read(record.offset + record.param_at, part, record.what)

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

    # ---- a step that guesses: see nvme_guess.py ----------------------------------------------------------------

    def guess(self, units: Sequence[Unit], compute: Compute) -> None:
        """Reads ahead in the order in which the units' gradients come: against that of `units`."""
        assert self._guess is None, "a step guesses once"
        records = [self._records[unit.name] for unit in reversed(units)]
        self._guess = Guess(records, compute, self._read_try, self._write_try, depth=self._settings.ahead)

    def arrived(self, record: Record) -> None:
        """The gradient of this step is complete."""
        if self._guess is not None:
            self._guess.arrived(record)

    def adopt(self) -> list[Unit]:
        guess, right = self._guess, self._end_guess()
        if guess is None or not right:
            return [record.unit for record in self._records.values() if record.unit.states_rest]
        for record in (one.record for one in guess.tries.values()):
            assert record.other is not None
            self._settle(record)
            record.offset, record.other = record.other, record.offset
            if record.staging is not None:
                record.unit.param_shard.copy_(record.staging)
        return []

    def reject(self) -> None:
        self._end_guess()

    def _end_guess(self) -> bool:
        """Nothing of a guess is under way; whether there was one, and all of it was done."""
        guess, self._guess = self._guess, None
        if guess is None:
            return False
        try:
            return guess.end()
        finally:
            self._free += [one.slot for one in guess.tries.values() if one.slot is not None]

    def _read_try(self, one: Try) -> _Moving:
        one.slot = self._slot(self._free, self._slot_bytes)
        return _Moving(self._moves(self._file.read, one.record, one.slot, one.record.update_end, one.record.offset))

    def _write_try(self, one: Try) -> _Moving:
        slot, other = one.slot, one.record.other
        assert slot is not None
        assert other is not None

        def free() -> None:
            one.slot = None
            self._free.append(slot)

        return _Moving(self._moves(self._file.write, one.record, slot, one.record.size, other), free)

    # ---- the rest ----------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        staged = [record.staging for record in self._records.values() if record.staging is not None]
        return {"staging": [*self._slots, *staged]}

    def close(self) -> None:
        """Give file and buffers back. Idempotent."""
        with suppress(OffloadError):  # told before, or of a step that nobody made
            self.reject()
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

    def send_grad(self) -> None:
        """It stays; what waits for it may go on."""
        self._tier.arrived(self._record)


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
