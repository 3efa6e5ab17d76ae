"""The tokens of a run: disjoint windows of text or of synthetic tokens, and the order in which samples are read.

A source is cut into disjoint windows of seq + 1 tokens: seq inputs and their targets, shifted by one. Some windows,
evenly spread, are held out for validation, so that no token is in both parts. An epoch reads every training window
once.
"""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchestrator import wings
from orchestrator.workloads.sources import (
    ORDER,
    STDLIB_BYTES,
    SYNTHETIC_WINDOWS,
    Encode,
    Example,
    IntArray,
    SyntheticWindows,
    TextWindows,
    Windows,
    as_bytes,
    as_tokens,
    random_bits,
    read_stdlib,
    read_text,
)

IGNORED_LABEL = -100  # the label that no loss counts
LAYOUT_VERSION = 1  # part of the hash: increment it if windows, split or the synthetic rule change


class TokenBatch(NamedTuple):
    """`labels[b, i]` is the token after `input_ids[b, i]`, or IGNORED_LABEL if it does not count in the loss; both are
    [count, seq] int64 and owned by the caller."""

    input_ids: IntArray
    labels: IntArray


@dataclass(frozen=True)
class TokenData:
    """Training and validation samples over one source.

    `hash` (12 hex digits of a sha256) covers kind, seq, validation_fraction and every token in a window (for synthetic
    data, the seed and the vocabulary instead of the tokens). The same text with another seq is different data. The hash
    does not cover the location of a text, nor the seed of a text, which only determines the order. `notes`: what a user
    should know about the data.
    """

    name: str
    hash: str
    seed: int
    windows: Windows
    train_windows: IntArray
    validation_windows: IntArray
    notes: tuple[str, ...] = ()

    @property
    def train_samples(self) -> int:
        return len(self.train_windows)

    @property
    def validation_samples(self) -> int:
        return len(self.validation_windows)

    def train_batch(self, position: int, count: int) -> TokenBatch:
        """Samples position .. position + count - 1 of the endless sequence of epochs."""
        # The position counts samples since the start, and an order is a function of (seed, epoch) alone: a resumed run
        # needs only the position, and a global batch is the same for every world size.
        parts, end = [], position + count
        while position < end:
            epoch, start = divmod(position, self.train_samples)
            stop = min(self.train_samples, start + end - position)
            parts.append(epoch_order(self.train_samples, self.seed, epoch)[start:stop])
            position += stop - start
        order = np.concatenate(parts) if parts else np.empty(0, np.int64)
        return self._batch(self.train_windows[order])

    def validation_batch(self, position: int, count: int) -> TokenBatch:
        """Held-out samples position .. position + count - 1 in the order of the text, repeating after the last."""
        order = np.arange(position, position + count, dtype=np.int64) % self.validation_samples
        return self._batch(self.validation_windows[order])

    def learned_tokens(self, samples: int) -> int:
        """How many labels count in the first `samples` samples of the endless sequence of epochs."""
        epochs, rest = divmod(samples, self.train_samples)
        last = self.train_windows[epoch_order(self.train_samples, self.seed, epochs)[:rest]]
        return epochs * self.windows.counted(self.train_windows) + self.windows.counted(last)

    def examples(self, count: int) -> list[Example]:
        """Up to `count` held-out samples, evenly spread, as texts to continue; of the training part if none is held
        out."""
        part = self.validation_windows if self.validation_samples else self.train_windows
        count = min(count, len(part))
        return [self.windows.example(int(part[number * len(part) // count])) for number in range(count)]

    def _batch(self, indices: IntArray) -> TokenBatch:
        tokens = self.windows.read(indices)
        labels = tokens[:, 1:].copy()  # of one row, ascontiguousarray would share the memory of the inputs
        counts = self.windows.counts(indices)
        if counts is not None:
            labels[~counts] = IGNORED_LABEL
        return TokenBatch(np.ascontiguousarray(tokens[:, :-1]), labels)


def load_data(
    kind: str,
    path: str | None,
    *,
    seq: int,
    seed: int,
    vocab_size: int,
    validation_fraction: float,
    encode: Encode | None = None,
    encode_pairs: Any = None,
) -> TokenData:
    """The data of `kind` (stdlib, text, pairs or synthetic) for a model of `vocab_size`.

    `path` (a file or a folder) is for the kinds text and pairs. `encode` tokenizes a text, `encode_pairs` prompts and
    responses (an EncodePairs of the wing); None uses their bytes as tokens.
    ValueError if the source has too few tokens for one training and, with a fraction above 0, one validation window.
    The other values are those of a resolved configuration, which has been checked.
    """
    about: dict[str, Any] = {"layout": LAYOUT_VERSION, "seq": seq, "validation_fraction": float(validation_fraction)}
    notes: tuple[str, ...] = ()
    if kind == "synthetic":
        windows: Windows = SyntheticWindows(seed, vocab_size, seq)
        name = "synthetic"
        about |= {"kind": "synthetic", "seed": seed, "vocab_size": vocab_size, "windows": SYNTHETIC_WINDOWS}
        digest = _hash(about, b"")
    elif kind == "pairs" and path is not None:
        name = f"pairs:{Path(path).resolve().name}"
        windows = paired = wings.load(wings.PAIRS).read_windows(Path(path), seq, validation_fraction, encode_pairs)
        _check_tokens(paired.tokens, vocab_size)
        about |= {"kind": "pairs"}
        digest, notes = _hash(about, paired.stored), paired.notes
    else:
        name, text = _read(kind, path)
        tokens = as_bytes(text) if encode is None else as_tokens(text, encode)
        windows = _cut(tokens, seq, validation_fraction, name)
        about |= {"kind": str(kind)}
        if encode is not None:
            _check_tokens(tokens, vocab_size)
            about |= {"tokens": "int32"}
        digest = _hash(about, tokens[: windows.count * (seq + 1)].data.cast("B"))
    train, held_out = split(windows.count, validation_fraction)
    return TokenData(name, digest, seed, windows, train, held_out, notes)


def slice_for_rank(global_size: int, rank: int, world: int) -> tuple[int, int]:
    """(offset, count) of the r-th contiguous slice of a global batch, which `world` divides."""
    count = global_size // world
    return rank * count, count


def split(count: int, fraction: float) -> tuple[IntArray, IntArray]:
    """The window numbers for training and for validation: disjoint, the held-out ones evenly spread.

    `count` x `fraction` windows are held out (rounded down, at least one unless the fraction is 0).
    """
    held = min(count - 1, max(1, int(count * fraction))) if fraction else 0
    every = np.arange(count, dtype=np.int64)
    is_held = (every + 1) * held // count > every * held // count
    return every[~is_held], every[is_held]


@lru_cache(maxsize=2)  # a batch may span two epochs
def epoch_order(samples: int, seed: int, epoch: int) -> IntArray:
    """A permutation of the samples, a function of its arguments alone. Read-only because it is shared."""
    # numpy keeps the raw stream of a bit generator stable forever, but Generator.permutation's only within a version.
    order = np.argsort(random_bits(samples, seed, ORDER, epoch), kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


def _check_tokens(tokens: NDArray[np.generic], vocab_size: int) -> None:
    """ValueError if a token is not below the model's vocabulary size."""
    largest = int(tokens.max())  # _cut has checked that there are tokens
    if largest >= vocab_size:
        raise ValueError(
            f"data.tokenizer: expected tokens below the model's vocab_size, {vocab_size}, found {largest}; the "
            "tokenizer next to the weights is of another model: use data.tokenizer=bytes, or correct the folder"
        )


def _read(kind: str, path: str | None) -> tuple[str, bytearray]:
    if kind == "text" and path is not None:
        return f"text:{Path(path).resolve().name}", read_text(Path(path))
    # The sources differ between Python versions: the name separates reports that must not be compared.
    return f"stdlib-{platform.python_version()}", read_stdlib(STDLIB_BYTES)


def _cut(tokens: NDArray[np.generic], seq: int, fraction: float, name: str) -> TextWindows:
    windows, needed = TextWindows(tokens, seq), 2 if fraction else 1
    if windows.count < needed:
        unit = "bytes" if tokens.dtype == np.uint8 else "tokens"
        raise ValueError(
            f"data: expected at least {needed * (seq + 1):,} {unit} ({needed} x batch.seq + 1, training and "
            f"validation), found {len(tokens):,} in {name}; give more text or a smaller batch.seq"
        )
    return windows


def _hash(about: dict[str, Any], tokens: bytes | memoryview) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    digest.update(b"\n")
    digest.update(tokens)
    return digest.hexdigest()[:12]
