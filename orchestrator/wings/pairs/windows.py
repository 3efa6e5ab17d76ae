"""Prompts and responses as windows of tokens in which only the responses count in the loss.

A sample is the tokens of the prompt, then those of the response with its end, then filling
up to seq + 1 tokens. The model reads the first seq of them; the label of a place is the token after it if that one
belongs to the response, else -100. A longer pair loses its end; if nothing of the response is left, it is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from orchestrator.wings.pairs.pairs_file import Pair, read_pairs
from orchestrator.workloads.sources import Example, IntArray, Windows

BYTE_END = 0  # ends a response that is read as bytes: no text has it


EncodePairs = Callable[[Sequence[Pair]], list[Example]]  # token ids of prompts, and of responses with their ends


def bytes_of_pairs(pairs: Sequence[Pair]) -> list[Example]:
    """A token for each byte; the response ends with BYTE_END."""
    return [Example(list(pair.prompt.encode()), [*pair.response.encode(), BYTE_END]) for pair in pairs]


class PairWindows(Windows):
    """Windows over pairs.

    `cut`: how many pairs lost their end; `left_out`: how many lost their whole response. ValueError if none is left.
    """

    def __init__(self, pairs: Sequence[Example], seq: int) -> None:
        super().__init__(seq)
        self._length = seq + 1
        kept = [pair for pair in pairs if len(pair.prompt) < self._length]
        self.left_out = len(pairs) - len(kept)
        self.cut = sum(len(pair.prompt) + len(pair.answer) > self._length for pair in kept)
        if not kept:
            raise ValueError(
                f"data: expected prompts of at most batch.seq tokens, found all {len(pairs):,} longer than {seq:,}; "
                "raise batch.seq"
            )
        self.count = len(kept)
        rows = [[*pair.prompt, *pair.answer][: self._length] for pair in kept]
        self._tokens = np.asarray([token for row in rows for token in row], dtype=np.int32)
        self._ends = np.cumsum([len(row) for row in rows])
        self._sizes = np.asarray([len(row) for row in rows], dtype=np.int64)
        self._prompts = np.asarray([len(pair.prompt) for pair in kept], dtype=np.int64)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know about pairs that the windows do not hold."""
        found = []
        if self.cut:
            found.append(f"{self.cut} of {self.count} pairs are longer than batch.seq and lose their end")
        if self.left_out:
            found.append(f"{self.left_out} pairs are left out: batch.seq holds nothing of their responses")
        return tuple(found)

    @property
    def tokens(self) -> NDArray[np.int32]:
        """All tokens without filling, [n]."""
        return self._tokens

    @property
    def stored(self) -> bytes:
        """The tokens and where each part begins: what the hash of the data covers."""
        parts = (self._tokens, self._sizes.astype("<i8"), self._prompts.astype("<i8"))
        return b"".join(part.tobytes() for part in parts)

    def read(self, indices: IntArray) -> IntArray:
        """A copy of these windows, [len(indices), seq + 1] int64, filled up with token 0."""
        # Filling comes last and attention is causal, so no token that counts attends to it: there is no attention mask.
        made = np.zeros((len(indices), self._length), dtype=np.int64)
        for row, index in enumerate(indices):
            made[row, : self._sizes[index]] = self._row(int(index))
        return made

    def counts(self, indices: IntArray) -> NDArray[np.bool_]:
        """Which labels of these windows count, [len(indices), seq]: those of the response."""
        targets = np.arange(1, self._length)
        return (targets >= self._prompts[indices][:, None]) & (targets < self._sizes[indices][:, None])

    def counted(self, indices: IntArray) -> int:
        """How many labels of these windows count. The first token of a window is no target."""
        return int((self._sizes[indices] - np.maximum(self._prompts[indices], 1)).sum())

    def example(self, index: int) -> Example:
        """A prompt, and the response that the data has for it."""
        row, size = [int(token) for token in self._row(index)], int(self._prompts[index])
        return Example(row[:size], row[size:])

    def _row(self, index: int) -> NDArray[np.int32]:
        return self._tokens[self._ends[index] - self._sizes[index] : self._ends[index]]


def read_windows(path: Path, seq: int, fraction: float, encode: EncodePairs | None) -> PairWindows:
    """The windows of a file. `encode`: None makes a token of each byte. ValueError if there are too few pairs for
    training and, with a `fraction` above 0, validation."""
    windows = PairWindows((encode or bytes_of_pairs)(read_pairs(path)), seq)
    if windows.count < (2 if fraction else 1):
        raise ValueError(
            f"data: expected at least 2 pairs that batch.seq={seq} holds, for training and validation, found "
            f"{windows.count} in {path}; give more pairs, or data.validation_fraction=0"
        )
    return windows
