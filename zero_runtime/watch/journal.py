"""Records a rank's current position and its last collectives, in memory that outlives the process."""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import NamedTuple

RING = 1024  # number of collectives recorded; a step of the largest models here issues fewer
_FIELDS, _HEADER = 8, 16  # 64-bit words per entry, and in the header
_TICKS, _ISSUED, _WAITING, _STEP, _PHASE, _UNIT, _WORDS_END, _STARTED, _ONE_ORDER, _COMPLETED, _UNDER_WAY = range(11)
_TABLE = (_HEADER + _FIELDS * RING) * 8  # where the table of words begins, in bytes
_TABLE_BYTES = 1 << 16
_MANY = "(more names than the journal holds)"
# With 20 bits the sum of the squared fingerprints is exact in fp64 for up to 2**13 ranks: 2 * 20 + 13 = 53 bits.
_FINGERPRINT_BITS = 20


# The channel (process group, see Collectives) of each kind of collective. All ranks issue the collectives of one
# channel in the same order; gathers and reductions may interleave differently on ranks that leave parameters unused,
# unless the channels share a device (see Journal.keep_one_order).
_CHANNEL = {
    "all_gather": "gather",
    "reduce_scatter": "reduce",
    "all_reduce": "replica",
    "all_to_all": "reduce",
    "outer_all_gather": "outer",
    "outer_reduce_scatter": "replica",
    **dict.fromkeys(("tensor_all_reduce", "tensor_all_gather", "matrix_all_gather"), "tensor"),
    **dict.fromkeys(("tensor_reduce_scatter", "tensor_part_gather"), "tensor"),
    "sequence_all_to_all": "sequence",
}


class Op(NamedTuple):
    """One issued collective. For each channel and `number`, `what` must be equal on all ranks.

    `sequence` counts all collectives of the rank, `number` those of the channel, both from 1. `step` and `phase` are
    the rank's position at that time.
    """

    sequence: int
    number: int
    kind: str
    unit: str
    numel: int
    dtype: str
    step: int
    phase: str

    @property
    def channel(self) -> str:
        return _CHANNEL.get(self.kind, "world")

    @property
    def name(self) -> str:
        return f"{self.channel} {self.number}"

    @property
    def what(self) -> tuple[str, str, int, str]:
        return self.kind, self.unit, self.numel, self.dtype

    def __str__(self) -> str:
        of = f" of unit {self.unit}" if self.unit else ""
        return f"{self.kind}{of} ({self.numel} x {self.dtype}) in {self.phase} of step {self.step}"


class RankPosition(NamedTuple):
    """A rank's position: `step` counts from 1, `waiting` is the sequence number of the collective it waits for, or 0.

    is_starting: the rank may still be building, loading or compiling, which takes longer on some ranks than on others
    (see Journal.end_start). one_order: see Journal.keep_one_order. completed, under_way: the sequence numbers of the
    last collective that the device is known to have completed, and of the first that it has not; 0 if unknown or none.
    """

    ticks: int
    issued: int
    waiting: int
    step: int
    phase: str
    unit: str
    is_starting: bool = False
    one_order: bool = False
    completed: int = 0
    under_way: int = 0


class WordIndex(dict[Hashable, int]):
    """The place of each word in the journal's table. A new word is appended by `learn`, which may refuse it."""

    def __init__(self, learn: Callable[[Hashable], int]) -> None:
        super().__init__()
        self._learn = learn

    def __missing__(self, word: Hashable) -> int:
        return self._learn(word)


