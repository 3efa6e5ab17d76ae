"""Starts collectives and waits for them: each is written to the journal, timed, and explained if it fails."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch

from zero_runtime.errors import RankError
from zero_runtime.phase_clock import COMMUNICATION, PhaseClock
from zero_runtime.watch.failure import is_out_of_memory
from zero_runtime.watch.journal import Journal
from zero_runtime.watch.watch import RankWatch


class Started(NamedTuple):
    """A collective under way, in the backend.

    wait: blocks the host or, with NCCL, only the current stream. is_completed: asks without blocking whether the device
    has completed it; None if `wait` blocks the host.
    """

    wait: Callable[[], Any]
    is_completed: Callable[[], bool] | None = None


Start = Callable[[], Started]  # issues a collective without blocking


class CollectiveIssuer:
    """The part of `Collectives` that does not depend on what is sent.

    waits_on_host: a wait for a collective blocks the host, as gloo's does, and not only a stream of the device.
    """

    def __init__(
        self, rank: int, world: int, clock: PhaseClock, watch: RankWatch | None, *, waits_on_host: bool
    ) -> None:
        self.rank = rank
        self.world = world
        self._exposed = clock.phase(COMMUNICATION)
        self._watch = watch
        self.journal = Journal() if watch is None else watch.journal
        # Ranks that gather different units do not notice it by themselves, and the watch can say which ones differ.
        self.mixes_units = watch is not None and not waits_on_host
        # Where the host waits itself, its own progress shows that of the collectives; see watch/device_progress.py.
        self._progress = None if watch is None or waits_on_host else watch.progress
        if not waits_on_host:
            self.journal.keep_one_order()

    def fingerprint(self) -> tuple[float, float]:
        """This rank's fingerprint of the collectives issued so far, and its square.

        Sum it over the ranks and pass the two sums to `check_fingerprints`.
        """
        value = self.journal.fingerprint()
        return float(value), float(value * value)

    def check_fingerprints(self, total: float, squares: float) -> None:
        """Raise the same RankError on every rank if the sums over the ranks show that the fingerprints differ.

        world * sum of squares = square of the sum only if all fingerprints are equal (Cauchy-Schwarz); the sums are
        exact, see `Journal.fingerprint`. Without this check, different collectives may silently give wrong numbers:
        gloo sums 8 fp32 values with 4 fp64 values without an error. A no-op without a watch, because only the watch can
        name the ranks that differ.
        """
        if self._watch is None or (math.isfinite(squares) and self.world * int(squares) == int(total) ** 2):
            return
        self._explain("the ranks issued different collectives in this step", None)

    def issue(
        self, kind: str, unit: str, tensor: torch.Tensor, start: Start, *, polled: bool = False
    ) -> Callable[[], None]:
        """Start a collective and return the function that waits for it; both charge their time to the clock.

        tensor: the collective's larger tensor, by whose size and dtype the journal records it. polled: the watch may
        ask whether the device has completed it, and holds its output meanwhile.
        """
        return partial(self._blocking, *self._start(kind, unit, tensor, start, polled=polled))

    def _start(
        self, kind: str, unit: str, tensor: torch.Tensor, start: Start, *, polled: bool = False
    ) -> tuple[int, Callable[[], Any]]:
        """Start a collective; returns its number in the journal and the backend's function that waits for it."""
        sequence = self.journal.issue(kind, unit, tensor.numel(), tensor.dtype)
        with self._exposed:
            try:
                started = start()
            except RuntimeError as error:
                self._explain(f"{kind} of unit {unit!r} could not start: {error}", error)
        if polled and self._progress is not None and started.is_completed is not None:
            self._progress.add(sequence, started.is_completed)
        return sequence, started.wait

    def _blocking(self, sequence: int, wait: Callable[[], Any]) -> None:
        """Wait for the collective with this number in the journal. A backend error is raised as a RankError."""
        self.journal.wait(sequence)
        with self._exposed:
            try:
                wait()
            except RuntimeError as error:
                self._explain(f"collective {sequence} failed: {error}", error)
        self.journal.wait(0)

    def _explain(self, trouble: str, error: RuntimeError | None) -> NoReturn:
        if error is not None and is_out_of_memory(error):
            raise error  # this rank's own failure, with its cause: the others hear of it when the rank ends
        # With a watch, all ranks raise the same RankError. Without one, this rank can only report its own error.
        if self._watch is not None:
            self._watch.explain(trouble, error)
        raise RankError(f"rank {self.rank}: {trouble}; join_world's watch names the culprit", (self.rank,)) from error
