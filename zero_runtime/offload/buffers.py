"""Slots (host buffers), and the transfers of records between slots and the scratch file."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from zero_runtime.offload.file_layout import OffloadedUnit, Region, Visit
from zero_runtime.offload.scratch_file import ScratchFile, Transfer, aligned_buffer
from zero_runtime.state_tier import PARAM

Then = Callable[[], None]


def nothing() -> None:
    """Called when a transfer needs no further action."""


class Slots:
    """Pools of host buffers, allocated when they are first needed and then reused.

    `param_buffer`: allocates a given number of bytes for parameters alone; a device may copy from this memory.
    """

    def __init__(
        self, file: ScratchFile, records: Sequence[OffloadedUnit], param_buffer: Callable[[int], torch.Tensor]
    ) -> None:
        self._file = file
        self._slot_bytes = max((record.size for record in records), default=0)
        self._param_bytes = max((record.size - record.param_at for record in records), default=0)
        self._param_buffer = param_buffer
        self._lock = threading.Lock()  # an update takes slots in a thread of its own
        self._made: list[torch.Tensor] = []  # every slot, of both kinds
        self._free: list[torch.Tensor] = []
        self._free_params: list[torch.Tensor] = []

    # ---- complete records --------------------------------------------------------------------------------------

    def take(self, visit: Visit) -> torch.Tensor:
        visit.slot = self._from(self._free, lambda: aligned_buffer(self._slot_bytes))
        return visit.slot

    def give_back(self, visit: Visit) -> None:
        """Return the visit's slot to the pool; a no-op if it has none."""
        if visit.slot is not None:
            self._free.append(visit.slot)
            visit.slot = None

    def fetch(self, visit: Visit, *, whole: bool = False) -> Moving:
        """Start reading the part of the record that an update needs, or with `whole` the complete record."""
        record = visit.record
        slot = self.take(visit) if visit.slot is None else visit.slot
        return Moving(self._moves(self._file.read, record, slot, record.size if whole else record.update_end))

    def flush(self, visit: Visit, *, written: Then = nothing) -> Moving:
        """Start writing the complete record. Waiting for the result frees the slot, and calls `written` if nothing
        failed."""
        assert visit.slot is not None
        moves = self._moves(self._file.write, visit.record, visit.slot, visit.record.size)
        return Moving(moves, lambda: self.give_back(visit), written)

    def _moves(
        self,
        move: Callable[[int, torch.Tensor, str], Transfer],
        record: OffloadedUnit,
        slot: torch.Tensor,
        end: int,
    ) -> list[Transfer]:
        """Transfers of a record's two parts up to byte `end`. Each part is always split into the same blocks."""
        parts = [(0, min(record.param_at, end)), (record.param_at, end)]
        return [move(record.offset + low, slot[low:high], record.what) for low, high in parts if low < high]

    def _from(self, free: list[torch.Tensor], make: Callable[[], torch.Tensor]) -> torch.Tensor:
        with self._lock:
            if not free:
                free.append(make())
                self._made.append(free[-1])
            return free.pop()

    def read_range(self, record: OffloadedUnit, region: Region, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of one tensor, as a copy. Reads complete blocks, because only these have checksums."""
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
        """Start reading the unit's param_shard; a no-op while it is in memory or being read."""
        if record.is_bound or record.param_slot is not None:
            return
        record.param_slot = self._from(self._free_params, lambda: self._param_buffer(self._param_bytes))
        part = record.param_slot[: record.size - record.param_at]
        record.reading = self._file.read(record.offset + record.param_at, part, record.what)

    def fetch_params(self, record: OffloadedUnit) -> torch.Tensor:
        """The unit's param_shard [S] in memory; blocks until it has been read."""
        if record.is_bound:
            return record.unit.param_shard
        self.begin_params(record)
        assert record.param_slot is not None
        self._end_reading(record)
        region = record.regions[PARAM]
        return record.param_slot[: region.nbytes].view(region.dtype)

    def drop_params(self, record: OffloadedUnit) -> None:
        """Free the slot of the parameters: a gather has read them, or none will."""
        if record.param_slot is not None:
            self._end_reading(record)
            self._free_params.append(record.param_slot)
            record.param_slot = None

    def _end_reading(self, record: OffloadedUnit) -> None:
        if record.reading is not None:
            record.reading.wait()
            record.reading = None

    # ---- all slots ---------------------------------------------------------------------------------------------

    def made(self) -> list[torch.Tensor]:
        """All slots allocated so far, for counting."""
        return list(self._made)

    def close(self) -> None:
        """Release all slots. Idempotent."""
        self._made.clear()
        self._free.clear()
        self._free_params.clear()


class Moving:
    """Several transfers waited for as one. `ended` is called when all have ended, `done` after it if none failed."""

    def __init__(self, transfers: list[Transfer], ended: Then = nothing, done: Then = nothing) -> None:
        self._transfers, self._ended, self._done = transfers, ended, done

    def wait(self) -> None:
        try:
            for transfer in self._transfers:
                transfer.wait()
        finally:
            # A slot must not be reused while another part of a failed transfer still reads or writes it.
            for transfer in self._transfers:
                transfer.settle()
            self._ended()
        self._done()
