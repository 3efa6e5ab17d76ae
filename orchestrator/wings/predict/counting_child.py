"""Asks the child process that counts (count.py), so that this process need not import torch."""

from __future__ import annotations

import json
import math
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import IO, Any

from orchestrator.machine import children
from orchestrator.machine.processes import how_it_ended
from orchestrator.planning.predictor import Tell

SILENCE_S = 600.0  # that the child may take for one answer, also beside other programs that take the cores
TELL_S = 2.0
TRACE = "trace-"  # the start of the keys of traces
Answer = Mapping[str, Any]


class Counting:
    """What is asked, {"units": {key: configuration}, "activations": [{key: configuration}, ...]}, and the answers.

    within_s: the most time that all answers may take. `tell` is called at most every two seconds with the progress.
    silence: why there are no more answers, once they have ended.
    """

    def __init__(self, asked: Mapping[str, Any], tell: Tell | None = None, within_s: float = math.inf) -> None:
        self.silence = "the process that counts has not been asked"
        self._asked, self._tell = asked, tell
        self._within_s, self._end = within_s, time.monotonic() + within_s

    def answers(self) -> Iterator[tuple[str, Answer]]:
        """The keys and answers as they arrive from a child. It is killed if it is silent for SILENCE_S, or at the end
        of the time."""
        lines: SimpleQueue[str | None] = SimpleQueue()
        try:
            child = _waiting.pop() if _waiting else Child()
        except OSError as error:
            self.silence = f"the process that counts could not be started: {error}"
            return
        # The thread blocks on the child's pipes, so that this one can check for silence.
        threading.Thread(target=_talk, args=(child.process, json.dumps(self._asked), lines), daemon=True).start()
        progress = _Progress(len(self._asked["units"]) + sum(map(len, self._asked["activations"])), self._tell)
        answered = time.monotonic()
        try:
            while (now := time.monotonic()) < min(answered + SILENCE_S, self._end):
                progress.show()
                with suppress(Empty):
                    line = lines.get(timeout=min(TELL_S, self._end - now))
                    if line is None:
                        self.silence = f"the process that counts {child.ended()}"
                        return
                    answered = time.monotonic()
                    if (answer := _answer_in(line)) is not None:
                        progress.done += not answer[0].startswith(TRACE)
                        yield answer
            most = f"{SILENCE_S:.0f} s for one of them" if now < self._end else f"the {self._within_s:g} s given"
            self.silence = f"the counts took longer than {most}"
        finally:
            child.kill()


class _Progress:
    """Tells how many of `total` answers are there, when that has changed and TELL_S have passed."""

    def __init__(self, total: int, tell: Tell | None) -> None:
        self.done = 0
        self._total, self._tell, self._told = total, tell, (-1, time.monotonic())

    def show(self) -> None:
        if self._tell is not None and self.done > self._told[0] and time.monotonic() >= self._told[1] + TELL_S:
            self._told = self.done, time.monotonic()
            self._tell(f"counting without running: {self.done} of {self._total} models and activations")


class Child:
    """The child process, which imports its libraries and waits for what is asked. What it prints to stderr is kept."""

    def __init__(self) -> None:
        self._words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  it is read when the process has ended
        self.process = start_process(self._words)

    def ended(self) -> str:
        """How it ended, with its last words."""
        return how_it_ended(self.process.wait(), self._words)

    def kill(self) -> None:
        with self.process:
            self.process.kill()


def start_process(stderr: IO[bytes]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        children.words("orchestrator.wings.predict.count"),
        env=children.environment({**os.environ, "CUDA_VISIBLE_DEVICES": ""}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        encoding="utf-8",
        errors="replace",
    )


@contextmanager
def started_ahead(*, needed: bool) -> Iterator[None]:
    """Within it, the child that is asked is already importing its libraries, if that is expected to be needed. At the
    end it is killed if nothing was asked."""
    if needed:
        with suppress(OSError):
            _waiting.append(Child())
    try:
        yield
    finally:
        while _waiting:
            _waiting.pop().kill()


_waiting: list[Child] = []  # started ahead, and not asked yet


def _answer_in(line: str) -> tuple[str, Answer] | None:
    """The key and the answer in a line; None for a line that a library printed between the answers."""
    try:
        key, answer = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return None
    return (key, answer) if isinstance(key, str) and isinstance(answer, dict) else None


def _talk(child: subprocess.Popen[str], asked: str, lines: SimpleQueue[str | None]) -> None:
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        with child.stdin:
            child.stdin.write(asked)
        for line in child.stdout:
            lines.put(line)
    except (OSError, ValueError):
        pass  # the child has ended or was killed
    lines.put(None)
