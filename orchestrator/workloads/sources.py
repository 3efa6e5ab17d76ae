"""The sources of tokens: text, as bytes or through a tokenizer, or a seed; cut into windows of equal length."""

from __future__ import annotations

import os
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchestrator import wings
from orchestrator.workloads.text_files import READ_AS_RECORDS, is_text, text_files

STDLIB_BYTES = 8 << 20  # 65,000 windows of 128: far more than a first run reads, and loaded in 0.1 s
SYNTHETIC_WINDOWS = 65_536
SYNTHETIC_NOISE = 0.05
PIECE_BYTES = 1 << 18  # bytes of text passed to a tokenizer at a time

ORDER, SYNTHETIC = 0, 1  # independent random streams of one seed

IntArray = NDArray[np.int64]
Encode = Callable[[list[str]], list[list[int]]]  # maps texts to token ids


class Example(NamedTuple):
    """The token ids of a text to continue, and of what follows it in the data."""

    prompt: list[int]
    answer: list[int]


class Windows(ABC):
    """A source cut into `count` windows of seq + 1 tokens, of which every token but the first is a target."""

    count: int

    def __init__(self, seq: int) -> None:
        self._seq = seq

    @abstractmethod
    def read(self, indices: IntArray) -> IntArray:
        """A copy of these windows, [len(indices), seq + 1] int64."""

    def counts(self, indices: IntArray) -> NDArray[np.bool_] | None:
        """Which labels of these windows count in the loss, [len(indices), seq]; None for all."""
        return None

    def counted(self, indices: IntArray) -> int:
        """How many labels of these windows count."""
        return len(indices) * self._seq

    def example(self, index: int) -> Example:
        """The window as a text to continue: its first half, and the second."""
        row = [int(token) for token in self.read(np.asarray([index], dtype=np.int64))[0]]
        half = len(row) // 2
        return Example(row[:half], row[half:])


def random_bits(count: int, seed: int, stream: int, index: int) -> NDArray[np.uint64]:
    """Random bits of (seed, stream, index); streams and indices are independent of each other."""
    return np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(stream, index))).random_raw(count)


class TextWindows(Windows):
    """Windows over the tokens of a text, [n]: uint8 for its bytes, else int32."""

    def __init__(self, tokens: NDArray[np.generic], seq: int) -> None:
        super().__init__(seq)
        self.count = len(tokens) // (seq + 1)
        used = tokens[: self.count * (seq + 1)]
        self._windows = used.reshape(self.count, seq + 1)  # a view, so that the text is in memory only once

    def read(self, indices: IntArray) -> IntArray:
        return self._windows[indices].astype(np.int64)


class SyntheticWindows(Windows):
    """Noisy arithmetic progressions, generated when they are read; nothing is stored.

    Each window counts up by 1 to 4 within the first eighth of the vocabulary, and one token in twenty is
    random: a model learns the frequencies in a few steps (ln 8 of loss) and then the rule.
    """

    def __init__(self, seed: int, vocab_size: int, seq: int) -> None:
        super().__init__(seq)
        self.count = SYNTHETIC_WINDOWS
        self._seed = seed
        self._vocab_size = vocab_size

    def read(self, indices: IntArray) -> IntArray:
        made = np.empty((len(indices), self._seq + 1), dtype=np.int64)
        for row, index in enumerate(indices):
            made[row] = self._window(int(index))
        return made

    def _window(self, index: int) -> IntArray:
        length, vocabulary = self._seq + 1, self._vocab_size
        raw = random_bits(2 + 2 * length, self._seed, SYNTHETIC, index)
        uniform = (raw >> np.uint64(11)) * 2.0**-53
        span = max(1, vocabulary // 8)
        start, step = int(uniform[0] * span), 1 + int(uniform[1] * 4)
        tokens = (start + step * np.arange(length, dtype=np.int64)) % span
        noise = (uniform[2 : 2 + length] * vocabulary).astype(np.int64)
        return np.where(uniform[2 + length :] < SYNTHETIC_NOISE, noise, tokens)


def as_bytes(text: bytearray) -> NDArray[np.uint8]:
    """One token per byte, [bytes] uint8, in the memory of the text itself."""
    return np.frombuffer(text, dtype=np.uint8)


def as_tokens(text: bytearray, encode: Encode) -> NDArray[np.int32]:
    """A tokenizer's tokens of the text, [n] int32. The text is split at line ends, so no token spans two pieces."""
    parts = [np.empty(0, np.int32)]
    start = 0
    while start < len(text):
        stop = start + PIECE_BYTES
        end = text.find(b"\n", stop) + 1 if stop < len(text) else len(text)
        end = end or len(text)
        pieces = encode([text[start:end].decode("utf-8", errors="replace")])
        parts += [np.asarray(piece, dtype=np.int32) for piece in pieces]
        start = end
    return np.concatenate(parts)


def read_stdlib(limit_bytes: int) -> bytearray:
    """This interpreter's standard-library sources, joined in path order, up to the limit."""
    root = sysconfig.get_path("stdlib")
    text = bytearray()
    for path in stdlib_files(Path(root)):
        text += path.read_bytes()[: limit_bytes - len(text)]
        if len(text) == limit_bytes:
            break
    if not text:
        raise ValueError(
            f"data=stdlib: expected *.py sources in {root}, found none (an interpreter without its sources); "
            "use data=text data.path=FILE_OR_FOLDER or data=synthetic"
        )
    return text


def stdlib_files(root: Path) -> list[Path]:
    """Modules and packages that every machine with this version has: no tests, nothing installed or generated."""
    skipped = {"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages", "__pycache__"}
    local = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")
    paths = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped and Path(folder, name, "__init__.py").is_file()]
        paths += [Path(folder, name) for name in files if name.endswith(".py") and not name.startswith(local)]
    return sorted(paths, key=lambda path: path.relative_to(root).as_posix())


def read_text(path: Path) -> bytearray:
    """The bytes of a file, or of all text files in a folder, joined in path order.

    In a folder, a text file is one that is not hidden and has no NUL in its first 8 KiB (git's rule).
    """
    if not path.is_file() and not path.is_dir():
        raise ValueError(f"data.path: expected a file or a folder, found none at {path}; correct data.path")
    text = bytearray()
    try:
        for file in text_files(path):
            _append(text, file, always=file == path)
    except OSError as error:
        raise ValueError(
            f"data.path: cannot read {error.filename} ({error.strerror}); allow it, or move it away"
        ) from error
    if not text:
        raise ValueError(
            f"data.path: expected text, found nothing in {path} (hidden files, and in a folder files with "
            "NUL bytes, are left out); name another file or folder"
        )
    return text


def _append(text: bytearray, path: Path, *, always: bool) -> None:
    with path.open("rb") as file:
        if path.name.endswith(READ_AS_RECORDS):
            text += wings.load(wings.TEXT_RECORDS).read(path)
        elif always or is_text(file):
            while chunk := file.read(4 << 20):
                text += chunk
