"""Units whose shards are stored in a scratch file and read into host buffers while they are used.

file_layout.py has the layout of the file. On a CPU the unit computes in the memory of those buffers. With a GPU
(`copies`) a host thread updates the shards, as in host.py, and each unit's next gather waits only for that unit's
update. The update runs on the host with a GPU too: the disk takes longer than the update, and direct I/O into a GPU's
memory needs drivers that few machines have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial

import torch

from zero_runtime.offload.buffers import Moving, Slots
from zero_runtime.offload.copy_streams import Copies
from zero_runtime.offload.file_layout import OffloadedUnit, Visit, lay_out
from zero_runtime.offload.nvme_locations import NvmeLocation, NvmeSeparateLocation, NvmeSharedLocation
from zero_runtime.offload.pipeline import Waits, pipeline
from zero_runtime.offload.scratch_file import ScratchFile, aligned_buffer
from zero_runtime.offload_plan import OffloadPlan, Tier
from zero_runtime.state_tier import MASTER, PARAM, StatesOf, StateTier, Stored, Update, tensors_of
from zero_runtime.unit import Unit


class NvmeTier(StateTier):
    """All units of one rank that are offloaded to a scratch file. `plan.scratch.ahead` is the pipeline depth of a step.

    copies: given if the device has separate memory.
    """

    def __init__(
        self, units: Iterable[Unit], states_of: StatesOf, plan: OffloadPlan, copies: Copies | None, rank: int
    ) -> None:
        assert plan.scratch is not None
        in_file = plan.params is Tier.NVME
        self._records = {unit.name: OffloadedUnit.of(unit, states_of(unit), holds_params=in_file) for unit in units}
        self._copies = copies
        self._depth = plan.scratch.ahead
        records = list(self._records.values())
        self._file = ScratchFile(plan.scratch, lay_out(records), rank)
        in_memory = aligned_buffer if copies is None else lambda size: copies.on_host(size, torch.uint8)
        self._slots = Slots(self._file, records, in_memory)
        self._locations = {name: self._location_of(record) for name, record in self._records.items()}
        self._early: dict[str, Visit] = {}  # visits whose read has started before their update, by unit name
        self._worker = None if copies is None else ThreadPoolExecutor(1, "host-step", initializer=copies.enter_thread)
        self._updating: Future[None] | None = None

    def _location_of(self, record: OffloadedUnit) -> NvmeLocation:
        location: NvmeLocation
        if self._copies is None:
            location = NvmeSharedLocation(self._slots, record)
        else:
            location = NvmeSeparateLocation(self._slots, record, self._copies)
        record.unit.parameters.offload_to(location)
        return location

    @property
    def scratch_bytes(self) -> int:
        """Size of the scratch file in bytes."""
        return self._file.size

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
        self._let_go(record)
        self._locations[record.name].settle()
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
        if record.unit.parameters.params_offloaded:
            self._locations[record.name].end_bringing()
            record.unit.drop_full()
            self._locations[record.name].drop()

    def reader(self, unit: Unit, state: str) -> Callable[[int, int], torch.Tensor] | None:
        record = self._records.get(unit.name)
        name = PARAM if state == MASTER and not unit.parameters.master_offloaded else state
        if record is None or name not in record.regions:
            return None
        self._end_update()
        return partial(self._slots.read_range, record, record.regions[name])

    # ---- a step ------------------------------------------------------------------------------------------------

    def expect(self, units: Sequence[Unit]) -> None:
        """Start the first reads of `update`; the parameters must not be used before it or `forget`."""
        for unit in units[: 1 + self._depth]:
            visit = self._early[unit.name] = self._visit_of(unit)
            visit.reading = self._slots.fetch(visit)

    def forget(self) -> None:
        """No update follows: free the records that were read."""
        self._release_sources()
        for visit in self._early.values():
            self._fetch(visit).wait()
            self._slots.give_back(visit)
        self._early.clear()

    def update(self, units: Sequence[Unit], update: Update) -> None:
        """Update each unit in a slot, in order, while the next records are read and the last ones written."""
        self._release_sources()
        early, self._early = self._early, {}
        visits = [early[unit.name] if unit.name in early else self._visit_of(unit) for unit in units]
        for unit in units:
            self._locations[unit.name].begin_update()
        if self._worker is None:
            self._update(visits, update)
        else:
            self._updating = self._worker.submit(self._update, visits, update)

    def _visit_of(self, unit: Unit) -> Visit:
        record = self._records[unit.name]
        self._let_go(record)
        return Visit(record)

    def _update(self, visits: Sequence[Visit], update: Update) -> None:
        """Each unit's location is notified when its unit is written, or of the error."""
        try:
            with torch.no_grad():
                pipeline(visits, self._fetch, partial(self._compute, update), self._flush, depth=self._depth)
        except BaseException as error:
            for visit in visits:
                self._locations[visit.record.name].end_update(error)
            raise

    def _fetch(self, visit: Visit) -> Waits:
        return visit.reading or self._slots.fetch(visit)

    def _compute(self, update: Update, visit: Visit) -> None:
        assert visit.slot is not None
        location = self._locations[visit.record.name]
        update(visit.record.unit, location.lent(visit.slot))
        location.send_new_params()

    def _flush(self, visit: Visit) -> Moving:
        return self._slots.flush(visit, written=self._locations[visit.record.name].end_update)

    def _end_update(self) -> None:
        """Block until no unit is being updated; raises the error of an update that failed. From any thread."""
        if self._updating is not None:
            self._updating.result()

    def _release_sources(self) -> None:
        """Release gradients on the device; the first update needs the last of them anyway."""
        if self._copies is not None:
            self._copies.release_sources()

    # ---- counting and closing ----------------------------------------------------------------------------------

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        tensors = tensors_of(self._locations.values())
        tensors["staging"] += self._slots.made()
        return tensors

    def stored(self, unit: Unit) -> dict[str, Stored]:
        record = self._records.get(unit.name)
        regions = {} if record is None else record.regions
        return {name: Stored(region.numel, region.dtype) for name, region in regions.items()}

    def close(self) -> None:
        """Release the file and the memory. Idempotent."""
        if self._worker is not None:
            self._worker.shutdown()
        for location in self._locations.values():
            with suppress(Exception):  # the step that failed has already been reported
                location.settle()
        self._file.close()
        self._slots.close()
        if self._copies is not None:
            self._copies.close()
        self._locations.clear()