class Journal:
    """A rank's record. Only its working thread writes, except `see_device`; any thread or process may read."""

    def __init__(self, path: Path | None = None) -> None:
        size = _TABLE + _TABLE_BYTES
        if path is None:
            self._map = mmap.mmap(-1, size)
        else:
            # A mapped file, which the other ranks of the machine can read after this process has ended: gloo aborts a
            # rank that receives more than it expected from one of its own threads, and a killed rank reports nothing
            # either. Writing it is a few stores to memory without a system call.
            with path.open("wb+") as file:
                file.truncate(size)
                self._map = mmap.mmap(file.fileno(), size)
        self._words = memoryview(self._map).cast("Q")
        self._index = WordIndex(self._learn)
        self._codes: dict[Hashable, int] = {}
        self._prints: dict[str, int] = {}  # by channel, and of all channels in one order
        self._numbers: dict[str, int] = {}
        self._learn(_MANY)
        self._words[_PHASE] = self._index["forward"]
        self._words[_UNIT] = self._index[""]
        self._words[_STEP] = 1

    # ---- called by the working thread --------------------------------------------------------------------------

    def begin(self, phase: str) -> None:
        """Record that a phase of the step begins; the rank is in no unit yet."""
        words = self._words
        words[_PHASE], words[_UNIT] = self._index[phase], self._index[""]
        words[_TICKS] += 1

    def enter(self, unit: str) -> None:
        """Record that the unit's parameters are about to be used."""
        words = self._words
        words[_UNIT] = self._index[unit]
        words[_TICKS] += 1

    def end_start(self) -> None:
        """Record the end of the work that takes longer on some ranks than on others; what follows takes about the same
        time on all. The end of the first step records it too."""
        self._words[_STARTED] = 1
        self._words[_TICKS] += 1

    def keep_one_order(self) -> None:
        """Expect all ranks to issue the collectives of all channels in one order, and fingerprint that order.

        The channels' kernels compete for the same device. NCCL starts them in the order in which the host issued them;
        if that differs between ranks, each of two ranks may start the collective that the other starts second.
        """
        self._words[_ONE_ORDER] = 1

    def next_step(self) -> None:
        """Record that the step is over; the next one begins with the forward phase."""
        self._words[_STEP] += 1
        self._words[_STARTED] = 1
        self.begin("forward")

    def issue(self, kind: str, unit: str, numel: int, dtype: Hashable) -> int:
        """Record that a collective is about to be issued; returns its sequence number."""
        words, index = self._words, self._index
        sequence = words[_ISSUED] + 1
        start = _HEADER + _FIELDS * (sequence % RING)
        words[start] = 0  # until the entry is complete, a reader sees none instead of part of one
        words[start + 1], words[start + 2], words[start + 3] = index[kind], index[unit], numel
        words[start + 4], words[start + 5], words[start + 6] = index[dtype], words[_STEP], words[_PHASE]
        channel = _CHANNEL.get(kind, "world")
        words[start + 7] = self._numbers[channel] = self._numbers.get(channel, 0) + 1
        words[start] = words[_ISSUED] = sequence
        words[_TICKS] += 1
        key = (kind, unit, numel, dtype)
        code = self._codes.get(key)
        if code is None:
            code = self._codes[key] = zlib.crc32(repr(key).encode())  # `hash` differs between processes
        for order in (channel, "all") if words[_ONE_ORDER] else (channel,):
            self._prints[order] = (self._prints.get(order, 0) * 1000003 + code) & 0xFFFFFFFF
        return sequence

    def wait(self, sequence: int) -> None:
        """Record that the rank waits for the collective with this sequence number, or for none (0)."""
        words = self._words
        words[_WAITING] = sequence
        words[_TICKS] += 1

    def fingerprint(self) -> int:
        """A number below 2**20, equal on ranks that issued the same collectives.

        Ranks that issued different ones have the same number with a probability of about one in a million. It covers
        all collectives since the start, so ranks that differed once differ from then on.
        """
        return zlib.crc32(repr(sorted(self._prints.items())).encode()) >> (32 - _FINGERPRINT_BITS)

    def _learn(self, word: Hashable) -> int:
        """Append a word to the table; returns its place, or that of `_MANY` if the table is full."""
        text = str(word).removeprefix("torch.").replace("\n", " ").encode() + b"\n"
        end = self._words[_WORDS_END]
        if end + len(text) > _TABLE_BYTES:
            return 0
        self._map[_TABLE + end : _TABLE + end + len(text)] = text
        self._words[_WORDS_END] = end + len(text)
        return self._index.setdefault(word, len(self._index))

    # ---- called by other threads -------------------------------------------------------------------------------

    def see_device(self, completed: int, under_way: int) -> None:
        """Record the last collective that the device has completed (0: none since the last call), and the first that it
        has not (0: none). Only the watching thread calls it."""
        self._words[_COMPLETED] = completed or self._words[_COMPLETED]
        self._words[_UNDER_WAY] = under_way

    @property
    def ticks(self) -> int:
        """A counter that grows with every record of the working thread."""
        return self._words[_TICKS]

    def read(self) -> tuple[RankPosition, list[Op]]:
        """The rank's position, and its last collectives in order."""
        return _decode(bytes(self._map))


def read_journal(path: Path) -> tuple[RankPosition, list[Op]]:
    """Read the journal of another rank of this machine, alive or dead. OSError if it does not exist."""
    return _decode(path.read_bytes())


def _decode(content: bytes) -> tuple[RankPosition, list[Op]]:
    words = memoryview(content).cast("Q")
    end = _TABLE + words[_WORDS_END]
    table = content[_TABLE:end].decode(errors="replace").split("\n")
    where = table[words[_PHASE]], table[words[_UNIT]], not words[_STARTED], bool(words[_ONE_ORDER])
    device = words[_COMPLETED], words[_UNDER_WAY]
    place = RankPosition(words[_TICKS], words[_ISSUED], words[_WAITING], words[_STEP], *where, *device)
    ops = []
    for start in range(_HEADER, _HEADER + _FIELDS * RING, _FIELDS):
        sequence, kind, unit, numel, dtype, step, phase, number = words[start : start + _FIELDS]
        if sequence:
            ops.append(Op(sequence, number, table[kind], table[unit], numel, table[dtype], step, table[phase]))
    return place, sorted(ops)
