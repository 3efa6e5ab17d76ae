"""Operations under way, as torch sees them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zero_runtime.same_host.progress import Operation, progress

_Work: Any = dist.Work  # its declaration differs from version to version of torch


class SharedWork(_Work):  # type: ignore[misc]
    """One operation, or several that were issued together, as torch sees them."""

    def __init__(self, started: Sequence[Operation], timeout: timedelta, output: Any = None) -> None:
        super().__init__()
        self._started, self._timeout, self._output = started, timeout, output
        self._progress = progress()  # not a forked child's
        self.sources: list[int] = []  # the rank that a message came from
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the result is there; raises PeerError. A timeout of 0 is the group's."""
        for one in self._started:
            self._progress.wait(one, (timeout or self._timeout).total_seconds())
        return True

    def is_completed(self) -> bool:
        self._progress.poke()
        return all(one.ended for one in self._started)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return next((one.error for one in self._started if one.error is not None), None)

    def result(self) -> Any:
        return self._output

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self.sources[0]

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that a thread of its own completes."""
        if self._future is None:
            future: torch.futures.Future[Any] = torch.futures.Future()
            self._future = future
            left = len(self._started)

            def end(_: Operation) -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    error = self.exception()
                    if error is None:
                        future.set_result(self._output)
                    else:
                        future.set_exception(error)

            for one in self._started:
                self._progress.go_behind(one)
                one.afterwards(end)
        return self._future
