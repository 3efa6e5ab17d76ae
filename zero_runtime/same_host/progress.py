"""Runs the operations of this process, of all groups: any thread that waits for one lets all of them go on.

Groups may be used in different orders on different ranks. A rank that waited in one group only could then wait for
another, which waits for it in a second group.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from zero_runtime.errors import PeerError
from zero_runtime.same_host.links import Link

_NO_MODES = nullcontext()
Steps = Iterator[frozenset[int]]  # of an operation: it yields the ranks of its group that it waits for


class Receiver(Protocol):
    """Takes the tokens out of a link, and must not block: `Mailbox.receive`."""

    def __call__(self, link: Link, /, *, ended: bool) -> None: ...


class Operation:
    """A collective, or a message between two ranks, under way.

    name: for errors. steps: a generator that goes as far as it can, and yields the ranks that it waits for. links: to
    the ranks of its group, by rank. held: tensors that others may read until the operation has ended. then: the last
    part, unless there was an error; operations call theirs one at a time.
    """

    def __init__(
        self,
        name: str,
        steps: Steps,
        links: dict[int, Link],
        held: tuple[Any, ...] = (),
        then: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self.ended = False
        self.error: BaseException | None = None
        self.awaited: frozenset[int] = frozenset()
        self._steps, self._links, self._held, self._then = steps, links, held, then
        self._guard = threading.Lock()  # of the list, and of `ended`
        self._afterwards: list[Callable[[Operation], None]] = []

    def advance(self) -> None:
        """Go as far as possible without waiting. An error ends the operation."""
        # A thread may wait in a mode of torch that is for its own tensors, such as that which replays a checkpointed
        # block, and another may have begun the operation with tensors of inference mode.
        with torch.inference_mode(), _disable_current_modes() if torch._C._len_torch_dispatch_stack() else _NO_MODES:
            self._advance()

    def _advance(self) -> None:
        try:
            self.awaited = next(self._steps)
        except StopIteration:
            self._end(None)
        except BaseException as error:
            self._end(error)
            if not isinstance(error, Exception):  # such as KeyboardInterrupt: of the thread, not of the operation
                raise
        else:
            gone = [link for rank in sorted(self.awaited) if (link := self._links[rank]).fault]
            if gone:
                told = ", ".join(f"rank {one.rank} of the group (process {one.pid}) {one.fault}" for one in gone)
                self._end(PeerError(f"{told}, while {self.name} waits for it"))

    def late(self, seconds: float) -> PeerError:
        """What to raise if the operation has not ended in this time."""
        told = ", ".join(f"{rank} (process {self._links[rank].pid})" for rank in sorted(self.awaited))
        return PeerError(f"{self.name} has waited {seconds:g} s for rank {told} of the group, its limit")

    def afterwards(self, call: Callable[[Operation], None]) -> None:
        """Call this when the operation has ended; at once if it has. It may begin operations and wait for them."""
        with self._guard:
            if not self.ended:
                self._afterwards.append(call)
                return
        call(self)

    @property
    def tells_end(self) -> bool:
        """Whether `tell_end` has something to do."""
        return bool(self._afterwards)

    def tell_end(self) -> None:
        """Make the calls that were asked for by `afterwards`."""
        with self._guard:
            calls, self._afterwards = self._afterwards, []
        for call in calls:
            call(self)

    def _end(self, error: BaseException | None) -> None:
        self._steps = iter(())
        if error is None and self._then is not None:
            try:
                self._then()
            except Exception as failed:
                error = failed
        with self._guard:
            self.error, self.ended, self._held = error, True, ()


class _Parents(threading.Condition):
    """The lock of a parent's operations, in its child: another thread of the parent may have held it at the fork."""

    def __enter__(self) -> bool:
        raise PeerError(
            f"process {os.getpid()} was forked from a rank, whose groups are of no use to it: expected collectives and "
            "messages in the process that made the group; start the child by `spawn`, or let it make groups of its own"
        )


