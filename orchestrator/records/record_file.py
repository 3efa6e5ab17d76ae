"""The one door to records on disk: written whole and sealed, read whole and judged, set aside where they are bad.

[Note: sealed]
A record ends with a checksum over everything else in it, so a digit that a bad disk changed is found and not believed.
It is of the contents and not of the bytes: whoever reads a record with another program and writes it again in another
order or indentation has to leave the checksum out. A record without one is of an earlier version, and is read.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import logging
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from orchestrator.records.record_shapes import METRICS, Events, Shape, misfit
from zero_runtime.process_identity import mark, remove_left_behind

CHECKSUM = "checksum"
MOST_BYTES = 1 << 28  # a plan of 10,000 points has a quarter
LINE_BYTES = 1 << 20
UNENDED_BYTES = 1 << 26  # of what is no line: nobody reads on in a file that a bad disk made a terabyte of
END_BYTES = 1 << 16
TOLD_BYTES = 200  # of a message of the JSON reader
DEEP = "lists or objects nested too deeply"
OBJECT: Shape = {}
logger = logging.getLogger(__name__)


class BadRecord(Exception):
    """A record that is there and cannot be used; the message names it and says what is wrong and what to do."""

    def __init__(self, path: Path, wrong: str) -> None:
        super().__init__(
            f"{path}: expected a record as it was written, found {wrong}; restore a copy, or move it away and give the "
            "command again"
        )
        self.path, self.wrong = path, wrong


@functools.cache
def warn_once(text: str) -> None:
    """Says it once in this process: on stderr, or wherever a handler of this module's logger takes it."""
    logger.warning("warning: %s", text)


# ---- reading --------------------------------------------------------------------------------------------------------


def read_json(path: Path, shape: Shape = OBJECT) -> dict[str, Any] | None:
    """None where there is no such file. BadRecord where it is not what was written, or has not that shape."""
    data = loaded(path)
    return None if data is None else judged(path, data, shape)


def require_json(path: Path, shape: Shape = OBJECT) -> dict[str, Any]:
    """The same; that there is no such file is a BadRecord too."""
    found = read_json(path, shape)
    if found is None:
        raise BadRecord(path, "no such file")
    return found


def read_or_warn(path: Path, shape: Shape = OBJECT) -> dict[str, Any] | None:
    """The same for who can answer without it: what is bad, or may not be read, is told once and counts as missing."""
    try:
        return read_json(path, shape)
    except (BadRecord, OSError) as error:
        warn_once(str(error))
        return None


def read_cached(path: Path, key: str) -> Any | None:
    """What `write_cached` kept there for this key. None where there is none, or none that can be believed: a cache is
    made again without a word."""
    with contextlib.suppress(BadRecord, OSError):
        data = loaded(path)
        if isinstance(data, dict) and CHECKSUM in data and judged(path, data, OBJECT).get("key") == key:
            return data.get("kept")
    return None


def write_cached(path: Path, key: str, kept: object) -> None:
    """Keeps it where that can be done; where not, it is found again the next time."""
    with contextlib.suppress(OSError):
        write_json_atomic(path, {"key": key, "kept": kept})


def judged(path: Path, data: Any, shape: Shape) -> dict[str, Any]:
    """The contents without the checksum. BadRecord where that or the shape does not hold."""
    try:
        wrong = misfit(data, OBJECT) or _unsealed(data) or misfit(data, shape)
    except RecursionError:
        wrong = DEEP
    if wrong:
        raise BadRecord(path, wrong)
    found: dict[str, Any] = data
    return found


def _unsealed(data: dict[str, Any]) -> str:
    """Takes the checksum off; what is wrong where it does not hold."""
    found = data.pop(CHECKSUM, None)
    return "" if found is None or found == checksum(data) else "contents that do not match their checksum"


