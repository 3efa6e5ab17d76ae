"""A pipeline that fetches, computes and flushes items, several of them at the same time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol, TypeVar

Item = TypeVar("Item")


class Waits(Protocol):
    def wait(self) -> None:
        """Block until the transfer is done; raises its error if it failed."""
        ...


def pipeline(
    items: Iterable[Item],
    fetch: Callable[[Item], Waits],
    compute: Callable[[Item], None],
    flush: Callable[[Item], Waits],
    *,
    depth: int,
) -> None:
    """`compute` every item in order, while up to `depth` of the next are fetched and as many of the last flushed.

    At most 2 * depth + 1 items are between the start of their fetch and the end of their flush. With depth 0 items are
    processed one after another; the depth changes timing, never what `compute` sees. An error is raised only after all
    transfers have ended.
    """
    rest = iter(items)
    fetching: deque[tuple[Item, Waits]] = deque()
    flushing: deque[Waits] = deque()

    def admit() -> None:
        for item in rest:
            fetching.append((item, fetch(item)))
            return

    try:
        for _ in range(depth + 1):
            admit()
        while fetching:
            item, fetched = fetching.popleft()
            fetched.wait()
            compute(item)
            flushing.append(flush(item))
            while len(flushing) > depth:
                flushing.popleft().wait()
            admit()
        while flushing:
            flushing.popleft().wait()
    except BaseException:
        for moving in (*(fetched for _, fetched in fetching), *flushing):
            with suppress(Exception):  # only the first failure is reported
                moving.wait()
        raise
