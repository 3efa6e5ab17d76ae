"""Pairs that share rows of tokens, for data.packing=true: several short ones in a row, none cut to fit into one.

Each pair takes as many places of a row as it has tokens but the last, which is only a label. So no label of a pair is
a token of the next one, and their positions begin at 0; the model's class keeps attention inside of each pair.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from orchestrator.wings.pairs.windows import PairWindows
from orchestrator.workloads.data import IGNORED_LABEL, TokenBatch, TokenData
from orchestrator.workloads.sources import Example, IntArray, Windows


class PackedRows(Windows):
    """The pairs of `base`, by their numbers, each in a row of its own; and numbered after them, in `train`, the rows
    that the pairs of the training part share, which are the same in every epoch."""

    def __init__(self, base: TokenData, seq: int) -> None:
        super().__init__(seq)
        assert isinstance(base.windows, PairWindows)
        self._pairs, self._trained = base.windows, base.train_windows
        places = self._pairs.sizes[self._trained] - 1
        self._rows = [self._trained[row] for row in best_fit(places, seq)]
        self.count = self._pairs.count + len(self._rows)
        self.train = np.arange(self._pairs.count, self.count, dtype=np.int64)
        self._filled = int(places.sum())

    @property
    def note(self) -> str:
        """How many pairs share how many rows."""
        samples, rows = len(self._trained), len(self._rows)
        alone, packed = (100 * self._filled / (count * self._seq) for count in (samples, rows))
        return (
            f"packed {samples:,} samples into {rows:,} rows of {self._seq:,} tokens ({packed:.0f} % filled; "
            f"{alone:.0f} % without packing)"
        )

    def read(self, indices: IntArray) -> IntArray:
        """Pairs in rows of their own, [len(indices), seq + 1] int64."""
        return self._pairs.read(indices)

    def counted(self, indices: IntArray) -> int:
        return sum(self._pairs.counted(self._members(int(index))) for index in indices)

    def example(self, index: int) -> Example:
        """The first pair of a row."""
        return self._pairs.example(int(self._members(index)[0]))

    def batch(self, indices: IntArray) -> TokenBatch:
        """Inputs of shared rows, [count, 2, seq]: token ids, and positions in their pairs; labels [count, seq]. Those
        of pairs in rows of their own as without packing, [count, seq] both. All indices are of one of the two kinds."""
        if (indices < self._pairs.count).all():
            tokens, counts = self.read(indices), self._pairs.counts(indices)
            return TokenBatch(tokens[:, :-1].copy(), np.where(counts, tokens[:, 1:], IGNORED_LABEL))
        inputs = np.zeros((len(indices), 2, self._seq), dtype=np.int64)
        labels = np.full((len(indices), self._seq), IGNORED_LABEL, dtype=np.int64)
        for row, index in enumerate(indices):
            begin = 0
            for member in self._members(int(index)):
                pair, answers = self._pairs.pair(int(member))
                end = begin + len(pair) - 1
                inputs[row, 0, begin:end] = pair[:-1]
                inputs[row, 1, begin:end] = np.arange(end - begin)
                labels[row, begin:end] = np.where(answers[1:], pair[1:], IGNORED_LABEL)
                begin = end
        return TokenBatch(inputs, labels)

    def _members(self, index: int) -> IntArray:
        """The numbers of the pairs of a row."""
        shared = index - self._pairs.count
        return np.asarray([index]) if shared < 0 else self._rows[shared]


def best_fit(sizes: IntArray, capacity: int) -> list[list[int]]:
    """The numbers of the samples of each row: the longest first, each in the fullest row that holds it as a whole, or
    in a new one. No size is above the capacity. Samples of one size keep their order."""
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = defaultdict(list)  # the rows with so many free places
    rooms = 0  # bit n is set if a row has n free places: the least room that is enough is found without a search
    for sample in np.argsort(-sizes, kind="stable"):
        size = int(sizes[sample])
        enough = rooms >> size
        if enough:
            room = size + (enough & -enough).bit_length() - 1
            row = by_room[room].pop()
            rooms ^= 0 if by_room[room] else 1 << room
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(int(sample))
        by_room[room - size].append(row)
        rooms |= 1 << (room - size)
    return rows
