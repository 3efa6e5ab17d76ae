"""The memory of a rank outside of training steps: while a model is built, and while a state or weights are written.

[Note: moments outside a step]
Each moment is counted from what the code allocates there, on top of the tensors that rest on the device:
building, `UnitBuilder`: all shards exist; one unit at a time has a full copy, which is then rounded if the compute and
the parameter dtypes differ; drawn values exist for one parameter at a time, with a mask of the elements that are unset.
saving, `BackgroundSaver`: a copy on the host of the parts that the rank writes.
exporting, `save_gathered_weights`: one unit is gathered at a time, and one parameter of it is rounded.
loading, `UnitBuilder._read`: parts of the shards are read block by block, when all units have memory.
Left out: offloaded states, buffers of the model, Python's own memory, such as the blocks in which a file is written,
and what decoding the states of an 8-bit optimizer takes. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zero_runtime.memory.counted_unit import Book, Copying, CountedUnit, CountRules
from zero_runtime.memory.model import UnitSize
from zero_runtime.precision import ITEMSIZE_BYTES, MixedPrecision

READ_NUMEL = 4 << 20  # elements read from a source at a time: bounds the memory needed in addition to the shards
READ_BYTES = 4  # of an element, at most
DRAWN_BYTES = 4  # models are built in fp32
RANDOM_STATE_BYTES = 5056  # of the CPU's generator, which is restored after each parameter
MASK_BYTES = 1  # of an element that is checked for being unset
STATE_BYTES = 4  # a state of the optimizer has fp32 values in a checkpoint


@dataclass(frozen=True)
class UnitParts:
    """One unit; largest_numel: elements of its largest parameter."""

    size: UnitSize
    precision: MixedPrecision
    largest_numel: int


@dataclass(frozen=True)
class MomentBytes:
    """Bytes of one rank. device: all tensors there, those that rest included. host: in addition to what offload keeps
    there. Ranks on a CPU have both in the same memory. why: what makes it the worst moment."""

    name: str
    device: int
    host: int
    why: str


@dataclass(frozen=True)
class OutsideStep:
    """The moments of one configuration without offload.

    resting: bytes on the device between steps. states: number of the optimizer's states of units that do not tell their
    own (`UnitSize.state_bytes`). on_cpu: the device is the
    host.
    """

    units: Sequence[UnitParts]
    rules: CountRules
    resting: int
    states: int
    on_cpu: bool

    def building(self, *, reads: bool = False) -> MomentBytes:
        """From drawn values. reads: from a folder of weights, part by part after all units have been given memory."""
        why = "the shards, and the full copy of one unit while it is filled"
        allocated, largest = self._allocated(), max(unit.largest_numel for unit in self.units)
        if reads:
            block = max(min(READ_NUMEL, unit.largest_numel, self._shard(unit)) for unit in self.units) * READ_BYTES
            filling = max(self._full(unit) + self._rounding(unit) for unit in self.units)
            device = allocated + (max(filling, block) if self.on_cpu else filling)
            return MomentBytes("loading weights", device, 0 if self.on_cpu else block, why)
        if self.on_cpu:
            filling = max(self._full(unit) + max(_drawing(unit), self._rounding(unit)) for unit in self.units)
            return MomentBytes("drawing initial values", allocated + filling, 0, why)
        filling = max(self._full(unit) + self._rounding(unit) for unit in self.units)
        host = largest * (DRAWN_BYTES + max(MASK_BYTES, self._conversion)) + RANDOM_STATE_BYTES
        return MomentBytes("drawing initial values", allocated + filling, host, why)

    def saving(self) -> MomentBytes:
        """Of a state, on the rank that writes the most."""
        rules = self.rules
        copied = 0
        for unit in self.units:
            size, kind = unit.size, unit.precision
            numel = -(-min(self._shard(unit), size.numel) // rules.replica_count)
            copied += numel * ITEMSIZE_BYTES[kind.master if size.trainable else kind.param]
            states = self.states * STATE_BYTES if size.state_bytes is None else size.state_bytes
            copied += round(numel * states) if size.trainable else 0
        return MomentBytes(
            "saving a state", self.resting, copied, "a copy of the parts that the rank writes, kept for the next save"
        )

    def exporting(self, itemsize: int) -> MomentBytes:
        """Of weights with this many bytes an element, on rank 0, which writes them."""
        device, host = 0, 0
        for unit in self.units:
            held = ITEMSIZE_BYTES[unit.precision.master if unit.size.trainable else unit.precision.param]
            rounded = unit.largest_numel * itemsize if held != itemsize else 0
            device = max(device, unit.size.padded_numel * held + rounded)
            host = max(host, unit.largest_numel * itemsize)
        why = "one unit at a time is gathered, and one parameter of it rounded"
        return MomentBytes("exporting weights", self.resting + device, 0 if self.on_cpu else host, why)

    def _shard(self, unit: UnitParts) -> int:
        return unit.size.padded_numel // self.rules.shard_count

    def _allocated(self) -> int:
        """Bytes of the tensors that are allocated before the first unit is filled."""
        book = Book()
        copying = Copying(book)
        for unit in self.units:
            CountedUnit(unit.size, unit.precision, self.rules, book, copying)
        return book.total

    def _full(self, unit: UnitParts) -> int:
        """Bytes of a full copy that exists for the filling alone."""
        plan, kind = self.rules.plan, unit.precision
        if plan.keeps_full_params:
            return 0
        return unit.size.padded_numel * ITEMSIZE_BYTES[kind.compute or kind.param]

    def _rounding(self, unit: UnitParts) -> int:
        kind = unit.precision
        return 0 if kind.computes_as_param else unit.size.padded_numel * ITEMSIZE_BYTES[kind.param]

    @property
    def _conversion(self) -> int:
        """Bytes of an element in the dtype to which values are converted on the host before they go to a GPU."""
        sizes = (ITEMSIZE_BYTES[unit.precision.compute or unit.precision.param] for unit in self.units)
        return max((size for size in sizes if size != DRAWN_BYTES), default=0)


def _drawing(unit: UnitParts) -> int:
    return unit.largest_numel * (DRAWN_BYTES + MASK_BYTES) + RANDOM_STATE_BYTES
