"""What is measured of one rank's steps: their times, the rounds that they form, bytes and dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from orchestrator.config.schema import RunConfig
from orchestrator.records.run_record import AttemptPaths
from orchestrator.rounds.recorded import Round
from orchestrator.worker import measure
from orchestrator.worker.accounts import activations
from orchestrator.worker.core_speed import ReferenceWork, compares_cores
from orchestrator.worker.rounds import MeasuredRounds, Tell
from orchestrator.worker.setup import TrainingSetup
from zero_runtime.census import take_census
from zero_runtime.step_report import StepReport

TellStep = Callable[[float], None]


class RoundListener(Protocol):
    """What Measurement tells of its rounds; see Listener."""

    def before_round(self) -> None: ...
    def after_round(self, one: Round) -> None: ...


class Measurement:
    """The measurements of one rank. All ranks must make the same calls.

    warmup_steps: those of this run. readings: what was found so far.
    """

    def __init__(self, attempt: AttemptPaths, config: RunConfig, built: TrainingSetup, tell: Tell) -> None:
        self.readings = measure.Readings()
        self.accounts, runtime = built.accounts, built.runtime
        self.warmup_steps = 0
        self._configured_warmup = config.measure.warmup_steps
        self._runtime, self._on_cuda, self._tell = runtime, runtime.device.type == "cuda", tell
        self.rounds = MeasuredRounds(
            attempt,
            config.measure,
            self.readings.step_s,
            runtime.collectives.gather_objects,
            tell,
            self._show_waiting,
            ReferenceWork(uses_cores=compares_cores(config)).timed_ms,
        )
        self._listeners: Sequence[RoundListener] = ()
        self._census_step = 0
        self._unread: Callable[[], None] | None = None

    def begin(self, first: int, steps: int, listeners: Sequence[RoundListener]) -> int:
        """Divides the steps from `first` to before `steps`. Returns the step before which the run ends. listeners: are
        told of the rounds."""
        self._listeners = listeners
        # A resumed run may have fewer steps left than the configured number.
        self.warmup_steps = min(self._configured_warmup, steps - first - 1)
        # The census walks all of Python's objects, so it is taken in a step that is not counted, if there is one, and
        # preferably not in the first one, in which nothing has been gathered yet.
        self._census_step = min(first + max(self._configured_warmup - 1, 0), steps - 1)
        return self.rounds.divide(first + self.warmup_steps, steps)

    # ---- one step ----------------------------------------------------------------------------------------------

    def counts(self, step: int) -> bool:
        """Whether bytes and dtypes are counted in this step."""
        return step == self._census_step

    def before_step(self, step: int) -> None:
        """Begins a round if one begins here, which may wait for this point's turn; then the clock of the step."""
        if self.rounds.begins(step):
            self._begin_round()
        self._start_clock()

    def after_step(self, step: int, report: StepReport, tell: TellStep) -> None:
        """Notes a step, and ends the round that ends with it. tell: is given the step's seconds once they are read."""
        readings = self.readings
        readings.losses.append(report.loss)
        readings.norms.append(report.grad_norm)
        readings.skipped += report.skipped
        readings.ledger = self._runtime.reset_ledger()
        lap = self._runtime.clock.end()
        # On a CPU the step has ended, and its time is read at once; on a GPU only when the next step has been issued.
        self._unread = lambda: tell(readings.add_step(lap.seconds()))
        if not self._on_cuda:
            self.read_last_step()
        if (number := self.rounds.ends(step)) is not None:
            self.read_last_step()
            self._end_round(number)
        if self.counts(step):  # before anything is saved that a later run could go on from
            readings.dtypes = self.accounts.dtypes(readings.ledger)

    def read_last_step(self) -> None:
        """Reads the clock of the last step, if it was not read. All steps are then in the record, as a checkpoint of
        the last one assumes.

        A GPU is still at the step's last kernels when the host has read its loss. Instead of waiting for them, the host
        issues the next step first, and reads when they have run.
        """
        if self._unread is not None:
            self._unread()
            self._unread = None

    @contextmanager
    def activations(self) -> Iterator[None]:
        """Around a forward: keeps the largest number of bytes that one leaves for backward."""
        with activations(self.accounts) as census:
            yield
        self.readings.activations_bytes = max(self.readings.activations_bytes, census.bytes)

    def take_census(self) -> None:
        """Counts the bytes of all tensors of this rank."""
        self.readings.census = take_census(self.accounts.held())

    def keep_peaks(self) -> None:
        """The peaks up to now are the run's, whatever memory is used from here on."""
        self.readings.peaks = measure.peaks(self._runtime.device)

    # ---- after the last step -----------------------------------------------------------------------------------

    def add_rounds(self, step: Callable[[], None]) -> None:
        """Measures further rounds, and rounds again that were next to a notable load. The run is over: what it
        learned and saved is that of its own steps, and these steps are timed and forgotten."""
        # Forgotten, because the losses of a sweep are compared after equally many steps.
        if further := self.rounds.further():
            self._tell("extending", rounds=[number for number, _ in further])
            self._time_rounds(further, step)
        while repeated := self.rounds.to_repeat():
            self._tell("repeating", rounds=[number for number, _ in repeated])
            self._time_rounds(repeated, step)
        self.rounds.leave_out_loaded()

    def _time_rounds(self, rounds: Sequence[tuple[int, int]], step: Callable[[], None]) -> None:
        """Measures rounds with these numbers and steps."""
        for number, steps in rounds:
            self._begin_round()
            for _ in range(steps):
                self._start_clock()
                step()
                self.readings.add_step(self._runtime.clock.end().seconds())
                self._runtime.reset_ledger()  # the messages of the result are those of a step of the run
            self._end_round(number)

    def _begin_round(self) -> None:
        self.read_last_step()  # also waits for a GPU to reach the end of the step
        self.rounds.begin()
        for one in self._listeners:
            one.before_round()

    def _end_round(self, number: int) -> None:
        found = self.rounds.end(number)
        for one in self._listeners:
            one.after_round(found)

    def _start_clock(self) -> None:
        self.rounds.before_step()
        self._runtime.clock.start()  # keeps the time of that, of saving and of waiting for a turn out of the step's

    def _show_waiting(self) -> None:
        """Shows the other ranks that this one is alive while it waits for its turn."""
        self._runtime.collectives.journal.begin("forward")
