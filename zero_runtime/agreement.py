"""What all ranks of a world decide about a checkpoint in one message: whether anyone failed."""

from __future__ import annotations

from collections.abc import Callable

from zero_runtime.collectives import Collectives
from zero_runtime.errors import CheckpointError, OffloadError


def agree(collectives: Collectives, trouble: str | None) -> None:
    """CheckpointError on every rank, alike, where any rank has a trouble. A collective."""
    raise_for(collectives.gather_objects(trouble))


def raise_for(troubles: list[str | None]) -> None:
    """CheckpointError telling each different trouble once, with the ranks that have it; nothing where none has."""
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
    """What `action` has to complain of; errors of other kinds are ours and go through."""
    try:
        action()
    except (CheckpointError, OffloadError, OSError) as error:
        return str(error)
    return None
