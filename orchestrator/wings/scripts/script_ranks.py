"""Runs a user's own script on ranks of this machine: their environment, their output, and how they ended.

[Note: the port of the ranks]
Several ranks meet in a store at MASTER_PORT that a process of its own holds, since rank 0 may be the first to end.
Rank 0 tries to hold it too, finds the port taken, and uses the store that is there, which the variable
TORCHELASTIC_USE_AGENT_STORE permits. Its value "True", as torchrun sets it, would keep rank 0 from holding a store at
another port that the script chooses. A rank that is alone holds its store. Its port stays bound here until it has
ended, without listening, so that no other program gets it: on Linux two sockets with SO_REUSEADDR may be bound to one
port if none listens.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import BinaryIO, NamedTuple

from orchestrator.config.schema import Device
from orchestrator.config.strict import Refusal
from orchestrator.launch.environment import rank_settings
from orchestrator.launch.rank import place
from orchestrator.launch.verdict import GRACE_S, LOG_LINES, Sight, judge, kernel_kills
from orchestrator.machine import children
from orchestrator.machine.interfaces import GLOO, interface_to, set_interface
from orchestrator.machine.loopback import family, loopback
from orchestrator.machine.processes import die_with_parent, end_session, signals_ignored
from orchestrator.records.run_state import RunState

LOOK_S = 0.1
# How long a line of another rank waits for the end of a line that rank 0 has begun, such as a progress bar.
WAIT_S = 1.0
# A user's script may contact the hub; the ranks of our own runs do not.
_NOT_SET = ("HF_HUB_OFFLINE",)
_STORE = "orchestrator.wings.scripts.held_store"
# What torch prints when rank 0 uses the store that is there: no error, see [Note: the port of the ranks].
_NO_ERROR = re.compile(rb"[^\n]*failed to bind[^\n]*TORCHELASTIC_USE_AGENT_STORE[^\n]*\n")
# The line that the launcher's part on another machine prints when a rank has ended: its number and its exit code.
REPORT, _REPORT = b"\0zlab rank %d ended: %d\n", re.compile(rb"\0zlab rank (\d+) ended: (-?\d+)\n")
_LINE, _LINE_OR_BAR = re.compile(rb"(?<=\n)"), re.compile(rb"(?<=[\r\n])")


@dataclass(frozen=True)
class Placement:
    """The ranks of a script. threads: of each rank. gpus: for CUDA_VISIBLE_DEVICES; None leaves it as it is.

    address, port: where the ranks meet; None and 0 choose the loopback and a port that is free. world: all ranks. On
    several machines, first: the number of the first rank here. host: the number of this machine. peer: another one,
    towards which the ranks send.
    """

    ranks: int
    device: Device
    threads: int
    gpus: Sequence[int] | None = None
    address: str | None = None
    port: int = 0
    world: int = 1
    first: int = 0
    host: int = 0
    peer: str | None = None


class ScriptEnd(NamedTuple):
    """How the ranks ended. `rank` is that of the root cause, `message` empty if all ended with exit code 0.

    last_words: the end of that rank's output, unless it was shown as it came.
    """

    message: str = ""
    rank: int = 0
    last_words: tuple[str, ...] = ()


@dataclass
class RankChild:
    """A started rank, or the connection to a machine with ranks, and the end of its output.

    number: of its first rank. reported: by rank, the ends on that machine; None for a rank of this one.
    """

    process: subprocess.Popen[bytes]
    number: int
    reported: dict[int, Sight] | None = None
    code: int | None = None
    ended_at: float = 0.0
    words: deque[str] = field(default_factory=lambda: deque(maxlen=LOG_LINES))

    @property
    def sight(self) -> Sight:
        return sight_of(self.number, self.code, self.ended_at)


def sight_of(number: int, code: int | None, ended_at: float) -> Sight:
    """A rank that runs, or has ended with an exit code."""
    state = RunState.ok if code == 0 else None
    return Sight(number, state, alive=code is None, exit_code=code, exit_time=ended_at)


def run_script(
    command: Callable[[int], Sequence[str]], placement: Placement, look: Callable[[Sequence[RankChild]], object] = len
) -> ScriptEnd:
    """Run `command(local rank)` on every rank until all have ended; if one fails, the others are ended too.

    Call it from the main thread. The output of rank 0 is passed on as it comes, that of the others line by line with
    their rank. `look` is called some times a second. When it returns or raises, no process of the ranks is left.
    """
    kills = kernel_kills()
    ranks: list[RankChild] = []
    with _meeting_place(placement) as (address, port):
        try:
            for number in range(placement.ranks):
                environment = rank_environment(placement, number, address, port, os.environ)
                ranks.append(RankChild(started(command(number), environment), placement.first + number))
            follow(ranks, look)
        finally:
            with signals_ignored():
                for rank in ranks:
                    end_session(rank.process.pid)
                    rank.process.wait()
    if not (end := end_of([rank.sight for rank in ranks])).message:
        return end
    root = ranks[end.rank - placement.first]
    if root.code == -signal.SIGKILL and kernel_kills() > kills:
        end = end._replace(message=f"{end.message}: the machine's memory was used up (see `dmesg`)")
    return end._replace(last_words=tuple(root.words) if end.rank else ())


def rank_environment(
    placement: Placement, number: int, address: str, port: int, base: Mapping[str, str]
) -> dict[str, str]:
    """The variables that torchrun gives, and those of our own ranks: threads, allocators, the loopback interface."""
    settings = rank_settings(placement.device, placement.threads, base, on_one_machine=placement.peer is None)
    ours = {name: value for name, value in settings.items() if name not in _NOT_SET}
    if placement.peer is not None:
        set_interface(ours, base.get(GLOO) or interface_to(placement.peer))
    own = place(placement.first + number, placement.world, number, placement.ranks)
    words = {**own, "GROUP_RANK": str(placement.host), "MASTER_PORT": str(port)}
    if placement.world > 1:
        words["TORCHELASTIC_USE_AGENT_STORE"] = "1"
    if placement.gpus is not None and placement.device is Device.cuda:
        words["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, placement.gpus))
    # Without PYTHONUNBUFFERED a rank that is killed would lose what it printed last.
    return {**base, **ours, **words, "MASTER_ADDR": address, "PYTHONUNBUFFERED": "1"}


def started(
    command: Sequence[str], environment: Mapping[str, str], stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """A process in a session of its own, which gets no Ctrl-C and ends when this process does."""
    return subprocess.Popen(
        command,
        env=children.environment(environment),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=partial(die_with_parent, os.getpid()),
    )


@contextlib.contextmanager
def _meeting_place(placement: Placement) -> Iterator[tuple[str, int]]:
    """The address and the port of the first machine, see [Note: the port of the ranks]. Refusal if it is taken."""
    address = placement.address or loopback()
    if placement.host:
        yield address, placement.port
        return
    with contextlib.ExitStack() as stack, socket.socket(family(address)) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            # This machine may know its own name as an address of its loopback, which other machines do not reach.
            holder.bind((address if placement.peer is None else "", placement.port))
            if placement.world > 1:
                holder.listen(socket.SOMAXCONN)
        except (OSError, OverflowError) as error:
            place = f"--master_addr {address} --master_port {placement.port}"
            raise Refusal([f"{place}: expected a free port of this machine, found: {error}; choose another"]) from error
        port: int = holder.getsockname()[1]
        if placement.world > 1:
            stack.enter_context(_held_store(address, port, holder))
        yield address, port


@contextlib.contextmanager
def _held_store(address: str, port: int, listening: socket.socket) -> Iterator[None]:
    """A process that holds a store at a socket, which is closed here."""
    process = subprocess.Popen(
        children.words(_STORE, address, str(port), str(listening.fileno())),
        env=children.environment(os.environ),
        stdin=subprocess.DEVNULL,
        pass_fds=[listening.fileno()],
        start_new_session=True,
        preexec_fn=partial(die_with_parent, os.getpid()),
    )
    listening.close()
    try:
        yield
    finally:
        with signals_ignored():
            end_session(process.pid)
            process.wait()


def follow(ranks: Sequence[RankChild], look: Callable[[Sequence[RankChild]], object]) -> None:
    """Pass the output on. Returns when all processes have ended, or some time after one of them failed."""
    failed_since: float | None = None
    with selectors.DefaultSelector() as selector, RankOutput() as output:
        for rank in ranks:
            for stream, target in ((rank.process.stdout, sys.stdout), (rank.process.stderr, sys.stderr)):
                assert stream is not None
                selector.register(stream, selectors.EVENT_READ, Relay(rank, target, output))
        while any(rank.code is None for rank in ranks) or selector.get_map():
            for key, _ in selector.select(LOOK_S):
                relay: Relay = key.data
                if not relay.take(os.read(key.fd, 1 << 16)):
                    selector.unregister(key.fileobj)
            output.look(time.monotonic())
            for rank in ranks:
                if rank.code is None and (code := rank.process.poll()) is not None:
                    rank.code, rank.ended_at = code, time.monotonic()
            look(ranks)
            if any(rank.code for rank in ranks):
                failed_since = failed_since or time.monotonic()
                if time.monotonic() - failed_since > GRACE_S:
                    return  # a process that a rank left behind may hold its streams open
            if all(rank.code == 0 for rank in ranks) and not selector.select(0):
                return


class RankOutput:
    """What the ranks print, on one terminal: rank 0's bytes as they come, lines of the others between its lines.

    A line of another rank that comes within a line of rank 0 waits until that line has ended, at most `WAIT_S`.
    """

    def __init__(self) -> None:
        self._begun_on: object = None  # the target of rank 0's line that has not ended
        self._waiting: list[tuple[object, bytes]] = []
        self._since = 0.0

    def __enter__(self) -> RankOutput:
        return self

    def __exit__(self, *_: object) -> None:
        self._release()

    def first(self, target: object, piece: bytes) -> None:
        """Show bytes of rank 0."""
        _write(target, piece)
        if piece:
            self._begun_on = None if piece.endswith((b"\n", b"\r")) else target
        if self._begun_on is None:
            self._release()

    def other(self, target: object, lines: bytes, now: float) -> None:
        """Show complete lines of another rank, or let them wait. now: seconds, monotonic."""
        if self._begun_on is None:
            _write(target, lines)
        elif lines:
            self._since = self._since if self._waiting else now
            self._waiting.append((target, lines))

    def look(self, now: float) -> None:
        """End rank 0's line by a line break if lines have waited too long for it."""
        if self._waiting and now - self._since >= WAIT_S:
            self._release()

    def _release(self) -> None:
        if self._waiting and self._begun_on is not None:
            _write(self._begun_on, b"\n")
            self._begun_on = None
        for target, lines in self._waiting:
            _write(target, lines)
        self._waiting.clear()


