"""What one rank is doing now and which collectives it issued last, in memory that outlives the process.

[Note: a journal that outlives its rank]
gloo ends a rank that receives more than it expected by an abort from a thread of its own, and a rank that is killed
says nothing either: neither can tell what it was in. So the journal is a memory-mapped file. Writing it is a few stores
to memory, no call into the system, and the other ranks of the machine can read it after the rank is gone.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Hashable
from pathlib import Path
from typing import NamedTuple

RING = 1024  # collectives remembered; more than a step of the largest models here issues
_FIELDS = 8  # 64-bit words per entry, and words of the head
_TICKS, _ISSUED, _WAITING, _STEP, _PHASE, _UNIT, _WORDS_END, _STARTED = range(_FIELDS)
_TABLE = _FIELDS * (RING + 1) * 8  # where the table of words begins, in bytes
_TABLE_BYTES = 1 << 16
_MANY = "(more names than the journal holds)"
# Exact in the sum of fp64 squares over worlds up to 2**13 ranks: 2 * 20 + 13 = 53 bits.
_FINGERPRINT_BITS = 20


# Process groups by what runs in them (see Collectives): order is kept within one, while gathers and reductions may
# come differently interleaved on ranks that leave parameters unused.
_CHANNEL = {"all_gather": "gather", "reduce_scatter": "reduce", "all_reduce": "replica"}


class Op(NamedTuple):
    """One issued collective. Ranks must agree on `what` of each `number` of a channel; the rest says where it was.

    `sequence` counts all collectives of the rank, `number` those of the channel, both from 1.
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
    """Where a rank is: `step` counts from 1, `waiting` is the sequence number of the collective it waits for, or 0.

    is_starting: it may still build, load or compile at its own pace (see Journal.end_start).
    """

    ticks: int
    issued: int
    waiting: int
    step: int
    phase: str
    unit: str
    is_starting: bool = False


class Journal:
    """Written by the rank's working thread alone; any thread or process may read. See the note above."""

    def __init__(self, path: Path | None = None) -> None:
        size = _TABLE + _TABLE_BYTES
        if path is None:
            self._map = mmap.mmap(-1, size)
        else:
            with path.open("wb+") as file:
                file.truncate(size)
                self._map = mmap.mmap(file.fileno(), size)
        self._words = memoryview(self._map).cast("Q")
        self._index: dict[Hashable, int] = {}
        self._codes: dict[Hashable, int] = {}
        self._prints: dict[str, int] = {}  # by channel
        self._numbers: dict[str, int] = {}
        self._learn(_MANY)
        self._words[_PHASE] = self._word("forward")
        self._words[_UNIT] = self._word("")
        self._words[_STEP] = 1

    # ---- what the working thread says --------------------------------------------------------------------------

    def begin(self, phase: str) -> None:
        """A phase of the step begins; it is in no unit yet."""
        words = self._words
        words[_PHASE], words[_UNIT] = self._word(phase), self._word("")
        words[_TICKS] += 1

    def enter(self, unit: str) -> None:
        """The unit's parameters are about to be used."""
        self._words[_UNIT] = self._word(unit)
        self._words[_TICKS] += 1

    def end_start(self) -> None:
        """All that ranks do at their own pace is done; what follows takes about the same time on each. The end of the
        first step says so too."""
        self._words[_STARTED] = 1
        self._words[_TICKS] += 1

    def next_step(self) -> None:
        """The step is over; the next one begins with a forward."""
        self._words[_STEP] += 1
        self._words[_STARTED] = 1
        self.begin("forward")

    def issue(self, kind: str, unit: str, numel: int, dtype: Hashable) -> int:
        """A collective is about to be issued; returns its sequence number."""
        words = self._words
        sequence = words[_ISSUED] + 1
        start = _FIELDS * (1 + sequence % RING)
        words[start] = 0  # a reader that comes now sees no entry rather than half of one
        words[start + 1], words[start + 2], words[start + 3] = self._word(kind), self._word(unit), numel
        words[start + 4], words[start + 5], words[start + 6] = self._word(dtype), words[_STEP], words[_PHASE]
        channel = _CHANNEL.get(kind, "world")
        words[start + 7] = self._numbers[channel] = self._numbers.get(channel, 0) + 1
        words[start] = words[_ISSUED] = sequence
        words[_TICKS] += 1
        key = (kind, unit, numel, dtype)
        code = self._codes.get(key)
        if code is None:
            code = self._codes[key] = zlib.crc32(repr(key).encode())  # `hash` differs from process to process
        self._prints[channel] = (self._prints.get(channel, 0) * 1000003 + code) & 0xFFFFFFFF
        return sequence

    def wait(self, sequence: int) -> None:
        """The rank waits for this collective from now on; 0: for none."""
        self._words[_WAITING] = sequence
        self._words[_TICKS] += 1

    def fingerprint(self) -> int:
        """A number below 2**20 that two ranks share where they issued the same collectives, but for one in a million.

        It covers everything since the start, so ranks that once differed differ from then on.
        """
        return zlib.crc32(repr(sorted(self._prints.items())).encode()) >> (32 - _FINGERPRINT_BITS)

    def _word(self, word: Hashable) -> int:
        index = self._index.get(word)
        return self._learn(word) if index is None else index

    def _learn(self, word: Hashable) -> int:
        text = str(word).removeprefix("torch.").replace("\n", " ").encode() + b"\n"
        end = self._words[_WORDS_END]
        if end + len(text) > _TABLE_BYTES:
            return 0
        self._map[_TABLE + end : _TABLE + end + len(text)] = text
        self._words[_WORDS_END] = end + len(text)
        return self._index.setdefault(word, len(self._index))

    # ---- what others read --------------------------------------------------------------------------------------

    @property
    def ticks(self) -> int:
        """Grows with everything that the working thread says."""
        return self._words[_TICKS]

    def read(self) -> tuple[RankPosition, list[Op]]:
        """Where the rank is, and its last collectives in order."""
        return _decode(bytes(self._map))


def read_journal(path: Path) -> tuple[RankPosition, list[Op]]:
    """The journal of another rank of this machine, living or dead. OSError where there is none."""
    return _decode(path.read_bytes())


def _decode(content: bytes) -> tuple[RankPosition, list[Op]]:
    words = memoryview(content).cast("Q")
    end = _TABLE + words[_WORDS_END]
    table = content[_TABLE:end].decode(errors="replace").split("\n")
    where = table[words[_PHASE]], table[words[_UNIT]], not words[_STARTED]
    place = RankPosition(words[_TICKS], words[_ISSUED], words[_WAITING], words[_STEP], *where)
    ops = []
    for slot in range(1, RING + 1):
        sequence, kind, unit, numel, dtype, step, phase, number = words[_FIELDS * slot : _FIELDS * (slot + 1)]
        if sequence:
            ops.append(Op(sequence, number, table[kind], table[unit], numel, table[dtype], step, table[phase]))
    return place, sorted(ops)
