"""Items that are fetched, worked on and flushed, some of them at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol, TypeVar

Item = TypeVar("Item")


class Waits(Protocol):
    def wait(self) -> None:
        """Block until the move is done; raises what went wrong with it."""
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

    At most 2 * depth + 1 items are between their fetch and the end of their flush. Depth 0 does one after another; the
    depth changes time, never what `compute` sees. What fails is raised when nothing is under way any more.
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
            with suppress(Exception):  # the first failure is the one to tell
                moving.wait()
        raise
