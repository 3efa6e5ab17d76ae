"""Reads and writes all record files: written atomically, checked when read, renamed if they are bad."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from orchestrator.records.record_shapes import METRICS, Events, Shape, misfit
from zero_runtime.process_identity import mark, remove_left_behind

END_BYTES = 1 << 16
OPEN_S = 1.0  # how long a file of events stays open between events
QUOTED_BYTES = 200  # of the JSON reader's message that are quoted
OBJECT: Shape = {}
_APPENDING = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
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
    """The contents, if they have the shape. BadRecord if not."""
    if wrong := misfit(data, OBJECT) or misfit(data, shape):
        raise BadRecord(path, wrong)
    contents: dict[str, Any] = data
    return contents


def parsed(path: Path, text: bytes) -> Any:
    """The data in a JSON text; BadRecord if it is not valid JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRecord(path, f"no JSON: {str(error)[:QUOTED_BYTES]}" if text.strip() else "an empty file") from None


def loaded(path: Path) -> Any:
    """The file's JSON data, not yet checked; None if there is no such file. BadRecord if it is no JSON."""
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    data = parsed(path, text)
    if data is None:
        raise BadRecord(path, "null")
    return data


# ---- writing --------------------------------------------------------------------------------------------------------


def write_json_atomic(path: Path, data: Mapping[str, Any]) -> None:
    """Replaces a record atomically: readers see the old record or the complete new one.

    The new data is on the disk before the old record is replaced, so that a crash of the machine leaves one of them
    complete. A failure leaves the old record unchanged and raises OSError with the record's path.
    """
    write_text_atomic(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


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
        temporary.replace(path)
    except OSError as error:
        raise _named(error, path) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def clear_leftovers(folder: Path) -> list[Path]:
    """Removes the temporary files in the folder whose writers have ended, and returns their paths."""
    return remove_left_behind(folder.glob(".*.tmp"))


def _named(error: OSError, path: Path) -> OSError:
    """The error with the path of the record, which errors of read and write calls do not have."""
    return OSError(error.errno, error.strerror or str(error), str(path))


def set_aside(path: Path, wrong: str) -> None:
    """Renames a bad record whose path is needed, and logs a warning. Nothing is deleted."""
    aside = path.with_name(f"{path.name}.{time.strftime('%Y-%m-%d_%H-%M-%S')}.bad")
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)
        warn_once(f"{path} was {wrong}: it was set aside as {aside.name}")


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
        line = f"{_compact(event)}\n".encode()
        now = time.monotonic()
        try:
            if self._descriptor is not None and (now - self._opened >= OPEN_S or _is_removed(self._descriptor)):
                self.close()
            if self._descriptor is None:
                self._descriptor, self._opened = os.open(self._path, _APPENDING, 0o666), now
                size = os.fstat(self._descriptor).st_size
                if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
                    line = b"\n" + line
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError as error:
            self.close()
            raise _named(error, self._path) from error

    def close(self) -> None:
        """Closes the file. The next `append` opens it again."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)


def _is_removed(descriptor: int) -> bool:
    return os.fstat(descriptor).st_nlink == 0


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
        with contextlib.suppress(OSError), path.open("rb") as file:
            if (size := os.fstat(file.fileno()).st_size) > END_BYTES:
                file.seek(size - END_BYTES)
                file.readline()
                tail._offset, tail._lines = file.tell(), None
        return tail

    def read_new(self) -> list[dict[str, Any]]:
        """The events since the last call. An incomplete last line is left for the next call."""
        events: list[dict[str, Any]] = []
        bad = ""
        for line in self._new_lines():
            self._lines = None if self._lines is None else self._lines + 1
            if not line.strip():
                continue
            try:
                events.append(self._event(line))
            except BadRecord as error:
                bad = bad or f"{self._line} is left out: expected an event, found {error.wrong}"
        if bad:  # only the first one of this call: a file of another kind may have thousands
            warn_once(f"{self._path}: {bad}")
        return events

    def _new_lines(self) -> list[bytes]:
        """The complete lines since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            warn_once(str(error))
            return []
        *lines, unended = text.split(b"\n")
        self._offset += len(text) - len(unended)
        return lines

    @property
    def _line(self) -> str:
        return "a line near its end" if self._lines is None else f"line {self._lines}"

    def _event(self, line: bytes) -> dict[str, Any]:
        """The event in the line. BadRecord if it is none."""
        event = judged(self._path, parsed(self._path, line), {self._events.key: str})
        return judged(self._path, event, self._events.shapes.get(event[self._events.key], OBJECT))
