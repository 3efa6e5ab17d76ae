"""Raises the same error on all ranks if any rank has failed, with one message between the ranks."""

from __future__ import annotations

from collections.abc import Callable

from zero_runtime.collectives import Collectives
from zero_runtime.errors import CheckpointError, OffloadError


def agree(collectives: Collectives, trouble: str | None) -> None:
    """Raise the same CheckpointError on every rank if `trouble` is not None on any rank. A collective."""
    raise_for(collectives.gather_objects(trouble))


def raise_for(troubles: list[str | None]) -> None:
    """Raise CheckpointError if any entry is not None; it lists each distinct trouble once, with the ranks that have it.

    troubles: one entry per rank, in rank order.
    """
    ranks: dict[str, list[int]] = {}
    for rank, trouble in enumerate(troubles):
        if trouble is not None:
            ranks.setdefault(trouble, []).append(rank)
    if not ranks:
        return
    if len(ranks) == 1:
        ((trouble, found),) = ranks.items()
        if len(found) == len(troubles):
            raise CheckpointError(trouble)
    raise CheckpointError("; ".join(f"rank {', '.join(map(str, own))}: {text}" for text, own in ranks.items()))


def trouble_of(action: Callable[[], object]) -> str | None:
    """Run `action` and return the message of its CheckpointError, OffloadError or OSError; None if it succeeds.

    Other errors are bugs in the runtime and propagate.
    """
    try:
        action()
    except (CheckpointError, OffloadError, OSError) as error:
        return str(error)
    return None