def checksum(data: Mapping[str, Any]) -> str:
    """See [Note: sealed]. The same for what was written and for what is read again."""
    text = json.dumps(data, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def parsed(path: Path, text: bytes) -> Any:
    """BadRecord where it is no JSON."""
    try:
        return json.loads(text)
    except RecursionError:
        raise BadRecord(path, DEEP) from None
    except UnicodeDecodeError:
        raise BadRecord(path, "bytes that are not UTF-8") from None
    except ValueError as error:
        raise BadRecord(path, f"no JSON: {str(error)[:TOLD_BYTES]}" if text.strip() else "an empty file") from None


def loaded(path: Path) -> Any:
    """Whatever JSON is there, not yet judged; None where there is no such file."""
    with _regular(path) as file:
        if file is None:
            return None
        size = os.fstat(file.fileno()).st_size
        if size > MOST_BYTES:
            raise BadRecord(path, f"{size:,} bytes, more than {MOST_BYTES:,}")
        data = parsed(path, file.read())
    if data is None:
        raise BadRecord(path, "null")
    return data


@contextlib.contextmanager
def _regular(path: Path) -> Iterator[IO[bytes] | None]:
    """None where there is no such file. BadRecord for what is none: to open a FIFO would wait for ever."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        yield None
        return
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise BadRecord(path, "something that is no file") from None
        raise
    if wrong := _no_file(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BadRecord(path, wrong)
    with open(descriptor, "rb") as file:
        try:
            yield file
        except OSError as error:
            raise _named(error, path) from None


def _no_file(mode: int) -> str:
    if stat.S_ISREG(mode):
        return ""
    return "a folder" if stat.S_ISDIR(mode) else "something that is no file"


# ---- writing --------------------------------------------------------------------------------------------------------


def write_json_atomic(path: Path, data: Mapping[str, Any]) -> None:
    """A reader sees the old record or the whole new one; on return the new one survives a crash of the machine.

    A failure leaves the old one alone, and raises OSError with the record's path.
    """
    write_text_atomic(path, json.dumps(sealed(data), indent=2, ensure_ascii=False) + "\n")


def write_text_atomic(path: Path, text: str) -> None:
    """The same of any text."""
    temporary = path.with_name(f".{path.name}.{mark()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        try:
            temporary.replace(path)
        except IsADirectoryError:
            set_aside(path, "a folder")
            temporary.replace(path)
    except OSError as error:
        raise _named(error, path) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def clear_leftovers(folder: Path) -> list[Path]:
    """Remove what processes that have ended began to write in the folder and could not finish; what went."""
    return remove_left_behind(folder.glob(".*.tmp"))


def sealed(data: Mapping[str, Any]) -> dict[str, Any]:
    """With the checksum of its contents; see [Note: sealed]."""
    bare = {key: value for key, value in data.items() if key != CHECKSUM}
    return {**bare, CHECKSUM: checksum(bare)}


def _named(error: OSError, path: Path) -> OSError:
    """A failure of writing knows no path by itself."""
    return OSError(error.errno, error.strerror or str(error), str(path))


def set_aside(path: Path, wrong: str) -> None:
    """Renames what cannot be used where a run needs the place, and says so. Nothing is deleted."""
    if not os.path.lexists(path):
        return
    number, aside = 1, path.with_name(f"{path.name}.bad")
    while os.path.lexists(aside):
        number += 1
        aside = path.with_name(f"{path.name}.bad{number}")
    path.rename(aside)
    warn_once(f"{path} was {wrong}: it was set aside as {aside.name}")


def make_way(path: Path) -> None:
    """Sets aside what is no file."""
    if os.path.lexists(path) and (wrong := _no_file(path.stat().st_mode if path.exists() else 0)):
        set_aside(path, wrong)


def make_room(path: Path, shape: Shape = OBJECT) -> None:
    """Sets the record aside where it is bad; leaves a good one, none, and one that may not be read as it is."""
    with contextlib.suppress(OSError):
        try:
            read_json(path, shape)
        except BadRecord as bad:
            set_aside(path, bad.wrong)


_ADVICE = {
    errno.ENOSPC: "make room there, then give the same command again: what has an answer is kept",
    errno.EDQUOT: "make room there, then give the same command again: what has an answer is kept",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f), then give the same command again",
    errno.EMFILE: "raise the limit of open files (ulimit -n), then give the same command again",
    errno.EAGAIN: "raise the limit of processes (ulimit -u), then give the same command again",
    errno.EROFS: "give output=FOLDER (--output FOLDER) that can be written to",
    errno.EACCES: "it belongs to another user: give output=FOLDER (--output FOLDER) of your own",
    errno.EPERM: "it belongs to another user: give output=FOLDER (--output FOLDER) of your own",
}


def told(error: BadRecord | OSError) -> str:
    """What went wrong with a file, and what to do, in one line."""
    if isinstance(error, BadRecord) or error.errno is None:
        return str(error)
    words = [f"{error.filename}: " if error.filename else "", error.strerror or str(error)]
    advice = _ADVICE.get(error.errno)
    return "".join([*words, f"; {advice}" if advice else ""])


# ---- growing files of lines -----------------------------------------------------------------------------------------


def append_event(path: Path, event: Mapping[str, object]) -> None:
    """Adds one line in one write, so that a reader never sees half of one followed by another.

    The half line that a full disk left is ended first: it is lost, and this one is not.
    """
    line = json.dumps(sealed(event), ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
    try:
        descriptor = _for_appending(path)
    except IsADirectoryError:
        set_aside(path, "a folder")
        descriptor = _for_appending(path)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        while line:
            line = line[os.write(descriptor, line) :]
    except OSError as error:
        raise _named(error, path) from error
    finally:
        os.close(descriptor)


def _for_appending(path: Path) -> int:
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o666)
    wrong = _no_file(os.fstat(descriptor).st_mode)
    if not wrong:
        return descriptor
    os.close(descriptor)
    set_aside(path, wrong)
    return os.open(path, flags, 0o666)


class EventTail:
    """Reads a growing file of events; each event is given out once. A bad line is left out, and told once."""

    def __init__(self, path: Path, events: Events = METRICS) -> None:
        self._path, self._events = path, events
        self._offset = 0
        self._lines: int | None = 0  # that were read; None where nobody counted those before

    @classmethod
    def of_the_end(cls, path: Path, events: Events = METRICS) -> EventTail:
        """The same from somewhere near the end on: for who looks again and again at what may have grown large."""
        tail = cls(path, events)
        with contextlib.suppress(BadRecord, OSError), _regular(path) as file:
            if file is not None and (size := os.fstat(file.fileno()).st_size) > END_BYTES:
                file.seek(size - END_BYTES)
                file.readline(LINE_BYTES)
                tail._offset, tail._lines = file.tell(), None
        return tail

    def read_new(self) -> list[dict[str, Any]]:
        """The events since the last call. A last line without its end is left for the next call."""
        found: list[dict[str, Any]] = []
        bad = ""
        try:
            with _regular(self._path) as file:
                for line in () if file is None else self._whole(file):
                    event, wrong = self._event(line)
                    bad = bad or (wrong and f"{self._line} is left out: expected an event, found {wrong}")
                    found += [] if event is None else [event]
        except (BadRecord, OSError) as error:
            warn_once(str(error))
        if bad:  # the first of this call: a file of another kind is a thousand of them
            warn_once(f"{self._path}: {bad}")
        return found

    def _whole(self, file: IO[bytes]) -> Iterator[bytes]:
        file.seek(self._offset)
        unended = 0
        while (line := file.readline(LINE_BYTES)).endswith(b"\n") or len(line) == LINE_BYTES:
            self._offset += len(line)
            self._lines = None if self._lines is None else self._lines + line.endswith(b"\n")
            unended = 0 if line.endswith(b"\n") else unended + len(line)
            if unended >= UNENDED_BYTES:
                self._offset, self._lines = os.fstat(file.fileno()).st_size, None
                raise BadRecord(self._path, f"{unended:,} bytes without the end of a line")
            if line.strip():
                yield line

    @property
    def _line(self) -> str:
        return "a line near its end" if self._lines is None else f"line {self._lines}"

    def _event(self, line: bytes) -> tuple[dict[str, Any] | None, str]:
        """The event, or what is wrong with the line."""
        try:
            event = judged(self._path, parsed(self._path, line), {self._events.key: str})
            return judged(self._path, event, self._events.shapes.get(event[self._events.key], OBJECT)), ""
        except BadRecord as bad:
            return None, bad.wrong
