"""Joins ranks that another launcher started (torchrun, srun, by hand): same records and screen, but no launching."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from orchestrator.commands.admission import Admission
from orchestrator.commands.next_run import next_after_run
from orchestrator.commands.run import carry_out, next_rows, tell
from orchestrator.config.schema import RunConfig
from orchestrator.launch.environment import TUNABLES, rank_settings
from orchestrator.launch.local_run import record
from orchestrator.launch.rank import ENTRY, RankInfo, RankRecord, Stopped, rank_in_world, run_recorded
from orchestrator.launch.verdict import GRACE_S, Sight, Verdict, describe, recorded
from orchestrator.machine import children
from orchestrator.machine.interfaces import LOOPBACK, interface_to, set_interface
from orchestrator.machine.loopback import ADDRESSES
from orchestrator.planning.point import Point
from orchestrator.records.record_file import EventTail, read_or_warn, write_json_atomic
from orchestrator.records.record_shapes import RANK
from orchestrator.records.run_record import Attempt, AttemptPaths, joins_path
from orchestrator.records.run_state import RunState
from orchestrator.report import comparison
from orchestrator.report.screen import Screen
from orchestrator.report.summary import Row
from orchestrator.text.paths import shown
from orchestrator.text.streams import tell_torchrun
from orchestrator.tracking.feed import Tracker

MEET_S = 180.0  # longer than rank 0 may take to predict the run's memory
KEYS = ("SLURM_JOB_ID", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")

# Read when a process starts, so that a running process cannot set them for itself.
AT_START = (TUNABLES, "PYTHONFAULTHANDLER", children.PYTHONPATH)


class _Meeting:
    """Gives every rank the attempt folder that rank 0 created, through the file system that they share.

    Every other rank writes a hello file with a random word, waits for the answer to that word, then removes both files.
    Rank 0 answers until no hello file is left. It also answers stale files of an earlier command with the same names,
    which has no effect.
    """

    def __init__(self, output: Path, world: int, environ: Mapping[str, str]) -> None:
        names = "\n".join([str(world), *(environ.get(key, "") for key in KEYS)])
        self._folder = joins_path(output) / hashlib.sha256(names.encode()).hexdigest()[:12]
        self._folder.mkdir(parents=True, exist_ok=True)
        self._world = world

    def tell(self, attempt: Path) -> None:
        """Called by rank 0. Returns when every other rank has read the folder."""
        waiting = set(range(1, self._world))
        answered: set[int] = set()
        deadline = time.monotonic() + MEET_S
        while waiting:
            for rank in sorted(waiting):
                hello = read_or_warn(self._hello(rank), {"word": str})
                if hello is not None:
                    write_json_atomic(self._answer(rank, hello["word"]), {"attempt": str(attempt)})
                    answered.add(rank)
                elif rank in answered:
                    waiting.discard(rank)
            _pause(deadline, f"ranks {sorted(waiting)} did not report to {self._folder}")

    def hear(self, rank: int) -> Path:
        """Called by every other rank. Returns the folder that rank 0 created."""
        word = uuid.uuid4().hex
        write_json_atomic(self._hello(rank), {"word": word})
        deadline = time.monotonic() + MEET_S
        while (answer := read_or_warn(self._answer(rank, word), {"attempt": str})) is None:
            _pause(deadline, f"rank 0 did not answer in {self._folder}; do all ranks share this file system?")
        self._hello(rank).unlink()
        self._answer(rank, word).unlink(missing_ok=True)
        return Path(answer["attempt"])

    def _hello(self, rank: int) -> Path:
        return self._folder / f"hello_{rank}.json"

    def _answer(self, rank: int, word: str) -> Path:
        return self._folder / f"answer_{rank}_{word}.json"


def _pause(deadline: float, complaint: str) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(f"{complaint} within {MEET_S:g} s")
    time.sleep(0.05)


def join(point: Point, entry: str = ENTRY, admission: Admission | None = None) -> int:
    """Runs this process as one rank: 0, or 1 if it failed. Rank 0 records and shows it like a launched run.

    `admission`: rank 0 predicts the run's memory. If it is refused, every rank ends with the same exit code.
    """
    rank = rank_in_world(os.environ, "env://")
    assert rank is not None, "join asks for RANK and WORLD_SIZE"
    # torch reads these variables at import, and the entry imports torch.
    os.environ.update(joined_settings(point.config, os.environ))
    meeting = _Meeting(Path(point.config.output).absolute(), rank.world, os.environ)
    if rank.rank == 0:
        if rank.world > 1:
            # torchrun sends SIGTERM to all ranks as soon as one has failed. Rank 0 still has to record the failure, and
            # it ends without the signal because its next collective fails.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return carry_out(point, _JoinedRanks(rank, meeting, entry), Screen(), admission)
    paths = AttemptPaths(meeting.hear(rank.rank))
    if (state := Attempt.reopen(paths).state) is RunState.pruned:
        return comparison.exit_code_of({state})
    failure = run_recorded(paths, rank, entry)
    if isinstance(failure, BaseException):
        tell_torchrun(f"rank {rank.rank}: {type(failure).__name__}: {failure}")
    return 0 if failure is None else 1


def joined_settings(config: RunConfig, base: Mapping[str, str]) -> dict[str, str]:
    """The variables that a rank of torchrun or srun sets for itself, without those of `base` that it keeps."""
    leader = base.get("MASTER_ADDR", "")
    on_one_machine = base["WORLD_SIZE"] == base.get("LOCAL_WORLD_SIZE", "1") or leader in ("localhost", *ADDRESSES)
    found = rank_settings(config.resources.device, config.resources.threads, base, on_one_machine=on_one_machine)
    settings = {key: value for key, value in found.items() if key not in AT_START}
    if on_one_machine:
        return settings
    way = interface_to(leader) if leader else None
    named = dict(base)
    # On the leader itself this is the interface with its address; a name of the loopback is of no use to the others.
    set_interface(named, None if way == LOOPBACK else way)
    return settings | {key: value for key, value in named.items() if key not in base}


class _JoinedRanks:
    """The ranks of torchrun or srun, of which this process is rank 0."""

    def __init__(self, rank: RankInfo, meeting: _Meeting, entry: str) -> None:
        self._rank, self._meeting, self._entry = rank, meeting, entry

    def signals(self) -> AbstractContextManager[None]:
        return nullcontext()  # the other launcher has its own; see `join`

    def refused(self, attempt: Attempt) -> None:
        with suppress(TimeoutError):  # of ranks that have not started: there is nothing for them to do
            self._meeting.tell(attempt.paths.root)

    def followed(self, point: Point, attempt: Attempt, screen: Screen, tracker: Tracker) -> Verdict:
        attempt.move(RunState.starting)
        try:
            self._meeting.tell(attempt.paths.root)
            attempt.move(RunState.running)
            failure = self._run_shown(point, attempt, screen)
            verdict = verdict_of(attempt, self._rank.world, failure)
        except TimeoutError as error:
            verdict = Verdict(RunState.error, 0, str(error))
        return _recorded(attempt, verdict)

    def closing_rows(self, point: Point, attempt: Attempt) -> list[Row]:
        if attempt.state.measured:
            return [Row("next", next_after_run(point))]
        return next_rows(point, attempt) if attempt.state is RunState.pruned else []

    def _run_shown(self, point: Point, attempt: Attempt, screen: Screen) -> BaseException | Stopped | None:
        """Runs the rank in this thread and shows its events from another thread.

        If this thread waits for a lost rank in a collective, which nothing interrupts, the watch ends the process from
        its own thread: what the command still has to record and say is then said there.
        """
        done = threading.Event()
        tail = EventTail(attempt.paths.metrics)

        def show() -> None:
            while True:
                last = done.wait(0.2)
                for event in tail.read_new():
                    screen.event(event)
                if last:
                    return

        def end(error: BaseException) -> None:
            RankRecord(attempt.paths, self._rank.rank).write_error(error)
            screen.end()
            tell(screen, point, attempt, _recorded(attempt, verdict_of(attempt, self._rank.world, error)))
            screen.closing([Row("records", shown(attempt.paths.root)), *self.closing_rows(point, attempt)])

        screen.begin(point.config)
        thread = threading.Thread(target=show, daemon=True)
        thread.start()
        try:
            return run_recorded(attempt.paths, replace(self._rank, on_end=end), self._entry)
        finally:
            done.set()
            thread.join(5)
            screen.end()


def _recorded(attempt: Attempt, verdict: Verdict) -> Verdict:
    """The verdict as it was recorded; a failure is also left for torchrun, whose own lines are printed last."""
    verdict = record(attempt, verdict)
    if not verdict.state.measured:
        tell_torchrun(verdict.message)
    return verdict


def verdict_of(attempt: Attempt, world: int, failure: BaseException | Stopped | None) -> Verdict:
    """The verdict from the ranks' records. Other ranks may be on other machines, so their processes are not checked."""
    if isinstance(failure, Stopped):
        return Verdict(RunState.preempted, 0, str(failure))
    if isinstance(failure, KeyboardInterrupt):
        return Verdict(RunState.cancelled, 0, "the command was stopped")
    if failure is not None:
        time.sleep(GRACE_S)  # the rank that caused the failure may still be writing its record
        records = [read_or_warn(attempt.paths.rank_record(other), RANK) or {} for other in range(world)]
        failed = [record for record in records if "error" in record]
        if not failed:  # no record can be read
            return Verdict(RunState.error, 0, f"rank 0: {type(failure).__name__}: {failure}")
        # A rank that blames others saw only the effect.
        causes = [record for record in failed if not record.get("blamed")] or failed
        root = min(causes, key=lambda record: record["time"])
        told = describe(recorded(Sight(root["rank"]), root, root["time"]))
        return Verdict(RunState(root.get("outcome", RunState.error.value)), root["rank"], told)
    if not attempt.paths.result.exists():
        return Verdict(RunState.error, 0, "rank 0 ended well, yet wrote no result")
    return Verdict(RunState.ok)
