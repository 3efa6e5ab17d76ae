"""Damage that full disks, crashes and other programs do to a file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

DEPTH = 200_000


def _written(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: _write(path, change(path.read_bytes() if path.is_file() else b"{}"))


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _flipped(data: bytes) -> bytes:
    """Replace every digit with another one: the JSON stays valid."""
    return data.translate(bytes.maketrans(b"0123456789", b"1234567891"))


def _one_flipped(data: bytes) -> bytes:
    """Flip one bit of the byte in the middle."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :] if data else b"1"


CORRUPTIONS: dict[str, Callable[[Path], None]] = {
    "empty": _written(lambda data: b""),
    "half": _written(lambda data: data[: len(data) // 2]),
    "without its end": _written(lambda data: data[:-3]),
    "other digits": _written(_flipped),
    "one bit": _written(_one_flipped),
    "large numbers": _written(lambda data: re.sub(rb"\b[1-9]\d*\b", b"9" * 400, data)),
    "null": _written(lambda data: b"null\n"),
    "a list": _written(lambda data: b"[]\n"),
    "an object": _written(lambda data: b"{}\n"),
    "a number": _written(lambda data: b"3\n"),
    "another record": _written(lambda data: b'{"state": 3, "event": "started", "points": {}, "pid": "x", "do": []}\n'),
    "twice": _written(lambda data: data + data),
    "garbage": _written(lambda data: bytes(range(128, 256)) * 4),
    "zeros": _written(lambda data: bytes(len(data))),
    "deep": _written(lambda data: b"[" * DEPTH + b"]" * DEPTH),
    "deep objects": _written(lambda data: b'{"a":' * DEPTH + b"1" + b"}" * DEPTH),
    "not UTF-8": _written(lambda data: data.replace(b'"', b'"\xff', 1)),
    "missing": lambda path: path.unlink(missing_ok=True),
}
