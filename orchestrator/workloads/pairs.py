"""Prompts and responses from a JSON file, as windows of tokens in which only the responses count in the loss.

[Note: a pair as a sample] A sample is the tokens of the prompt, then those of the response with its end, then filling
up to seq + 1 tokens. The model reads the first seq of them; the label of a place is the token after it if that one
belongs to the response, else -100. Filling comes last and attention is causal, so no token that counts attends to it,
and no attention mask is needed. A longer pair loses its end; if nothing of the response is left, it is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchestrator.workloads.sources import Example, IntArray

MESSAGES = "messages"
# The keys of the prompt and of the response of a record, in the order in which they are looked for.
PAIR_KEYS = (("prompt", "response"), ("prompt", "completion"), ("instruction", "output"), ("question", "answer"))
FORMS = f"{', '.join('/'.join(keys) for keys in PAIR_KEYS)} or {MESSAGES}"
BYTE_END = 0  # ends a response that is read as bytes: no text has it


class Pair(NamedTuple):
    """The turns of a conversation before the response, each with its `role` and `content`; and the response."""

    turns: tuple[Mapping[str, str], ...]
    response: str

    @property
    def prompt(self) -> str:
        """The turns as plain text, for a tokenizer without a chat template."""
        return "\n".join(turn["content"] for turn in self.turns)


EncodePairs = Callable[[Sequence[Pair]], list[Example]]  # token ids of prompts, and of responses with their ends


def read_pairs(path: Path) -> list[Pair]:
    """The pairs of a file: a JSON array of objects, or an object in each line. ValueError if one is no pair.

    An object has keys of PAIR_KEYS (an `instruction` may have an `input`), or `messages`, of which the last is the
    response.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"data.path: expected JSON in UTF-8, found other bytes in {path}: {error.reason}") from None
    records = _records(path, text)
    if not records:
        raise ValueError(f"data.path: expected prompts and responses, found none in {path}; name another file")
    return [_pair(f"{path}, record {number}", record) for number, record in enumerate(records, start=1)]


def _records(path: Path, text: str) -> list[Any]:
    try:
        if text.lstrip()[:1] == "[":
            found: list[Any] = json.loads(text)
            return found
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"data.path: expected a JSON array of objects, or an object in each line, found in {path}: {error}"
        ) from None


def _pair(place: str, record: Any) -> Pair:
    if not isinstance(record, dict):
        raise ValueError(f"{place}: expected an object with {FORMS}, found {type(record).__name__}")
    if MESSAGES in record:
        return _conversation(place, record[MESSAGES])
    keys = next((keys for keys in PAIR_KEYS if all(key in record for key in keys)), None)
    if keys is None:
        raise ValueError(f"{place}: expected an object with {FORMS}, found the keys {', '.join(record) or 'none'}")
    prompt, response = (_text(place, key, record[key]) for key in keys)
    if not prompt:
        raise ValueError(f"{place}: expected a text as its {keys[0]}, found an empty one")
    more = _text(place, "input", record.get("input") or "") if keys[0] == "instruction" else ""
    return Pair(({"role": "user", "content": f"{prompt}\n{more}" if more else prompt},), response)


def _conversation(place: str, turns: Any) -> Pair:
    are_turns = isinstance(turns, list) and all(isinstance(one, dict) for one in turns)
    if not are_turns or len(turns) < 2 or turns[-1].get("role") != "assistant":
        raise ValueError(f"{place}: expected messages of which the last is the assistant's, found none")
    plain = [{key: _text(place, key, one.get(key)) for key in ("role", "content")} for one in turns]
    return Pair(tuple(plain[:-1]), plain[-1]["content"])


def _text(place: str, key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{place}: expected a text as its {key}, found {type(value).__name__}")
    return value


def bytes_of_pairs(pairs: Sequence[Pair]) -> list[Example]:
    """A token for each byte; the response ends with BYTE_END."""
    return [Example(list(pair.prompt.encode()), [*pair.response.encode(), BYTE_END]) for pair in pairs]


class PairWindows:
    """Windows over pairs; see [Note: a pair as a sample].

    `cut`: how many pairs lost their end; `left_out`: how many lost their whole response. ValueError if none is left.
    """

    def __init__(self, pairs: Sequence[Example], seq: int) -> None:
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
