"""A step's update of second copies in the scratch file, while its backward still runs.

See [Note: guessing] in host.py: here the second copy is a second place in the file, and a guess that was right swaps
the two places. New parameters that do not rest go to memory of their own, since backward may still read the old ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from zero_runtime.errors import OffloadError
from zero_runtime.tiers.pipeline import Waits, pipeline
from zero_runtime.tiers.records import Record
from zero_runtime.tiers.resting import MASTER, PARAM, Compute, Shards


class _Cancelled(Exception):
    """A gradient has not come, and none will."""


@dataclass
class Try:
    """One unit's part in it. `slot`: laid out like the record, between its reading and the end of its writing."""

    record: Record
    arrived: threading.Event = field(default_factory=threading.Event)
    slot: torch.Tensor | None = None


class Guess:
    """`fetch` starts reading a record into a slot of its own, `flush` writing that to the record's other place."""

    def __init__(
        self,
        records: Sequence[Record],
        compute: Compute,
        fetch: Callable[[Try], Waits],
        flush: Callable[[Try], Waits],
        *,
        depth: int,
    ) -> None:
        self.tries = {record.name: Try(record) for record in records}
        self._compute = compute
        self._cancelled = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scratch-guess")
        self._done: Future[None] = self._thread.submit(
            pipeline, list(self.tries.values()), fetch, self._update, flush, depth=depth
        )

    def arrived(self, record: Record) -> None:
        """The unit's gradient is complete."""
        if record.name in self.tries:
            self.tries[record.name].arrived.set()

    def end(self) -> bool:
        """Block until nothing of it is under way; False where gradients are missing. Raises what went wrong."""
        missing = [one for one in self.tries.values() if not one.arrived.is_set()]
        self._cancelled = self._cancelled or bool(missing)
        for one in missing:
            one.arrived.set()
        self._thread.shutdown()
        error = self._done.exception()
        if error is not None and not isinstance(error, _Cancelled):
            raise OffloadError(str(error)) from error
        return not self._cancelled

    def _update(self, one: Try) -> None:
        one.arrived.wait()
        if self._cancelled:
            raise _Cancelled
        with torch.no_grad():
            self._compute(one.record.unit, _lent(one))


def _lent(one: Try) -> Shards:
    """Views of the slot, and of memory for new parameters where those do not rest."""
    record, unit = one.record, one.record.unit
    assert one.slot is not None
    views = {name: region.of(one.slot) for name, region in record.regions.items()}
    param = views.get(PARAM, record.staging)
    assert param is not None
    if unit.master_is_param and param is record.staging:
        param.copy_(unit.param_shard)
    master = param if unit.master_is_param else views[MASTER]
    return Shards(unit.layout, master, unit.grad_shard, param, {name: views[name] for name in record.states})