class Progress:
    """The operations of this process that have not ended, and the connections that bring them on.

    One thread at a time is the leader: it receives tokens, advances operations, and sleeps in poll(2). Others that wait
    sleep until the leader has ended a turn. `_lock` guards the lists. `_busy` is held by whoever advances operations,
    the leader or a thread that begins one, so that messages are received in the order in which they were asked for.
    """

    def __init__(self) -> None:
        self._busy: AbstractContextManager[Any] = threading.RLock()  # taken before `_lock`, never while that is held
        self._lock = threading.Condition()
        self._has_leader = False
        self._running: list[Operation] = []
        self._links: dict[int, tuple[Link, Receiver]] = {}  # by descriptor
        self._asked = select.poll()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._asked.register(self._wake_read, select.POLLIN)
        self._behind: list[Operation] = []  # that the thread of its own waits for
        self._thread: threading.Thread | None = None

    def add_links(self, links: Iterable[Link], receive: Receiver) -> None:
        """Watch connections; `receive` takes a link's tokens out of it and must not block."""
        for link in links:
            for descriptor in link.descriptors:
                self._links[descriptor] = (link, receive)
                self._asked.register(descriptor, select.POLLIN)
        self._wake()

    def remove_links(self, links: Collection[Link]) -> None:
        # Without a lock: a garbage collection may come here in any thread. Each line is one step of the interpreter.
        for descriptor, (link, _) in list(self._links.items()):
            if link in links:
                self._links.pop(descriptor, None)
                with suppress(KeyError):
                    self._asked.unregister(descriptor)
        self._wake()

    def refuse(self) -> None:
        """Let each later use raise: this process was forked from the one whose connections these are."""
        self._busy = self._lock = _Parents()

    def start(self, operation: Operation) -> Operation:
        """Begin an operation: what it can do without waiting is done here."""
        with self._busy:
            operation.advance()
            if not operation.ended:
                with self._lock:
                    self._running.append(operation)
                    if self._has_leader:
                        self._wake()  # its tokens may have come already
        if not operation.ended:
            self.poke()
        return operation

    def go_behind(self, operation: Operation) -> None:
        """Let a thread of this process bring the operation to its end, whatever the others wait for."""
        with self._lock:
            if operation.ended:
                return
            self._behind.append(operation)
            self._start_thread()
            self._lock.notify_all()

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="same_host", daemon=True)
            self._thread.start()

    def wait(self, operation: Operation, seconds: float) -> None:
        """Block until the operation has ended; raises its error, or PeerError after this time."""
        deadline = time.monotonic() + seconds
        while not operation.ended:
            left = deadline - time.monotonic()
            if left <= 0:
                raise operation.late(seconds)
            self._turn(operation, left)
        if operation.error is not None:
            raise operation.error

    def poke(self) -> None:
        """Advance what can go on without waiting, unless another thread does."""
        self._turn(None, 0.0)

    def _turn(self, operation: Operation | None, seconds: float) -> None:
        leads = False
        try:
            with self._lock:
                if self._has_leader:
                    if operation is not None and not operation.ended:
                        self._lock.wait(seconds)
                    return
                self._has_leader = leads = True  # in one step, so that no KeyboardInterrupt comes between
            self._advance_all(0.0)
            if operation is not None and not operation.ended:
                self._advance_all(seconds)
        finally:
            if leads:
                self._end_turn()

    def _end_turn(self) -> None:
        with self._lock:
            self._has_leader = False
            ended = [one for one in self._running if one.ended]
            self._running = [one for one in self._running if not one.ended]
            self._lock.notify_all()
            # What is called now may wait for the future of another operation: a second thread brings that to its end.
            if self._thread is threading.current_thread() and any(one.tells_end for one in ended):
                self._thread = None
                if self._behind:
                    self._start_thread()
        for one in ended:
            one.tell_end()

    def _advance_all(self, seconds: float) -> None:
        """Sleep so long at most, until a token comes, a process ends, or another thread has begun something; then take
        the tokens and let all operations go on."""
        full = [one for one, (link, _) in list(self._links.items()) if link.is_sending and one != link.process]
        for descriptor in full:
            self._asked.register(descriptor, select.POLLIN | select.POLLOUT)
        happened = self._asked.poll(max(0.0, seconds) * 1000)
        for descriptor in full:
            self._asked.register(descriptor, select.POLLIN)
        with self._busy:
            for descriptor, _ in happened:
                self._take_from(descriptor)
            with self._lock:
                running = list(self._running)
            for one in running:
                if not one.ended:
                    one.advance()

    def _take_from(self, descriptor: int) -> None:
        if descriptor == self._wake_read:
            with suppress(BlockingIOError):
                os.read(descriptor, 4096)
            return
        if (known := self._links.get(descriptor)) is None:  # the group was left meanwhile
            with suppress(KeyError):
                self._asked.unregister(descriptor)  # else a closed descriptor would end each sleep at once
            return
        link, receive = known
        link.flush()
        receive(link, ended=link.process == descriptor)
        if link.fault:
            self.remove_links([link])

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # full: it wakes anyway
            os.write(self._wake_write, b"\0")

    def _serve(self) -> None:
        while True:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.current_thread()
                if self._thread is not threading.current_thread():
                    return
                while not self._behind:
                    self._lock.wait()
                operation = self._behind.pop(0)
            while not operation.ended:
                self._turn(operation, 1.0)


_of_this_process: Progress | None = None


def progress() -> Progress:
    """The one of this process, made when it is first asked for. A forked process begins anew."""
    global _of_this_process
    if _of_this_process is None:
        _of_this_process = Progress()
        os.register_at_fork(after_in_child=_forget)
    return _of_this_process


def _forget() -> None:
    global _of_this_process
    if _of_this_process is not None:
        _of_this_process.refuse()
    _of_this_process = None
