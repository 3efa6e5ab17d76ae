"""The connection of two ranks: small tokens of a fixed form over a Unix socket, and the peer's process to watch."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections import deque
from contextlib import suppress
from typing import NamedTuple


class Token(NamedTuple):
    """What one rank tells another.

    number: of the collective in the group, or of the message to this peer. phase: within the collective. what: the
    operation, see what.py. numel, dtype, place: of the operation, which all ranks must agree on; `place` is a
    unit's, or a message's tag. address, nbytes: the bytes to be read; 0 in a token that says "read".
    """

    number: int
    phase: int
    what: int
    is_read: bool
    numel: int
    dtype: int
    place: int
    address: int
    nbytes: int


_FORM = struct.Struct("<QBB?QHqQQ")


class Link:
    """One rank's end of a connection.

    rank: the peer's, in the group. pid: its process. fault: why nothing more comes from the peer; empty while it lives.
    """

    def __init__(self, rank: int, pid: int, connection: socket.socket) -> None:
        self.rank, self.pid = rank, pid
        self.fault = ""
        self._connection = connection
        connection.setblocking(False)
        self._unsent: deque[bytes] = deque()
        self._sending = threading.RLock()  # a token must not be sent by two threads; a collection may close the link
        self._owner = os.getpid()
        self.process = -1  # its descriptor
        if hasattr(os, "pidfd_open"):
            # A process that the peer has forked keeps the connection open; its own descriptor tells of its end.
            with suppress(OSError):  # a sandbox may not know the call: then the connection alone tells
                self.process = os.pidfd_open(pid)

    @property
    def descriptors(self) -> list[int]:
        """What poll(2) is to watch: the connection, and the peer's process."""
        return [] if self.fault else [self._connection.fileno(), *([self.process] if self.process >= 0 else [])]

    @property
    def is_sending(self) -> bool:
        """Whether tokens wait for room in the connection."""
        return bool(self._unsent)

    def send(self, token: Token) -> None:
        """Send a token, later if the connection is full. A peer that is gone gets none, and no error comes of it."""
        self._unsent.append(_FORM.pack(*token))
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as there is room."""
        with self._sending:
            while self._unsent and not self.fault:
                try:
                    self._connection.send(self._unsent[0])
                except BlockingIOError:
                    return
                except OSError:
                    self._unsent.clear()  # the peer has left; what it sent before that is still to be received
                    return
                self._unsent.popleft()

    def receive(self, *, ended: bool = False) -> list[Token]:
        """The tokens that have come. Sets `fault` if none can come any more; `ended`: since the process has ended."""
        found: list[Token] = []
        while not self.fault:
            try:
                data = self._connection.recv(_FORM.size)
            except BlockingIOError:
                if ended:
                    self._close("has ended")
                break
            except ConnectionResetError:
                continue  # it left without reading all; what it sent comes after this error
            except OSError:
                data = b""
            if not data:
                self._close("has ended or left the group")
                break
            found.append(Token(*_FORM.unpack(data)))
        return found

    def close(self) -> None:
        """Close this end; the peer then hears that this rank has left. Idempotent."""
        if os.getpid() == self._owner:
            self.flush()
        self._close("was left")

    def _close(self, fault: str) -> None:
        if self.fault:
            return
        self.fault = fault
        if os.getpid() == self._owner:
            with suppress(OSError):  # the peer may have gone
                self._connection.shutdown(socket.SHUT_RDWR)  # a forked child may have the connection too
        self._connection.close()
        if self.process >= 0:
            os.close(self.process)
