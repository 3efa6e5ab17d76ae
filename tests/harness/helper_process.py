"""A process that tests talk to through pipes. If it dies, the test says its exit status and what it wrote last."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, NoReturn

WORDS = 4000  # characters of standard error that an error repeats
END_S = 30.0  # for a process whose pipe has closed, to end


class HelperProcess:
    """A child process that answers on standard output what it is asked on standard input."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._name, self._errors = name, tempfile.TemporaryFile()  # noqa: SIM115
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors, env=environment)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    def send(self, *parts: bytes) -> None:
        """AssertionError with last_words if the process has ended."""
        try:
            for part in parts:
                self._stdin.write(part)
            self._stdin.flush()
        except BrokenPipeError:
            self._fail()

    def read(self, size: int) -> bytes:
        """The next `size` bytes. AssertionError with last_words if there are fewer."""
        found = self._stdout.read(size)
        return found if len(found) == size else self._fail()

    def read_line(self) -> bytes:
        """The next line. AssertionError with last_words if there is none."""
        return self._stdout.readline() or self._fail()

    def close(self) -> None:
        """Ask the process to end, and wait for that."""
        self._close_stdin()
        self._process.wait()
        self._stdout.close()
        self._errors.close()

    def _close_stdin(self) -> None:
        with suppress(BrokenPipeError):  # what the buffer still holds
            self._stdin.close()

    def _fail(self) -> NoReturn:
        self._close_stdin()
        raise AssertionError(last_words(self._name, self._process, self._errors))


def last_words(name: str, process: subprocess.Popen[bytes], errors: IO[bytes]) -> str:
    """How a process that no longer answers has ended, and the end of its standard error in the file `errors`."""
    try:
        status = f"has ended with exit status {process.wait(END_S)}"
    except subprocess.TimeoutExpired:
        status = "has closed its pipe and still runs"
    errors.seek(0)
    said = errors.read().decode("utf-8", "replace").strip()[-WORDS:]
    return f"{name} {status}; it wrote to standard error:\n{said or '(nothing)'}"
