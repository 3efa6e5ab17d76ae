"""Reads and writes all record files: written atomically with a checksum, checked when read, renamed if they are bad.

[Note: sealed]
A record ends with a checksum over the rest of its contents, so that a digit changed by a bad disk is detected. The
checksum covers the parsed contents, with their keys in order, and not the bytes of the file: indentation may change,
but a program that rewrites a record with other values or another order of keys has to leave the checksum out. A record
without a checksum comes from an earlier version and is accepted.
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
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

from orchestrator.records.record_shapes import METRICS, Events, Shape, misfit
from zero_runtime.process_identity import mark, remove_left_behind

CHECKSUM = "checksum"
MOST_BYTES = 1 << 28  # four times a plan of 10,000 points
LINE_BYTES = 1 << 20
UNENDED_BYTES = 1 << 26  # reading stops after so many bytes without the end of a line: a bad disk may add a terabyte
END_BYTES = 1 << 16
OPEN_S = 1.0  # how long a file of events stays open between events
QUOTED_BYTES = 200  # of the JSON reader's message that are quoted
DEEP = "lists or objects nested too deeply"
OBJECT: Shape = {}
_compact = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps would make an encoder for each line
logger = logging.getLogger(__name__)


class BadRecord(Exception):
    """A record cannot be used; the message names it and says what is wrong and what to do."""

    def __init__(self, path: Path, wrong: str) -> None:
        super().__init__(
            f"{path}: expected a record as it was written, found {wrong}; restore a copy, or move it away and run the "
            "command again"
        )
        self.path, self.wrong = path, wrong


class Rooted(Protocol):
    """An object with the folder of its files."""

    @property
    def root(self) -> Path: ...


class FileIn:
    """An attribute of a class with a `root`: the path of a file or folder in it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: Rooted, kind: type) -> Path:
        return owner.root / self._name


@functools.cache
def warn_once(text: str) -> None:
    """Logs the warning once per process: on stderr, or to the handlers of this module's logger."""
    logger.warning("warning: %s", text)


# ---- reading --------------------------------------------------------------------------------------------------------


def read_json(path: Path, shape: Shape = OBJECT) -> dict[str, Any] | None:
    """The record's contents; None if there is no such file. BadRecord if it is damaged or does not have the shape."""
    data = loaded(path)
    return None if data is None else judged(path, data, shape)


def require_json(path: Path, shape: Shape = OBJECT) -> dict[str, Any]:
    """Like `read_json`, but raises BadRecord for a missing file too."""
    data = read_json(path, shape)
    if data is None:
        raise BadRecord(path, "no such file")
    return data


def read_or_warn(path: Path, shape: Shape = OBJECT) -> dict[str, Any] | None:
    """Like `read_json`, for callers that can do without the record: one that is bad or cannot be opened is reported
    once and counts as missing."""
    try:
        return read_json(path, shape)
    except (BadRecord, OSError) as error:
        warn_once(str(error))
        return None


def judged(path: Path, data: Any, shape: Shape) -> dict[str, Any]:
    """The contents without the checksum. BadRecord if the checksum or the shape does not match."""
    try:
        wrong = misfit(data, OBJECT) or _unsealed(data) or misfit(data, shape)
    except RecursionError:
        wrong = DEEP
    if wrong:
        raise BadRecord(path, wrong)
    contents: dict[str, Any] = data
    return contents


def _unsealed(data: dict[str, Any]) -> str:
    """Removes the checksum; what is wrong if it does not match, else an empty text."""
    stored = data.pop(CHECKSUM, None)
    return "" if stored is None or stored == checksum(data) else "contents that do not match their checksum"


def checksum(data: Mapping[str, Any]) -> str:
    """The checksum of contents, see [Note: sealed]; equal before writing and after reading."""
    return _digest(_compact(data))


