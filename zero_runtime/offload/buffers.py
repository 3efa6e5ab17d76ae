"""Slots of the host's memory, and how records move between them and the scratch file."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from zero_runtime.offload.file_layout import OffloadedUnit, Region, Visit
from zero_runtime.offload.scratch_file import ScratchFile, Transfer, aligned_buffer
from zero_runtime.offload.tier import PARAM


class Slots:
    """They are made when they are first needed, and used again.

    `param_buffer`: memory of so many bytes for parameters alone, which may be what a device copies from.
    """

    def __init__(
        self, file: ScratchFile, records: Sequence[OffloadedUnit], param_buffer: Callable[[int], torch.Tensor]
    ) -> None:
        self._file = file
        self._slot_bytes = max((record.size for record in records), default=0)
        self._param_bytes = max((record.size - record.param_at for record in records), default=0)
        self._param_buffer = param_buffer
        self._lock = threading.Lock()  # steps and guesses take slots in threads of their own
        self._made: list[torch.Tensor] = []  # all of both kinds
        self._free: list[torch.Tensor] = []
        self._free_params: list[torch.Tensor] = []

    # ---- whole records -----------------------------------------------------------------------------------------

    def take(self, visit: Visit) -> torch.Tensor:
        visit.slot = self._from(self._free, lambda: aligned_buffer(self._slot_bytes))
        return visit.slot

    def give_back(self, visit: Visit) -> None:
        """A no-op without one."""
        if visit.slot is not None:
            self._free.append(visit.slot)
            visit.slot = None

    def fetch(self, visit: Visit, *, whole: bool = False) -> Moving:
        """Start reading what an update needs, or all of it."""
        record = visit.record
        slot = self.take(visit) if visit.slot is None else visit.slot
        return Moving(self._moves(self._file.read, record, slot, record.size if whole else record.update_end))

    def flush(self, visit: Visit, at: int | None = None) -> Moving:
        """Start writing all of it, to its place or to `at`; the slot is free when that is done."""
        assert visit.slot is not None
        moves = self._moves(self._file.write, visit.record, visit.slot, visit.record.size, at)
        return Moving(moves, lambda: self.give_back(visit))

    def _moves(
        self,
        move: Callable[[int, torch.Tensor, str], Transfer],
        record: OffloadedUnit,
        slot: torch.Tensor,
        end: int,
        at: int | None = None,
    ) -> list[Transfer]:
        """The two parts of a record up to `end`, each always in the same blocks."""
        place = record.offset if at is None else at
        parts = [(0, min(record.param_at, end)), (record.param_at, end)]
        return [move(place + low, slot[low:high], record.what) for low, high in parts if low < high]

    def _from(self, free: list[torch.Tensor], make: Callable[[], torch.Tensor]) -> torch.Tensor:
        with self._lock:
            if not free:
                free.append(make())
                self._made.append(free[-1])
            return free.pop()

    def read_range(self, record: OffloadedUnit, region: Region, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of one tensor, in memory of their own. Whole blocks are read: they alone have sums."""
        low = record.offset + region.offset + start * region.dtype.itemsize
        high = record.offset + region.offset + stop * region.dtype.itemsize
        step, middle = self._file.settings.block_bytes, record.offset + record.param_at
        begin, end = (middle, record.offset + record.size) if low >= middle else (record.offset, middle)
        first, last = max(begin, low // step * step), min(end, -(-high // step) * step)
        buffer = aligned_buffer(last - first)
        self._file.read(first, buffer, record.what).wait()
        return buffer[low - first : high - first].view(region.dtype).clone()

    # ---- parameters alone --------------------------------------------------------------------------------------

    def begin_params(self, record: OffloadedUnit) -> None:
        """Start reading the unit's param_shard; a no-op while it is here or on its way."""
        if record.is_bound or record.param_slot is not None:
            return
        record.param_slot = self._from(self._free_params, lambda: self._param_buffer(self._param_bytes))
        part = record.param_slot[: record.size - record.param_at]
        record.reading = self._file.read(record.offset + record.param_at, part, record.what)

    def fetch_params(self, record: OffloadedUnit) -> torch.Tensor:
        """[S] the unit's param_shard in memory; blocks until it is there."""
        if record.is_bound:
            return record.unit.param_shard
        self.begin_params(record)
        assert record.param_slot is not None
        self._end_reading(record)
        region = record.regions[PARAM]
        return record.param_slot[: region.nbytes].view(region.dtype)

    def drop_params(self, record: OffloadedUnit) -> None:
        """Nobody reads them any more, or nobody will."""
        if record.param_slot is not None:
            self._end_reading(record)
            self._free_params.append(record.param_slot)
            record.param_slot = None

    def _end_reading(self, record: OffloadedUnit) -> None:
        if record.reading is not None:
            record.reading.wait()
            record.reading = None

    # ---- the rest ----------------------------------------------------------------------------------------------

    def made(self) -> list[torch.Tensor]:
        """All that were ever needed, for counting."""
        return list(self._made)

    def close(self) -> None:
        """Let them go. Idempotent."""
        self._made.clear()
        self._free.clear()
        self._free_params.clear()


class Moving:
    """Several transfers as one, and what is done when they are, whatever became of them."""

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
