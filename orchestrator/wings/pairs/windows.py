"""Prompts and responses as windows of tokens in which only the responses count in the loss.

A sample is the tokens of the prompt, then those of the response with its end, in a conversation several times, then
filling up to seq + 1 tokens. The model reads the first seq of them; the label of a place is the token after it if that
one belongs to a response, else -100. A longer pair loses its end; if nothing of a response is left, it is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from orchestrator.text.units import many
from orchestrator.wings.pairs.conversation import Pair
from orchestrator.wings.pairs.pairs_file import read_pairs
from orchestrator.workloads.sources import Example, IntArray, Windows

_T = TypeVar("_T", bound=np.generic)
BYTE_END = 0  # ends a response that is read as bytes: no text has it


class Encoded(NamedTuple):
    """The token ids before a conversation's last answer, and of that answer with its end. `answered`: where in the
    prompt earlier answers that are trained begin and stop, with their ends. unread: keys of the record that neither
    tokens nor labels depend on."""

    prompt: list[int]
    answer: list[int]
    answered: tuple[tuple[int, int], ...] = ()
    unread: tuple[str, ...] = ()


class EncodePairs(NamedTuple):
    """How pairs become tokens. writes_roles: whether the tokens say whose turn it is, by a chat template."""

    encode: Callable[[Sequence[Pair]], list[Encoded]]
    writes_roles: bool


def joined(pair: Pair, parts: Sequence[tuple[list[int], list[int]]], unread: Sequence[str]) -> Encoded:
    """A conversation of its parts: each the tokens of a context, and those of the answer to it."""
    tokens: list[int] = []
    spans = []
    for at, (context, answer) in zip(pair.answers(), parts, strict=True):
        start = len(tokens) + len(context)
        tokens += [*context, *answer]
        if at not in pair.untrained:
            spans.append((start, len(tokens)))
    last = spans[-1][0]
    return Encoded(tokens[:last], tokens[last:], tuple(spans[:-1]), (*pair.unread, *unread))


def plain_parts(pair: Pair) -> Iterator[tuple[str, str]]:
    """Each answer of a conversation, after the texts since the one before it. ValueError if it is more than texts."""
    pair.check_plain()
    texts, begin = [str(turn["content"]) for turn in pair.turns], 0
    for at in pair.answers():
        yield "\n".join(texts[begin:at]), texts[at]
        begin = at + 1


def unread_note(pairs: Sequence[Encoded]) -> tuple[str, ...]:
    """Name each key of the records that nothing reads, once."""
    found = Counter(key for pair in pairs for key in pair.unread)
    return (f"not read, keys of records: {', '.join(f'{key} ({of:,})' for key, of in found.items())}",) if found else ()


def bytes_of_pairs(pairs: Sequence[Pair]) -> list[Encoded]:
    """A token for each byte; each answer ends with BYTE_END."""
    return [
        joined(
            pair,
            [([*context.encode()], [*answer.encode(), BYTE_END]) for context, answer in plain_parts(pair)],
            pair.extra_keys(),
        )
        for pair in pairs
    ]


class PairWindows(Windows):
    """Windows over pairs.

    `cut`: how many pairs lost their end; `left_out`: how many lost every answer. ValueError if none is left.
    """

    def __init__(self, pairs: Sequence[Encoded], seq: int, *, without_roles: int = 0) -> None:
        """without_roles: how many pairs are conversations whose tokens do not say whose turn it is."""
        super().__init__(seq)
        self._without_roles, self._unread = without_roles, unread_note(pairs)
        self._length = seq + 1
        spans = [(*pair.answered, (len(pair.prompt), len(pair.prompt) + len(pair.answer))) for pair in pairs]
        kept = [(pair, own) for pair, own in zip(pairs, spans, strict=True) if own[0][0] < self._length]
        self.left_out = len(pairs) - len(kept)
        self.cut = sum(own[-1][1] > self._length for _, own in kept)
        if not kept:
            raise ValueError(
                f"data: expected prompts of at most batch.seq tokens, found all {len(pairs):,} longer than {seq:,}; "
                "raise batch.seq"
            )
        self.count = len(kept)
        rows = [[*pair.prompt, *pair.answer][: self._length] for pair, _ in kept]
        self._tokens = np.asarray([token for row in rows for token in row], dtype=np.int32)
        self._ends = np.cumsum([len(row) for row in rows])
        self._sizes = np.asarray([len(row) for row in rows], dtype=np.int64)
        self._answers = np.zeros(len(self._tokens), dtype=np.bool_)
        for (_, own), end, row in zip(kept, self._ends, rows, strict=True):
            for start, stop in own:
                self._answers[end - len(row) + min(start, len(row)) : end - len(row) + min(stop, len(row))] = True
        within = [max(start for start, _ in own if start < self._length) for _, own in kept]
        self._prompts = np.asarray(within, dtype=np.int64)  # tokens before the last answer of which something is left
        self._several = any(own[0][0] < last for (_, own), last in zip(kept, within, strict=True))
        self._learned = np.asarray([self._row_of(self._answers, row)[1:].sum() for row in range(self.count)])

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know about pairs that the windows do not hold."""
        found = []
        if self.cut:
            found.append(f"{self.cut} of {self.count} pairs are longer than batch.seq and lose their end")
        if self.left_out:
            found.append(f"{self.left_out} pairs are left out: batch.seq holds nothing of their responses")
        if self._without_roles:
            talks = many(self._without_roles, "conversation")
            found.append(f"the turns of {talks} are joined without roles: a chat template in model.path writes them")
        return (*found, *self._unread)

    @property
    def tokens(self) -> NDArray[np.int32]:
        """All tokens without filling, [n]."""
        return self._tokens

    @property
    def sizes(self) -> IntArray:
        """The number of tokens of each pair, at most seq + 1."""
        return self._sizes

    def pair(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """The tokens of a pair without filling, [n], and which of them belong to answers."""
        return self._row(index), self._row_of(self._answers, index)

    @property
    def stored(self) -> bytes:
        """The tokens and where each part begins: what the hash of the data covers."""
        parts = (self._tokens, self._sizes.astype("<i8"), self._prompts.astype("<i8"))
        several = self._answers.tobytes() if self._several else b""  # else the same: data of one answer keep their hash
        return b"".join([*(part.tobytes() for part in parts), several])

    def read(self, indices: IntArray) -> IntArray:
        """A copy of these windows, [len(indices), seq + 1] int64, filled up with token 0."""
        # Filling comes last and attention is causal, so no token that counts attends to it: there is no attention mask.
        made = np.zeros((len(indices), self._length), dtype=np.int64)
        for row, index in enumerate(indices):
            made[row, : self._sizes[index]] = self._row(int(index))
        return made

    def counts(self, indices: IntArray) -> NDArray[np.bool_]:
        """Which labels of these windows count, [len(indices), seq]: those of answers."""
        made = np.zeros((len(indices), self._length), dtype=np.bool_)
        for row, index in enumerate(indices):
            made[row, : self._sizes[index]] = self._row_of(self._answers, int(index))
        return made[:, 1:]

    def counted(self, indices: IntArray) -> int:
        """How many labels of these windows count. The first token of a window is no target."""
        return int(self._learned[indices].sum())

    def example(self, index: int) -> Example:
        """A prompt, and the last response that the data has for it."""
        row, size = [int(token) for token in self._row(index)], int(self._prompts[index])
        return Example(row[:size], row[size:])

    def _row(self, index: int) -> NDArray[np.int32]:
        return self._row_of(self._tokens, index)

    def _row_of(self, values: NDArray[_T], index: int) -> NDArray[_T]:
        return values[self._ends[index] - self._sizes[index] : self._ends[index]]


def read_windows(path: Path, seq: int, fraction: float, encode: EncodePairs | None) -> PairWindows:
    """The windows of a file. `encode`: None makes a token of each byte. ValueError if there are too few pairs for
    training and, with a `fraction` above 0, validation."""
    pairs, (encode_pairs, writes_roles) = read_pairs(path), encode or EncodePairs(bytes_of_pairs, writes_roles=False)
    without_roles = 0 if writes_roles else sum(len(pair.turns) > 2 for pair in pairs)
    windows = PairWindows(encode_pairs(pairs), seq, without_roles=without_roles)
    if windows.count < (2 if fraction else 1):
        raise ValueError(
            f"data: expected at least 2 pairs that batch.seq={seq} holds, for training and validation, found "
            f"{windows.count} in {path}; give more pairs, or data.validation_fraction=0"
        )
    return windows
