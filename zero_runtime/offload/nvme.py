"""Units whose shards are stored in a scratch file and read into host buffers while they are used.

See [Note: records] in file_layout.py. On a CPU the unit computes in the memory of those buffers. With a GPU (`copies`)
a host thread updates the shards, as in host.py, and each unit's next gather waits only for that unit's update. The
update runs on the host with a GPU too: the disk takes longer than the update, and direct I/O into a GPU's memory needs
drivers that few machines have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial

import torch

from zero_runtime.errors import OffloadError
from zero_runtime.offload.buffers import Moving, Slots
from zero_runtime.offload.copy_streams import Copies
from zero_runtime.offload.file_layout import OffloadedUnit, Visit, lay_out
from zero_runtime.offload.nvme_units import NvmeLocation, NvmeSeparateLocation, NvmeSharedLocation
from zero_runtime.offload.pipeline import pipeline
from zero_runtime.offload.scratch_file import ScratchFile, ScratchSettings, aligned_buffer
from zero_runtime.offload.speculation import Guess
from zero_runtime.offload.tier import Compute
from zero_runtime.unit import Unit


class NvmeTier:
    """All units of one rank that are offloaded to a scratch file. `settings.ahead` is the pipeline depth of a step.

    copies: given if the device has separate memory. holds_params: offloaded parameters are stored in the file, not in
    host memory.
    """

    def __init__(
        self,
        units: Iterable[Unit],
        states_of: Callable[[Unit], dict[str, torch.Tensor]],
        settings: ScratchSettings,
        rank: int,
        *,
        copies: Copies | None = None,
        holds_params: bool = True,
        speculative: bool = False,
    ) -> None:
        self._records = {
            unit.name: OffloadedUnit.of(unit, states_of(unit), holds_params=holds_params) for unit in units
        }
        self._copies = copies
        self._depth = settings.ahead
        records = list(self._records.values())
        self._file = ScratchFile(settings, lay_out(records, doubled=speculative), rank)
        in_memory = aligned_buffer if copies is None else lambda size: copies.on_host(size, torch.uint8)
        self._slots = Slots(self._file, records, in_memory)
        self._places = {name: self._place(record, speculative) for name, record in self._records.items()}
        self._guess: Guess | None = None
        self._early: dict[str, tuple[Visit, Moving]] = {}  # reads started before their update, by unit name
        self._worker = None if copies is None else ThreadPoolExecutor(1, thread_name_prefix="host-step")
        self._updating: Future[None] | None = None

    def _place(self, record: OffloadedUnit, speculative: bool) -> NvmeLocation:
        arrived = partial(self._arrived, record)
        if self._copies is None:
            found: NvmeLocation = NvmeSharedLocation(self._slots, record, arrived, speculative=speculative)
        else:
            found = NvmeSeparateLocation(self._slots, record, arrived, self._copies, speculative=speculative)
        record.unit.offload_to(found)
        return found

    @property
    def scratch_bytes(self) -> int:
        """Size of the scratch file in bytes."""
        return self._file.size

    def holds(self, unit: Unit) -> bool:
        """Whether some of the unit's shards are offloaded to this tier."""
        return unit.name in self._records

    # ---- complete units ----------------------------------------------------------------------------------------

    @contextmanager
    def resident(self, unit: Unit, *, writes: bool, fresh: bool = False) -> Iterator[None]:
        """Context in which all shards of a unit are in memory. `writes`: they are written back at the end; `fresh`:
        nothing is read first, and states are zero. Contexts nest, but one that writes must not be inside one that
        does not."""
        record = self._records[unit.name]
        if record.is_bound:
            assert record.is_written_back or not writes, f"{record.what}: what is written here would be lost"
            yield
            return
        if writes:
            self.reject()
        self._let_go(record)
        self._places[record.name].settle()
        visit = Visit(record)
        record.bind(self._slots.take(visit))
        if fresh:
            for state in record.states.values():
                state.zero_()
        else:
            self._slots.fetch(visit, whole=True).wait()
        record.is_written_back = writes
        try:
            yield
            if writes:
                self._slots.flush(visit).wait()
        finally:
            self._slots.give_back(visit)
            record.unbind()

    def _let_go(self, record: OffloadedUnit) -> None:
        """Wait for running updates and for a gather of this unit's offloaded parameters; drop reads prepared for it."""
        self._end_update()
        if record.unit.params_offloaded:
            self._places[record.name].end_bringing()
            record.unit.drop_full()
            self._places[record.name].drop()

    def reader(self, unit: Unit, name: str) -> Callable[[int, int], torch.Tensor] | None:
        """Function that reads elements [start, stop) of a tensor (param, master or a state) in the file; else None."""
        record = self._records.get(unit.name)
        if record is None or name not in record.regions:
            return None
        self._end_update()
        return partial(self._slots.read_range, record, record.regions[name])

    # ---- a step ------------------------------------------------------------------------------------------------

    def begin_update(self, units: Sequence[Unit]) -> None:
        """Start the first reads of `update`; the parameters must not be used before it or `forget_update`."""
        for unit in units[: 1 + self._depth]:
            record = self._records[unit.name]
            self._let_go(record)
            visit = Visit(record)
            self._early[record.name] = visit, self._slots.fetch(visit)

    def forget_update(self) -> None:
        """No update follows: free the records that were read."""
        for visit, moving in self._early.values():
            moving.wait()
            self._slots.give_back(visit)
        self._early.clear()

    def update(self, units: Sequence[Unit], compute: Compute) -> None:
        """`compute` each unit in a slot, in order, while the next records are read and the last ones written."""
        visits = []
        for record in (self._records[unit.name] for unit in units):
            if record.name in self._early:
                visits.append(self._early[record.name][0])
            else:
                self._let_go(record)
                visits.append(Visit(record))
        if self._worker is None:
            self._visit(visits, compute)
            return
        for visit in visits:
            self._separate(visit).begin_update()
        self._updating = self._worker.submit(self._visit_separate, visits, compute)

    def _visit(self, visits: Sequence[Visit], compute: Compute) -> None:
        pipeline(visits, self._fetch, partial(self._compute, compute), self._slots.flush, depth=self._depth)

    def _fetch(self, visit: Visit) -> Moving:
        early = self._early.pop(visit.record.name, None)
        return self._slots.fetch(visit) if early is None else early[1]

    def _compute(self, compute: Compute, visit: Visit) -> None:
        assert visit.slot is not None
        place = self._places[visit.record.name]
        compute(visit.record.unit, place.lent(visit.slot))
        place.computed()

    def _end_update(self) -> None:
        """Block until no unit is being updated; raises the error of an update that failed."""
        if self._updating is not None:
            updating, self._updating = self._updating, None
            updating.result()

    # ---- a step with a GPU -------------------------------------------------------------------------------------

    def _visit_separate(self, visits: Sequence[Visit], compute: Compute) -> None:
        """Runs in a separate thread. Each unit's place is notified when its unit is written, or of the error."""
        try:
            with torch.no_grad():
                pipeline(
                    visits,
                    self._fetch,
                    partial(self._compute, compute),
                    lambda visit: _Written(self._slots.flush(visit), self._separate(visit)),
                    depth=self._depth,
                )
        except BaseException as error:
            for visit in visits:
                self._separate(visit).end_update(error)
            raise

    def _separate(self, visit: Visit) -> NvmeSeparateLocation:
        place = self._places[visit.record.name]
        assert isinstance(place, NvmeSeparateLocation)
        return place

    # ---- a speculative step: see speculation.py -----------------------------------------------------------------

    def guess(self, units: Sequence[Unit], compute: Compute) -> None:
        """Read ahead in the order in which gradients arrive, which is the reverse of `units`."""
        assert self._guess is None, "a step guesses once"
        self._end_update()
        records = [self._records[unit.name] for unit in reversed(units)]
        self._guess = Guess(self._slots, records, partial(self._try, compute), depth=self._depth)

    def _try(self, compute: Compute, visit: Visit) -> None:
        assert visit.slot is not None
        compute(visit.record.unit, self._places[visit.record.name].lent_to_guess(visit.slot))

    def _arrived(self, record: OffloadedUnit) -> None:
        """Called when the unit's gradient of this step is complete."""
        if self._guess is not None:
            self._guess.arrived(record)

    def adopt(self) -> list[Unit]:
        guess, self._guess = self._guess, None
        if guess is None or not guess.end():
            return [record.unit for record in self._records.values() if record.unit.states_offloaded]
        for record in guess.records:
            assert record.other is not None
            self._let_go(record)
            self._places[record.name].settle()
            record.offset, record.other = record.other, record.offset
            self._places[record.name].adopt()
        return []

    def reject(self) -> None:
        guess, self._guess = self._guess, None
        if guess is not None:
            guess.end()

    # ---- counting and closing ----------------------------------------------------------------------------------

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        found: dict[str, list[torch.Tensor]] = {"params": [], "grads": [], "staging": self._slots.made()}
        for place in self._places.values():
            for component, tensors in place.tensors().items():
                found[component] += tensors
        return found

    def close(self) -> None:
        """Release the file and the memory. Idempotent."""
        with suppress(OffloadError):  # already reported, or from a step that was never taken
            self.reject()
        if self._worker is not None:
            self._worker.shutdown()
        for place in self._places.values():
            with suppress(Exception):  # the step that failed has already been reported
                place.settle()
        self._file.close()
        self._slots.close()
        if self._copies is not None:
            self._copies.close()
        self._places.clear()


class _Written:
    """The flush of a unit that is updated in another thread; its end completes the unit's update."""

    def __init__(self, moving: Moving, place: NvmeSeparateLocation) -> None:
        self._moving, self._place = moving, place

    def wait(self) -> None:
        self._moving.wait()
        self._place.end_update()
