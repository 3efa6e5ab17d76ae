"""Ends all ranks within seconds, with the cause, when one hangs or dies: ranks without progress compare their states.

In the steady state each rank writes its journal (a few stores to memory), and a separate thread checks the store every
`poll_s` seconds for the start of a round. A rank starts a round if neither its working thread nor its device has made
progress for `slow_s`, if a collective raised an error, if the ranks' fingerprints differ, or if it fails.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from types import TracebackType
from typing import NoReturn, Protocol

from zero_runtime.errors import RankError
from zero_runtime.watch.device_progress import DeviceProgress
from zero_runtime.watch.failure import is_broken_connection, is_out_of_memory, memory_error, told
from zero_runtime.watch.journal import Journal
from zero_runtime.watch.judge import Blame, Note, Patience, RankStatus, judge
from zero_runtime.watch.process import OwnProcess, Whereabouts, format_frames, remove_folder

_log = logging.getLogger(__name__)
_HEARD_S = 2.0  # how long an ending rank waits for the others to read the verdict: its process may hold the store


class KeyValueStore(Protocol):
    """The methods of torch.distributed's stores that are used.

    The watch needs a client of the store for itself: a shared one is blocked while another thread waits in it.
    """

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def set_timeout(self, timeout: timedelta) -> None: ...


@dataclass(frozen=True)
class WatchSettings:
    """When ranks compare notes and when they end. All times are in seconds.

    slow_s: time without progress after which notes are compared.
    stuck_s: how long a living rank may stay away from a collective that others wait in; raise it if one rank works
        alone for longer (a checkpoint, a download).
    start_s: replaces stuck_s, if it is longer, until the first step is over or Journal.end_start was called: at the
        start, ranks build, load and compile at different speeds.
    answer_s: time after which a rank of another machine that writes no note counts as lost.
    poll_s: interval between two checks.
    grace_s: time after which a working thread that cannot raise the verdict is ended with its process.
    """

    slow_s: float = 5.0
    stuck_s: float = 60.0
    start_s: float = 300.0
    answer_s: float = 5.0
    poll_s: float = 0.5
    grace_s: float = 1.0

    @property
    def patience(self) -> Patience:
        return Patience(self.slow_s, self.stuck_s, self.start_s)


class RankWatch:
    """One rank's watch; create it in the thread that trains. As a context it reports how this rank ended."""

    def __init__(
        self,
        store: KeyValueStore,
        rank: int,
        world: int,
        settings: WatchSettings | None = None,
        on_end: Callable[[RankError], None] | None = None,
    ) -> None:
        self._store = store
        self._rank, self._world = rank, world
        self._settings = settings or WatchSettings()
        self._on_end = on_end
        self._process = OwnProcess()
        self.journal: Journal = self._process.journal
        self.progress = DeviceProgress(self.journal)
        self._count_others: Callable[[], int] = lambda: 0
        self._others = 0
        self._round = 1
        self._trouble = ""  # the error for which the working thread, which cannot continue, requests a round
        self._ended: Note | None = None
        self._ticks, self._moved = self.journal.ticks, time.monotonic()
        self._patience_s = self._settings.slow_s
        self._told_slow = False
        self._wake, self._judged, self._closed = threading.Event(), threading.Event(), threading.Event()
        self._verdict: RankError | None = None
        self._ending, self._raised = threading.Lock(), False  # held by the thread that ends this rank
        store.set(f"place/{rank}", json.dumps(asdict(self._process.whereabouts)))
        self._thread = threading.Thread(target=self._watch, name="rank_watch", daemon=True)
        if world > 1:
            self._thread.start()
        atexit.register(self._at_exit)

    # ---- called by the working thread --------------------------------------------------------------------------

    def count_others(self, count: Callable[[], int]) -> None:
        """Also watch the collectives that other code issues, which are not in the journal. count: how many so far, the
        same on all ranks when they have come equally far; the watching thread calls it."""
        self._count_others = count

    def explain(self, trouble: str, error: BaseException | None = None) -> NoReturn:
        """Have the ranks compare notes, because the working thread cannot continue, and raise the verdict.

        Raises RankError from `error`; blocks until there is a verdict or the time for one has passed.
        """
        if self._thread.is_alive():
            self._trouble = trouble
            self._wake.set()
            self._judged.wait(self._settings.stuck_s + 2 * self._settings.answer_s)
        if not self._raised and not self._ending.acquire(blocking=False):
            threading.Event().wait()  # the watching thread is ending this process
        self._raised = True
        raise self._verdict or RankError(f"rank {self._rank}: {trouble}", (self._rank,)) from error

    def __enter__(self) -> RankWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Report the end to the others. Out-of-memory errors become a RankError with the position, those of a broken
        connection one with the rank that broke it; others propagate."""
        place, _ = self.journal.read()
        if error is not None and is_broken_connection(error):
            try:
                self.explain(f"a collective failed: {error}", error)
            except RankError as verdict:
                self.close(verdict)
                raise
        self.close(error)
        if error is not None and is_out_of_memory(error):
            raise memory_error(self._rank, error, place) from error

    def close(self, error: BaseException | None = None) -> None:
        """Report that this rank ends, normally or with `error`. Idempotent.

        After an error of its own it waits for the other ranks to read the verdict, at most _HEARD_S + answer_s.
        """
        if self._closed.is_set():
            return
        standing = RankStatus.LEFT if error is None else RankStatus.FAILED
        if isinstance(error, RankError) and error is self._verdict:
            standing = RankStatus.BLAMES
        note = self._note(standing)
        if error is not None:
            assert note.place is not None
            stack = "".join(format_frames(traceback.extract_tb(error.__traceback__)))
            note = replace(note, error=told(error, note.place), stack=stack)
        with contextlib.suppress(RuntimeError):  # the store may have ended with the rank that holds it
            if self._world > 1:  # nobody reads the note of a single rank
                # A file store waits for its file, five minutes by default, where its folder has been removed meanwhile.
                self._store.set_timeout(timedelta(seconds=self._settings.answer_s))
                self._store.set(f"end/{self._rank}", note.dump())
        self._ended = note
        if standing is RankStatus.FAILED and self._thread.is_alive():
            self._wake.set()
            self._judged.wait(_HEARD_S + self._settings.answer_s)
        self._closed.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_HEARD_S)
        self._process.close()
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        """Close a watch that was not used as a context: sys.last_value is the error that ended the main thread."""
        self.close(getattr(sys, "last_value", None))

    # ---- called by the watching thread -------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            while not self._closed.is_set() and self._verdict is None:
                self._wake.wait(self._settings.poll_s)
                self._wake.clear()
                if not self._closed.is_set():
                    self._look()
        except RuntimeError as error:  # torch's stores raise subclasses: DistStoreError, DistNetworkError, ...
            self._without_store(error)
        if self._verdict is not None:
            self._end()

    def _look(self) -> None:
        now = time.monotonic()
        if self._has_progressed(now):
            self._patience_s, self._told_slow = self._settings.slow_s, False
        failed = self._ended is not None and self._ended.standing is RankStatus.FAILED
        if failed or self._trouble or now - self._moved > self._patience_s:
            self._store.set(f"ask/{self._round}", str(self._rank))
        if self._store.check([f"ask/{self._round}"]):
            self._compare(self._round)
            self._round += 1

    def _has_progressed(self, now: float) -> bool:
        """Whether the working thread, or the device if that thread is idle, has made progress since the last call."""
        has_ticked = self.journal.ticks != self._ticks
        others, self._others = self._others, self._count_others()
        has_ticked = has_ticked or self._others != others
        if not has_ticked and (now - self._moved <= self._settings.slow_s or not self.progress.poll()):
            return False
        self._ticks, self._moved = self.journal.ticks, now
        return True

    def _compare(self, number: int) -> None:
        """Run one round: write this rank's note, and judge all notes or hear the verdict."""
        # Over the store, since data collectives may be stuck. One rank judges, so that all have the same verdict.
        self._has_progressed(time.monotonic())
        if self._ended is None:
            self._store.set(f"note/{number}/{self._rank}", self._note(RankStatus.RUNNING).dump())
        if self._store.add(f"judge/{number}", 1) == 1:  # only the first rank to add becomes the judge
            found = judge(self._collect(number), self._settings.patience)
            self._store.set(f"verdict/{number}", json.dumps(asdict(found)))
        else:
            found = self._hear(number)
        if found.ranks:
            self._verdict = RankError(found.text, found.ranks, hung=found.hung)
            self._linger(number)
            return
        # No rank is to blame: if there is still no progress, the next round starts after twice the time.
        self._patience_s = min(2 * self._patience_s, self._settings.stuck_s / 2)
        if found.text and not self._told_slow:
            self._told_slow = True
            _log.warning("rank %d: slow, not ended: %s", self._rank, found.text)

    def _collect(self, number: int) -> list[Note]:
        """A note for every rank: the one that it wrote in this round or at its end, or one made from its process."""
        begun = time.monotonic()
        notes: dict[int, Note] = {}
        while True:
            for rank in set(range(self._world)) - set(notes):
                note = self._read_note(number, rank, time.monotonic() - begun)
                if note is not None:
                    notes[rank] = note
            if len(notes) == self._world:
                return [notes[rank] for rank in range(self._world)]
            time.sleep(0.02)

    def _read_note(self, number: int, rank: int, waited_s: float) -> Note | None:
        for key in (f"end/{rank}", f"note/{number}/{rank}"):
            if self._store.check([key]):
                return Note.load(self._store.get(key))
        if not self._store.check([f"place/{rank}"]):
            return Note(rank, RankStatus.SILENT) if waited_s > self._settings.stuck_s else None
        whereabouts = Whereabouts(**json.loads(self._store.get(f"place/{rank}")))
        standing = whereabouts.standing()
        # A living process on this machine may be blocked in a call that holds Python's lock.
        place, ops, crash = whereabouts.left_behind()
        alive_s = self._settings.patience.with_rank_in(place)
        limit_s = alive_s if standing is RankStatus.RUNNING else self._settings.answer_s
        if standing in (None, RankStatus.RUNNING) and waited_s < limit_s:
            return None
        if standing is RankStatus.STOPPED and waited_s < self._settings.poll_s:
            return None  # a debugger or job control may continue it immediately
        if standing in (RankStatus.GONE, RankStatus.STOPPED):
            remove_folder(whereabouts)
        absent = standing if standing in (RankStatus.GONE, RankStatus.STOPPED) else RankStatus.SILENT
        return Note(rank, absent, place, ops, stack=crash)

    def _hear(self, number: int) -> Blame:
        """The verdict of the rank that judges; this rank's own if that rank writes none in time."""
        deadline = time.monotonic() + self._settings.stuck_s + self._settings.answer_s
        while not self._store.check([f"verdict/{number}"]):
            if time.monotonic() > deadline:
                return judge(self._collect(number), self._settings.patience)
            time.sleep(0.02)
        found = json.loads(self._store.get(f"verdict/{number}"))
        return Blame(tuple(found["ranks"]), found["text"], found["hung"])

    def _linger(self, number: int) -> None:
        """Wait until every rank that is not to blame has the verdict: the rank with the store must not end first."""
        heard = f"heard/{number}"
        assert self._verdict is not None
        with contextlib.suppress(RuntimeError):
            self._store.add(heard, int(self._rank not in self._verdict.ranks))
            deadline = time.monotonic() + _HEARD_S
            others = self._world - len(self._verdict.ranks)
            while self._store.add(heard, 0) < others and time.monotonic() < deadline:
                time.sleep(0.02)

    def _without_store(self, error: RuntimeError) -> None:
        """Watch without the store, whose process ended: that is an error only if this rank cannot continue."""
        while not self._closed.is_set():
            note = self._note(RankStatus.RUNNING)
            waits = note.waited is not None and note.idle_s > self._settings.slow_s
            if self._trouble or waits:
                reason = self._trouble or f"{note.where()}, for {note.idle_s:.0f} s"
                text = f"the rank that holds the store (rank 0) is gone: {error}"
                self._verdict = RankError(f"{text}\n--- rank {self._rank}: {reason}\n{note.stack}", (0,))
                return
            self._wake.wait(self._settings.poll_s)
            self._wake.clear()
            self._has_progressed(time.monotonic())

    def _end(self) -> None:
        """End the process, unless its working thread raises the verdict within `grace_s`."""
        # A wait in a backend cannot be interrupted from Python (gloo offers no means at all).
        assert self._verdict is not None
        self._judged.set()
        if self._ended is not None or self._closed.wait(self._settings.grace_s):
            return
        if not self._ending.acquire(blocking=False):
            return  # the working thread raises the verdict
        _log.error("rank %d ends: %s", self._rank, self._verdict)
        try:
            if self._on_end is not None:
                self._on_end(self._verdict)
        finally:
            self._process.close()
            os._exit(1)

    def _note(self, standing: RankStatus) -> Note:
        place, ops = self.journal.read()
        idle_s = time.monotonic() - self._moved
        return Note(
            self._rank, standing, place, ops, idle_s, self._process.stack(), self._trouble, self._count_others()
        )
