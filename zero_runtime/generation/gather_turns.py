"""Keeps ranks in step that call a model that shards its parameters a different number of times.

[Note: gather turns]
A gather needs every rank of a shard group. In training all ranks make the same calls, so their gathers meet. In
generation they do not: a rank whose sequence has ended, or that has no prompt, calls the model no more. Inside
`GatherTurns.running` every gather is therefore agreed on first, with one message of one number per rank: the unit that
the rank needs, or that it needs none. The first rank that needs a unit decides; ranks that need the same one gather it
too, and all others take part in the gather and drop the result. The ranks end together, when none needs a unit. So
calls that differ in number, in length or in order cannot hang, and no rank computes anything for another rank.

The price is one message and one wait on the host for each gather, and that nothing is gathered ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from zero_runtime.collectives import Collectives
from zero_runtime.errors import RankError
from zero_runtime.schedule import Schedule, ScheduledUnit
from zero_runtime.unit import Unit
from zero_runtime.unit_parameters import DataState

_IDLE, _FAILED, _FIRST_UNIT = 1, 2, 3  # answers of a rank; 0 is the sum of none


class GatherTurns:
    """The gathers of one runtime inside `running`; see [Note: gather turns].

    release: ends the uses of units that nothing reads any more.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        schedule: Schedule,
        collectives: Collectives,
        device: torch.device,
        release: Callable[[], None],
    ) -> None:
        self._units = units
        self._schedule = schedule
        self._collectives = collectives
        self._device = device
        self._release = release
        self._running = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Ranks may call the model differently inside; every rank must enter, also one that makes no call.

        The context ends on all ranks together. If a rank leaves it with an error, the other ranks raise RankError.
        Contexts nest: the outermost counts.
        """
        if self._running:
            yield
            return
        self._release()  # nothing may be gathered ahead here
        self._running = True
        self._schedule.gather_by(self._gather)
        try:
            try:
                yield
            except RankError:
                raise  # the other ranks raise it too, or are gone
            except Exception:
                with suppress(RankError):  # this rank's own error is the one to raise
                    self._agree(_FAILED)
                raise
            while (place := self._agree(_IDLE)) is not None:
                self._units[place].parameters.join_gather()
        finally:
            self._running = False
            self._schedule.gather_by(None)
        self._release()

    def compare(self) -> None:
        """Called when a forward of the full model without gradients has ended, which no step follows that compares the
        ranks. RankError on all of them if they gathered different units, where the backend does not separate these
        (see `Messages` in gloo.py): before anybody sees the output."""
        if self._collectives.mixes_units and not self._running:
            own = torch.tensor(self._collectives.fingerprint(), dtype=torch.float64, device=self._device)
            self._collectives.check_fingerprints(*self._collectives.sum_over_ranks_(own).tolist())

    def _gather(self, scheduled: ScheduledUnit) -> None:
        """Gather a unit that this rank needs; before that, take part in the gathers that other ranks need first."""
        own = next(place for place, unit in enumerate(self._units) if unit is scheduled)
        unit = self._units[own]
        if unit.parameters.state is DataState.STALE:
            while (place := self._agree(_FIRST_UNIT + own)) != own:
                assert place is not None, "a rank that needs a unit was counted as idle"
                self._units[place].parameters.join_gather()
        unit.wait_unshard()

    def _agree(self, answer: int) -> int | None:
        """The position of the unit that is gathered next; None if no rank needs one. A collective."""
        answers = torch.zeros(self._collectives.world, dtype=torch.int64, device=self._device)
        answers[self._collectives.rank : self._collectives.rank + 1].fill_(answer)
        found: list[int] = self._collectives.sum_over_ranks_(answers).tolist()
        if answer != _FAILED and _FAILED in found:
            failed = tuple(rank for rank, one in enumerate(found) if one == _FAILED)
            raise RankError(
                f"rank {', '.join(map(str, failed))} left the generation with an error of its own, which its output "
                "shows; this rank ended too, because its gathers need every rank",
                failed,
            )
        wanted = [one - _FIRST_UNIT for one in found if one >= _FIRST_UNIT]
        return wanted[0] if wanted else None