class Relay:
    """Passes on one stream: rank 0's bytes, whole lines of the others behind their rank, marked lines of a machine."""

    def __init__(self, child: RankChild, target: object, output: RankOutput) -> None:
        self._child, self._target, self._output = child, target, output
        self._begun = b""

    def take(self, piece: bytes) -> bool:
        """Show a piece; False if the stream has ended, which is an empty piece."""
        child, shown = self._child, _NO_ERROR.sub(b"", piece)
        ends = _LINE if child.reported is None else _LINE_OR_BAR
        *lines, self._begun = ends.split(self._begun + shown)
        if not piece and self._begun:
            lines, self._begun = [self._begun + b"\n"], b""
        if child.reported is not None:
            lines = [_REPORT.sub(self._report, line) for line in lines]
        texts = (line.decode("utf-8", errors="replace").rstrip() for line in lines)
        child.words.extend(filter(None, texts))
        if child.reported is not None:
            self._output.other(self._target, b"".join(lines), time.monotonic())
        elif child.number == 0:
            self._output.first(self._target, shown)
        else:
            marked = b"".join(b"rank %d: %s" % (child.number, line) for line in lines)
            self._output.other(self._target, marked, time.monotonic())
        return bool(piece)

    def _report(self, found: re.Match[bytes]) -> bytes:
        number, code = map(int, found.groups())
        assert self._child.reported is not None
        self._child.reported[number] = sight_of(number, code, time.monotonic())
        return b""


def _write(target: object, shown: bytes) -> None:
    raw: BinaryIO | None = getattr(target, "buffer", None)  # tests and notebooks replace the streams
    if raw is not None:
        raw.write(shown)
        raw.flush()
    elif shown:
        target.write(shown.decode("utf-8", errors="replace"))  # type: ignore[attr-defined]


def end_of(sights: Sequence[Sight]) -> ScriptEnd:
    """Who failed first, by the rules for our own ranks. Ranks that were ended here because of it are no cause."""
    if all(sight.exit_code == 0 for sight in sights):
        return ScriptEnd()
    verdict = judge(sights, has_result=False, controller_alive=True)
    assert verdict is not None
    return ScriptEnd(verdict.message, verdict.rank)
