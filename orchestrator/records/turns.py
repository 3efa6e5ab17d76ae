"""The file by which a sweep's controller gives turns to the ranks of a point, and by which they wait for them.

A file, and no message: the ranks have no connection to the controller, and a rank that waits must use next to no
processor time while another point is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from orchestrator.records.record_file import require_json, write_json_atomic
from orchestrator.records.record_shapes import TURNS
from orchestrator.records.run_record import AttemptPaths

LOOK_S = 0.05  # a point waits about this long after each turn of another; a look is one stat()


def open_turns(
    attempt: AttemptPaths,
    session: str,
    *,
    number: int | None = None,
    earlier: Sequence[dict[str, Any]] = (),
    short: bool = False,
) -> None:
    """Makes the ranks of an attempt that has not started take turns. session: equal for all that share the rounds.

    number: the whole attempt is the round of this number, and its ranks wait for no turn. `earlier`: the rounds of the
    attempts before it, which become part of its result. `short`: it ends after as many measured steps as one of the
    configured rounds has, and its losses are of no use.
    """
    turns = {"session": session, "granted": 0, "number": number, "earlier": list(earlier), "short": short}
    write_json_atomic(attempt.turns, turns)


def grant(attempt: AttemptPaths, turn: int, beside: Sequence[int] = ()) -> None:
    """Lets the ranks begin this turn, from 1. The warm-up needs none. beside: the sessions of ranks that wait."""
    write_json_atomic(attempt.turns, {**require_json(attempt.turns, TURNS), "granted": turn, "beside": list(beside)})


class Turns:
    """The turns of an attempt, as a rank sees them; an attempt without the file measures whenever it is ready."""

    def __init__(self, attempt: AttemptPaths) -> None:
        self._attempt = attempt
        facts = require_json(attempt.turns, TURNS) if attempt.turns.exists() else {}
        self.session: str | None = facts.get("session")
        self.number: int | None = facts.get("number")
        self.earlier: list[dict[str, Any]] = facts.get("earlier") or []
        self.is_short: bool = facts.get("short") or False
        self.beside: list[int] = []  # the sessions of processes that wait while this attempt has its turn
        self._waits = bool(facts) and self.number is None
        self._turn = 0

    def next(self, tell: Callable[[int], None], waiting: Callable[[], None]) -> int | None:
        """Returns the number of the next turn when it is granted; None, at once, if the attempt takes no turns.

        tell: called once with the number of the turn. waiting: called many times a second until then.
        """
        if not self._waits:
            return None
        self._turn += 1
        tell(self._turn)
        seen: tuple[int, int] | None = None
        while True:
            status = self._attempt.turns.stat()
            before, seen = seen, (status.st_ino, status.st_mtime_ns)
            # The file is replaced by each grant, and read only when it has been.
            if before != seen and (facts := require_json(self._attempt.turns, TURNS))["granted"] >= self._turn:
                self.beside = facts.get("beside") or []
                return self._turn
            waiting()
            time.sleep(LOOK_S)
