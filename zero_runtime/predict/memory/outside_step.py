"""The memory of a rank outside of training steps: while a model is built, and while a state or weights move.

[Note: moments outside a step]
Each moment is counted from what the code allocates there, on top of the tensors that exist on the device:
building, `UnitBuilder`: all shards exist; one unit at a time has a full copy, which is then rounded if the compute and
the parameter dtypes differ; drawn values exist for one parameter at a time, with a mask of the elements that are unset.
Weights of a folder are read block by block into the shards, when all units have memory (`UnitBuilder._read`).
loading, `load_checkpoint`, into a runtime that has made no step: on a CPU the file is read into the shards themselves,
for a GPU block by block; then full copies that are kept between steps are gathered again.
saving, `BackgroundSaver`: a copy on the host of the parts that the rank writes. With a scratch file there is none: the
parts are written one after another, each read from that file.
exporting, `save_gathered_weights`: one unit is gathered at a time, and one parameter of it is rounded.
`export-weights`, a process of its own: one block of a parameter at a time is read, and rounded.
Left out: buffers of the model, Python's own memory, such as the blocks in which a file is written, what decoding
states of fewer than 32 bits takes, and the joining of slices (tensor parallelism). Standard library only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from zero_runtime.flat_layout import READ_NUMEL
from zero_runtime.offload.memory import Moves, largest_read
from zero_runtime.precision import ITEMSIZE_BYTES, MixedPrecision
from zero_runtime.predict.memory.counted_unit import Book, Copying, CountedUnit, CountRules
from zero_runtime.state_bytes import UnitSize

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

    @property
    def held_bytes(self) -> int:
        """Bytes of an element of the weights: the masters, or the parameters of a frozen unit, of codes in fp32."""
        if self.precision.weights is not None:
            return 4
        return ITEMSIZE_BYTES[self.precision.master if self.size.trainable else self.precision.param]

    @property
    def is_away(self) -> bool:
        """Whether some shards are not on the device: then no full copy is kept between steps."""
        return self.size.params_offloaded or (self.size.optimizer_offloaded and self.size.trainable)


@dataclass(frozen=True)
class MomentBytes:
    """Bytes of one rank. device: all tensors there. host: all tensors there, what offload keeps included. Ranks on a
    CPU have both in the same memory. why: what makes it the worst moment. alone: it is one process, without ranks."""

    name: str
    device: int
    host: int
    why: str
    alone: bool = False


@dataclass(frozen=True)
class HostStore:
    """What offload keeps in a rank's host memory. fresh: bytes before the first step; stepped: bytes after it. file:
    how the scratch file is used, and the bytes of its blocks; None without one."""

    fresh: int = 0
    stepped: int = 0
    file: tuple[Moves, int] | None = None


@dataclass(frozen=True)
class OutsideStep:
    """The moments of one configuration.

    resting: bytes on the device between steps. states: number of the optimizer's states of units that do not tell their
    own (`UnitSize.state_bytes`). on_cpu: the device is the host. store: of offload. with_frozen: whether a state has
    frozen parameters.
    """

    units: Sequence[UnitParts]
    rules: CountRules
    resting: int
    states: int
    on_cpu: bool
    store: HostStore = HostStore()
    with_frozen: bool = True

    def building(self, *, reads: bool = False) -> MomentBytes:
        """From drawn values. reads: from a folder of weights, part by part after all units have been given memory."""
        why = "the shards, and the full copy of one unit while it is filled"
        allocated, largest = self._allocated(), max(unit.largest_numel for unit in self._distinct)
        filling = max(self._full(unit) + self._rounding(unit) for unit in self._distinct)
        if reads:
            block = max(min(READ_NUMEL, unit.largest_numel, self._shard(unit)) for unit in self._distinct) * READ_BYTES
            device = allocated + (max(filling, block) if self.on_cpu else filling)
            host = 0 if self.on_cpu else max(block, self._refreshing)
            return MomentBytes("loading weights", device, self.store.fresh + host, why)
        if self.on_cpu:
            filling = max(self._full(unit) + max(_drawing(unit), self._rounding(unit)) for unit in self._distinct)
            return MomentBytes("drawing initial values", allocated + filling, self.store.fresh, why)
        host = largest * (DRAWN_BYTES + max(MASK_BYTES, self._conversion)) + RANDOM_STATE_BYTES
        return MomentBytes("drawing initial values", allocated + filling, self.store.fresh + host, why)

    def loading(self) -> MomentBytes:
        """Of a checkpoint with masters and states of the same dtypes, before the first step."""
        keeps = self.rules.plan.keeps_full_params
        gathered = max((self._rounding(unit) for unit in self._distinct if not unit.is_away), default=0) if keeps else 0
        block = max(min(READ_NUMEL, unit.largest_numel, self._shard(unit)) for unit in self._distinct) * READ_BYTES
        host = 0 if self.on_cpu else max(block, self._refreshing)
        why = "the shards, filled from the files" + ("; full copies are gathered again" if gathered else "")
        return MomentBytes("loading a state", self._allocated() + gathered, self.store.fresh + host, why)

    def saving(self) -> MomentBytes:
        """Of a state, on the rank that writes the most."""
        name, why = "saving a state", "a copy of the parts that the rank writes, kept for the next save"
        if self.store.file is None:
            coded = (unit for unit in self._distinct if unit.precision.weights is not None)
            read_back = max((self._shard(unit) * unit.held_bytes for unit in coded), default=0)
            return MomentBytes(name, self.resting + read_back, self.store.stepped + self.copied(), why)
        moves, block_bytes = self.store.file
        reads = [
            largest_read((unit.size, unit.precision), moves, self._largest_part(unit), block_bytes)
            for unit in self._distinct
        ]
        why = "one part at a time of those in the scratch file"
        return MomentBytes(name, self.resting, self.store.stepped + max(reads), why)

    def copied(self) -> int:
        """Bytes of the copy that a save keeps in host memory, on the rank that writes the most."""
        if self.store.file is not None:
            return 0
        return sum(count * self._written(unit) for unit, count in self._distinct.items())

    def _written(self, unit: UnitParts) -> int:
        size = unit.size
        if not (size.trainable or self.with_frozen):
            return 0
        numel = -(-min(self._shard(unit), size.numel) // self.rules.replica_count)
        states = self.states * STATE_BYTES if size.state_bytes is None else size.state_bytes
        return numel * unit.held_bytes + (round(numel * states) if size.trainable else 0)

    def exporting(self, itemsize: int) -> MomentBytes:
        """Of weights with this many bytes an element, on rank 0, which writes them."""
        device, host = 0, 0
        for unit in self._distinct:
            held = unit.held_bytes
            rounded = unit.largest_numel * itemsize if held != itemsize else 0
            brought = self._shard(unit) * held if unit.is_away and not self.on_cpu else 0
            device = max(device, unit.size.padded_numel * held + max(rounded, brought))
            host = max(host, unit.largest_numel * itemsize)
        why = "one unit at a time is gathered, and one parameter of it rounded"
        host = self.store.stepped + (0 if self.on_cpu else host)
        return MomentBytes("exporting weights", self.resting + device, host, why)

    def exporting_files(self, itemsize: int) -> MomentBytes:
        """Of the weights of a checkpoint by a process of its own, without a device."""
        blocks = (
            min(READ_NUMEL, unit.largest_numel) * (unit.held_bytes + (itemsize if unit.held_bytes != itemsize else 0))
            for unit in self._distinct
        )
        why = "one process reads and rounds a block of a parameter at a time"
        return MomentBytes("export-weights", 0, max(blocks), why, alone=True)

    def _largest_part(self, unit: UnitParts) -> int:
        """Elements of the largest part of a parameter that one rank writes."""
        return min(unit.largest_numel, -(-self._shard(unit) // self.rules.replica_count))

    def _shard(self, unit: UnitParts) -> int:
        return unit.size.padded_numel // self.rules.shard_count

    def _allocated(self) -> int:
        """Bytes of the tensors that are allocated before the first unit is filled."""
        total = 0
        for unit, count in self._distinct.items():
            book = Book()
            CountedUnit(unit.size, unit.precision, self.rules, book, Copying(book))
            total += count * book.total
        return total

    @cached_property
    def _distinct(self) -> Counter[UnitParts]:
        """How many units there are of each kind: the blocks of a model are alike."""
        return Counter(self.units)

    def _full(self, unit: UnitParts) -> int:
        """Bytes of a full copy that exists for the filling alone."""
        plan, kind = self.rules.plan, unit.precision
        if plan.keeps_full_params and kind.weights is None:
            return 0
        return unit.size.padded_numel * ITEMSIZE_BYTES[kind.compute or kind.param]

    def _rounding(self, unit: UnitParts) -> int:
        kind = unit.precision
        return 0 if kind.computes_as_param or kind.weights else unit.size.padded_numel * ITEMSIZE_BYTES[kind.param]

    @property
    def _refreshing(self) -> int:
        """Bytes on the host of new parameters of one unit, rounded from masters there before they go to a GPU."""
        return max(
            (
                self._shard(unit) * ITEMSIZE_BYTES[unit.precision.param]
                for unit in self._distinct
                if unit.size.optimizer_offloaded and not unit.size.params_offloaded and unit.size.trainable
                if unit.precision.master != unit.precision.param
            ),
            default=0,
        )

    @property
    def _conversion(self) -> int:
        """Bytes of an element in the dtype to which values are converted on the host before they go to a GPU."""
        sizes = (ITEMSIZE_BYTES[unit.precision.compute or unit.precision.param] for unit in self._distinct)
        return max((size for size in sizes if size != DRAWN_BYTES), default=0)


def _drawing(unit: UnitParts) -> int:
    return unit.largest_numel * (DRAWN_BYTES + MASK_BYTES) + RANDOM_STATE_BYTES
