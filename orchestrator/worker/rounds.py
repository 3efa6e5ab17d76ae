"""The measured steps of one rank's run as rounds: when each begins and ends, and what it records."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from orchestrator.config.schema import Measure
from orchestrator.records.run_record import AttemptPaths
from orchestrator.records.turns import Turns
from orchestrator.rounds.order import round_sizes
from orchestrator.rounds.recorded import PASSES, Round, counted, to_repeat, with_repeated, without_loaded
from orchestrator.worker.machine_load import LoadMeter, Used, others_share

Tell = Callable[..., None]
MOST_FURTHER = 18  # rounds for measure.min_s: beyond that they become longer, because each change of turns takes time
ROUND_S = 1.0  # how long they are otherwise, if the configured ones are longer: a load comes and goes in seconds


class MeasuredRounds:
    """Divides steps into rounds. All ranks must make the same calls.

    gather: gives every rank the values of all ranks, in their order. tell: records an event. waiting: called many times
    a second while the rank waits for a turn. step_s: the seconds of all steps so far, to which the caller adds.
    reference: does the reference work of core_speed.py and returns its milliseconds, or None.
    """

    def __init__(
        self,
        attempt: AttemptPaths,
        measure: Measure,
        step_s: Sequence[float],
        gather: Callable[[Used], list[Used]],
        tell: Tell,
        waiting: Callable[[], None],
        reference: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._turns = Turns(attempt)
        self._configured, self._min_s = measure.rounds, measure.min_s
        self._asked = measure.rounds if self._turns.number is None else 1
        self._step_s, self._gather, self._tell, self._waiting = step_s, gather, tell, waiting
        self._load = LoadMeter()
        self._time_reference = reference
        self._reference_ms: list[float] | None = None  # of the current round: before each step, and after the last
        self._begins: set[int] = set()  # the first steps of the rounds
        self._last_steps: dict[int, int] = {}  # the last step of a round: the round's number, from 1
        self._sizes: dict[int, int] = {}  # steps by the round's number
        self._begun_at = 0.0
        self._first = 0  # of the current round, in step_s
        self._counted_s, self._counted_steps = 0.0, 0  # on rank 0
        self._passes: list[int] = []  # how many rounds each repeated
        # With those of the attempts that this one continues.
        self.found = [Round.of(one) for one in self._turns.earlier]

    def divide(self, first: int, steps: int) -> int:
        """Makes the steps from `first` to before `steps` the rounds. Returns the step before which the run ends."""
        if self._turns.is_short:
            steps = first + round_sizes(steps - first, self._configured)[0]
        for number, size in enumerate(round_sizes(steps - first, self._asked), start=self._turns.number or 1):
            self._begins.add(first)
            self._sizes[number] = size
            first += size
            self._last_steps[first - 1] = number
        return steps

    @property
    def is_last_attempt(self) -> bool:
        """Whether the result of this attempt is that of the point, not of one of its rounds."""
        return not self._turns.is_short

    def begins(self, step: int) -> bool:
        """Whether a round begins with this step. The caller then calls `begin`."""
        return step in self._begins

    def begin(self) -> None:
        """Begins a round. Blocks until it is this point's turn."""
        turn = self._turns.next(lambda turn: self._tell("waiting", turn=turn), self._waiting)
        if turn is not None:
            self._tell("turn", turn=turn)
        # After the wait, which is in no round.
        self._first, self._begun_at = len(self._step_s), time.time()
        self._reference_ms = []
        self._load.begin(self._turns.beside)

    def before_step(self) -> None:
        """Times the reference work, if a round has begun."""
        if self._reference_ms is not None and (took_ms := self._time_reference()) is not None:
            self._reference_ms.append(took_ms)

    def ends(self, step: int) -> int | None:
        """The number of the round that ends with this step, if one does. The caller then calls `end`."""
        return self._last_steps.get(step)

    def end(self, number: int) -> Round:
        """Ends the current round and returns it. A collective."""
        self.before_step()
        reference, self._reference_ms = self._reference_ms or [], None
        around = [math.sqrt(one * other) for one, other in pairwise(reference)]  # of each step: before and after it
        made = self._step_s[self._first :]
        step_ms = [1e3 * seconds for seconds in counted(made, self._asked)]
        used = self._load.end()._replace(
            counted_s=sum(step_ms) / 1e3,
            reference_ms=counted(around, self._asked),
        )
        ranks = self._gather(used)
        self._counted_s, self._counted_steps = self._counted_s + ranks[0].counted_s, self._counted_steps + len(step_ms)
        by_step = zip(*(rank.reference_ms for rank in ranks), strict=True)
        one = Round(
            number,
            self._begun_at,
            step_ms,
            others_share(ranks),
            reference_ms=list(map(statistics.geometric_mean, by_step)),
        )
        # One that was measured again replaces its earlier measurement only if it met less load, never by its speed.
        is_repeated = any(earlier.number == number for earlier in self.found)
        self.found = with_repeated(self.found, one) if is_repeated else [*self.found, one]
        self._tell("round", number=number, step_ms=one.median_ms, others_share=one.others_share, again=is_repeated)
        return one

    def further(self) -> list[tuple[int, int]]:
        """The number and the steps of each round that is missing for measure.min_s, of all rounds so far. A no-op if
        the attempt is one of several: each would start its ranks again."""
        # How well a speed is known depends on how long it was measured: the speed of a machine wanders within seconds,
        # and 60 steps of 50 ms see three of them. All ranks count what rank 0 timed, so they agree on the rounds.
        missing_s = self._min_s - self._counted_s
        if self._asked == 1 or missing_s <= 0 or not self._counted_s:
            return []
        missing = math.ceil(missing_s * self._counted_steps / self._counted_s)
        # As long as the configured rounds, or shorter, because a load comes and goes in seconds; but not so many that
        # changing turns takes longer than the steps.
        as_configured = math.ceil(missing / self._counted_steps * self._asked)
        rounds = min(max(as_configured, math.ceil(missing_s / ROUND_S)), missing, MOST_FURTHER)
        steps = math.ceil(missing / rounds) + 1  # the first is not counted
        further = [(number, steps) for number in range(self._asked + 1, self._asked + rounds + 1)]
        self._sizes |= dict(further)
        return further

    def to_repeat(self) -> list[tuple[int, int]]:
        """The number and the steps of each round of the next pass; see [Note: a loaded round] in rounds/recorded.py. A
        measurement in one round has none: it ranks nothing, or its attempt is one of several."""
        loaded = to_repeat(self.found) if self._asked > 1 else []
        helped = not self._passes or len(loaded) < self._passes[-1]
        if len(self._passes) == PASSES or not helped:
            return []
        self._passes.append(len(loaded))
        return [(number, self._sizes[number]) for number in loaded]

    def leave_out_loaded(self) -> None:
        """Loaded rounds no longer count, if enough others do. A no-op where none is measured again."""
        if self._asked > 1:
            self.found = without_loaded(self.found)

    def others_share(self) -> float | None:
        """Of the rounds that count, the mean share of the cores that other processes took; None if one is unknown."""
        shares = [one.others_share for one in self.found if one.used]
        known = [share for share in shares if share is not None]
        return statistics.mean(known) if known and len(known) == len(shares) else None

    def to_dict(self) -> dict[str, Any]:
        """The part of the result."""
        return {"rounds": [asdict(one) for one in self.found], "session": self._turns.session}
