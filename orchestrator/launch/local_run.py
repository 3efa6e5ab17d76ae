"""Runs one attempt on this machine and records how it ended. Blocks only while it ends the processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from orchestrator.config.schema import RunConfig, from_dict
from orchestrator.launch import local_executor
from orchestrator.launch import verdict as watch
from orchestrator.launch.verdict import Verdict, Watch
from orchestrator.machine import slots
from orchestrator.machine.processes import signals_ignored
from orchestrator.machine.slots import Lease
from orchestrator.planning.point import Point
from orchestrator.planning.predictor import predictor
from orchestrator.records.record_file import BadRecord, EventTail, read_or_warn
from orchestrator.records.record_shapes import RANK
from orchestrator.records.run_record import Attempt, result_of
from orchestrator.records.run_state import RunState
from orchestrator.records.turns import grant

SLOTS_LOOK_S = 0.2


class PointRun:
    """A running attempt. The constructor starts it, from the main thread (see processes.die_with_parent).

    Call `look` until it returns a verdict. `gpus`: the CUDA_VISIBLE_DEVICES of the ranks; None leaves it unchanged.
    points: how many take turns, this one included. The time limit of one run does not count while it waits.
    """

    def __init__(
        self, point: Point, attempt: Attempt, entry: str, gpus: Sequence[str] | None = None, points: int = 1
    ) -> None:
        resources = point.config.resources
        self.point, self.attempt = point, attempt
        self._world = resources.ranks
        self._tail = EventTail(attempt.paths.metrics)
        self._step = self._turn = self._granted = 0
        self._job = local_executor.submit(attempt.paths, point.config, entry, gpus, points)
        try:
            attempt.move(RunState.starting, controller=self._job.session)
        except BaseException:
            # Without a record of its session no other command could end the job.
            self._job.end()
            raise
        limit_s = 60 * resources.time_limit_min
        self._watch = Watch(attempt.paths, self._world, limit_s, self._job.controller_alive)

    def new_events(self) -> list[dict[str, Any]]:
        """The events that the ranks recorded since the last call."""
        events = self._tail.read_new()
        self._step = next((event["step"] for event in reversed(events) if "step" in event), self._step)
        for event in events:
            if event["event"] == "waiting":
                self._turn = event["turn"]
        return events

    @property
    def waits(self) -> bool:
        """Whether the ranks wait for their next turn."""
        return self._turn > self._granted

    @property
    def session(self) -> int:
        """That of its processes."""
        return self._job.session

    def grant_turn(self, beside: Sequence[int]) -> None:
        """Lets the ranks go on that wait for a turn. beside: the sessions of points that wait meanwhile."""
        self._granted = self._turn
        grant(self.attempt.paths, self._turn, beside)

    def look(self) -> Verdict | None:
        """None while the run continues. With a verdict, its processes have ended and its state is recorded."""
        verdict = self._watch.look(waits=self.waits)
        if self.attempt.state is RunState.starting and (self._watch.all_running or verdict is not None):
            self.attempt.move(RunState.running)
        if verdict is None:
            return None
        if verdict.state is RunState.timeout:
            verdict = self._with_stack(verdict)
        # Before the state is recorded: whoever reads a final state may start the point again at once.
        self._end()
        if verdict.state is not RunState.ok and self.attempt.paths.result.exists():  # it came after the look
            verdict = Verdict(RunState.ok, note=f"after the result was written: {verdict.message}")
        if verdict.state is not RunState.ok and self._step:
            verdict = verdict._replace(message=f"{verdict.message}, after step {self._step}")
        return record(self.attempt, verdict)

    def cancel(self, why: str) -> None:
        """Ends the processes and records the cancellation. Measurements made so far are kept."""
        self._end()
        if self.attempt.state.final:
            return
        # What was measured to the end is an answer, whoever stops the command.
        if self.attempt.paths.result.exists():
            record(self.attempt, Verdict(RunState.ok, note=f"{why} after the result was written"))
        else:
            self.attempt.move(RunState.cancelled, message=why)

    def _end(self) -> None:
        with signals_ignored():
            self._job.end()

    def _with_stack(self, verdict: Verdict) -> Verdict:
        """Makes every rank dump its stack to its log, and names the rank that the others wait for if it is clear."""
        stuck = watch.ask_where(self.attempt.paths, self._world)
        if stuck is None:
            return verdict
        return verdict._replace(rank=stuck, message=f"{verdict.message}: the others waited for rank {stuck}")


def waited_slots(config: RunConfig, told: Callable[[str], None]) -> Lease:
    """The GPUs or cores of one run. Waits while another command of this user holds them, and says so."""
    pool, count = slots.pool_of(config.resources.device), slots.wanted(config.resources)
    while (lease := pool.take(count)) is None:
        if text := pool.waiting_text():
            told(text)
        time.sleep(SLOTS_LOOK_S)
    return lease


def record(attempt: Attempt, verdict: Verdict) -> Verdict:
    """Writes how the attempt ended; for a failure, also the last lines of the log that shows the cause.

    Returns the verdict as written: a successful run may be recorded as `tight`.
    """
    if verdict.state is RunState.ok:
        try:
            verdict = verdict._replace(state=watch.success(result_of(attempt.paths)))
        except BadRecord as bad:
            verdict = Verdict(RunState.error, 0, str(bad))
        else:
            attempt.move(verdict.state, **({"note": verdict.note} if verdict.note else {}))
            return verdict
    lines, _ = watch.last_words(attempt.paths, verdict.rank)
    memory = (read_or_warn(attempt.paths.rank_record(verdict.rank), RANK) or {}).get("memory")
    facts = {}
    if memory and (stored := read_or_warn(attempt.paths.config)):
        config = from_dict(stored)
        facts = {"memory": memory, "remedies": predictor().fixes(config, memory)}
        verdict = verdict._replace(message=f"{verdict.message}; {facts['remedies']}".rstrip("; "))
    attempt.move(verdict.state, rank=verdict.rank, message=verdict.message, log=lines, **facts)
    return verdict