def _digest(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def parsed(path: Path, text: bytes) -> Any:
    """The data in a JSON text; BadRecord if it is not valid JSON."""
    try:
        return json.loads(text)
    except RecursionError:
        raise BadRecord(path, DEEP) from None
    except UnicodeDecodeError:
        raise BadRecord(path, "bytes that are not UTF-8") from None
    except ValueError as error:
        raise BadRecord(path, f"no JSON: {str(error)[:QUOTED_BYTES]}" if text.strip() else "an empty file") from None


def loaded(path: Path) -> Any:
    """The file's JSON data, not yet checked; None if there is no such file. BadRecord if it is too large or no JSON."""
    text = file_bytes(path)
    if text is None:
        return None
    data = parsed(path, text)
    if data is None:
        raise BadRecord(path, "null")
    return data


def file_bytes(path: Path) -> bytes | None:
    """The bytes of a regular file; None if there is no such file. BadRecord if it is too large or no file."""
    with _regular(path) as file:
        if file is None:
            return None
        size = os.fstat(file.fileno()).st_size
        if size > MOST_BYTES:
            raise BadRecord(path, f"{size:,} bytes, more than {MOST_BYTES:,}")
        return file.read()


@contextlib.contextmanager
def _regular(path: Path) -> Iterator[IO[bytes] | None]:
    """Opens a regular file; yields None if there is no such file.

    Raises BadRecord for anything else: opening a FIFO, for example, could block forever.
    """
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
    """Replaces a record atomically: readers see the old record or the complete new one.

    The new data is on the disk before the old record is replaced, so that a crash of the machine leaves one of them
    complete. A failure leaves the old record unchanged and raises OSError with the record's path.
    """
    write_text_atomic(path, json.dumps(sealed(data), indent=2, ensure_ascii=False) + "\n")


def write_text_atomic(path: Path, text: str, *, lasting: bool = True) -> None:
    """Replaces a text file atomically, as `write_json_atomic` does. lasting: it has to survive a crash of the machine,
    so that the data is on the disk first."""
    write_bytes_atomic(path, text.encode("utf-8", errors="backslashreplace"), lasting=lasting)


def write_bytes_atomic(path: Path, content: bytes, *, lasting: bool = True) -> None:
    """The same for a file that is no text."""
    temporary = path.with_name(f".{path.name}.{mark()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            if lasting:
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
    """Removes the temporary files in the folder whose writers have ended, and returns their paths."""
    return remove_left_behind(folder.glob(".*.tmp"))


def sealed(data: Mapping[str, Any]) -> dict[str, Any]:
    """The data with the checksum of its contents added; see [Note: sealed]."""
    bare = {key: value for key, value in data.items() if key != CHECKSUM}
    return {**bare, CHECKSUM: checksum(bare)}


def _named(error: OSError, path: Path) -> OSError:
    """The error with the path of the record, which errors of read and write calls do not have."""
    return OSError(error.errno, error.strerror or str(error), str(path))


def set_aside(path: Path, wrong: str) -> None:
    """Renames a bad record whose path is needed, and logs a warning. Nothing is deleted."""
    if not os.path.lexists(path):
        return
    number, aside = 1, path.with_name(f"{path.name}.bad")
    while os.path.lexists(aside):
        number += 1
        aside = path.with_name(f"{path.name}.bad{number}")
    path.rename(aside)
    warn_once(f"{path} was {wrong}: it was set aside as {aside.name}")


def make_way(path: Path) -> None:
    """Sets aside whatever exists at the path, unless it is a regular file."""
    if os.path.lexists(path) and (wrong := _no_file(path.stat().st_mode if path.exists() else 0)):
        set_aside(path, wrong)


def make_room(path: Path, shape: Shape = OBJECT) -> None:
    """Sets the record aside if it is bad. A good record, and one that cannot be opened, are left as they are."""
    with contextlib.suppress(OSError):
        try:
            read_json(path, shape)
        except BadRecord as bad:
            set_aside(path, bad.wrong)


_ADVICE = {
    errno.ENOSPC: "free space there, then run the same command again: points with an answer are kept",
    errno.EDQUOT: "free space there, then run the same command again: points with an answer are kept",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f), then run the same command again",
    errno.EMFILE: "raise the limit of open files (ulimit -n), then run the same command again",
    errno.EAGAIN: "raise the limit of processes (ulimit -u), then run the same command again",
    errno.EROFS: "give output=FOLDER (--output FOLDER) that can be written to",
    errno.EACCES: "it belongs to another user: give output=FOLDER (--output FOLDER) of your own",
    errno.EPERM: "it belongs to another user: give output=FOLDER (--output FOLDER) of your own",
}


def explained(error: BadRecord | OSError) -> str:
    """One line that says what went wrong with a file and what to do about it."""
    if isinstance(error, BadRecord) or error.errno is None:
        return str(error)
    words = [f"{error.filename}: " if error.filename else "", error.strerror or str(error)]
    advice = _ADVICE.get(error.errno)
    return "".join([*words, f"; {advice}" if advice else ""])


# ---- growing files of lines -----------------------------------------------------------------------------------------


def append_event(path: Path, event: Mapping[str, object]) -> None:
    """Appends one line in a single write, so that readers never see half a line followed by another one.

    If a full disk has left half a line at the end, that line is ended first: it is lost, but the new one is not.
    """
    appender = EventAppender(path)
    try:
        appender.append(event)
    finally:
        appender.close()


class EventAppender:
    """Appends events as `append_event` does, and keeps the file open for up to OPEN_S: opening and closing it, and
    looking at its end, take as long as the rest. On a network file system other machines see what was written when the
    file is closed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._opened = 0.0

    def append(self, event: Mapping[str, object]) -> None:
        """Appends one line. OSError if it cannot be written; the next call opens the file again."""
        line = _sealed_line(event)
        now = time.monotonic()
        try:
            if self._descriptor is not None and (now - self._opened >= OPEN_S or _is_removed(self._descriptor)):
                self.close()
            if self._descriptor is None:
                self._descriptor, self._opened = self._open(), now
                size = os.fstat(self._descriptor).st_size
                if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
                    line = b"\n" + line
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError as error:
            self.close()
            raise _named(error, self._path) from error

    def _open(self) -> int:
        try:
            return _for_appending(self._path)
        except IsADirectoryError:
            set_aside(self._path, "a folder")
            return _for_appending(self._path)

    def close(self) -> None:
        """Closes the file. The next `append` opens it again."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)


def _sealed_line(event: Mapping[str, object]) -> bytes:
    """The event as a line with its checksum. The text whose checksum is taken is the line itself, so that the event is
    encoded once."""
    bare = {key: value for key, value in event.items() if key != CHECKSUM}
    text = _compact(bare)
    return f'{text[:-1]},"{CHECKSUM}":"{_digest(text)}"}}\n'.encode()


def _is_removed(descriptor: int) -> bool:
    return os.fstat(descriptor).st_nlink == 0


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
    """Reads a growing file of events and returns each event once. Bad lines are skipped and reported once."""

    def __init__(self, path: Path, events: Events = METRICS) -> None:
        self._path, self._events = path, events
        self._offset = 0
        self._lines: int | None = 0  # number of lines read; None if it is unknown

    @classmethod
    def of_the_end(cls, path: Path) -> EventTail:
        """A tail that starts near the end of a large file, for callers that check many files again and again."""
        tail = cls(path)
        with contextlib.suppress(BadRecord, OSError), _regular(path) as file:
            if file is not None and (size := os.fstat(file.fileno()).st_size) > END_BYTES:
                file.seek(size - END_BYTES)
                file.readline(LINE_BYTES)
                tail._offset, tail._lines = file.tell(), None
        return tail

    def read_new(self) -> list[dict[str, Any]]:
        """The events since the last call. An incomplete last line is left for the next call."""
        events: list[dict[str, Any]] = []
        bad = ""
        try:
            with _regular(self._path) as file:
                for line in () if file is None else self._complete_lines(file):
                    event, wrong = self._event(line)
                    bad = bad or (wrong and f"{self._line} is left out: expected an event, found {wrong}")
                    events += [] if event is None else [event]
        except (BadRecord, OSError) as error:
            warn_once(str(error))
        if bad:  # only the first one of this call: a file of another kind may have thousands
            warn_once(f"{self._path}: {bad}")
        return events

    def _complete_lines(self, file: IO[bytes]) -> Iterator[bytes]:
        file.seek(self._offset)
        unended = 0
        # Long lines are read in pieces, since a line without an end may be larger than memory.
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
        """The event in the line and an empty text, or None and what is wrong with the line."""
        try:
            event = judged(self._path, parsed(self._path, line), {self._events.key: str})
            return judged(self._path, event, self._events.shapes.get(event[self._events.key], OBJECT)), ""
        except BadRecord as bad:
            return None, bad.wrong
