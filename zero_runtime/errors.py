"""The runtime's exceptions, and helpers for their messages."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from pathlib import Path

_SHOWN = 3
_LONGEST = 200


def some(names: Iterable[str]) -> str:
    """The first few names and the number of the others, for an error message."""
    names = list(map(brief, names))
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", ".join(names[:_SHOWN]) or "none") + rest


def brief(found: object) -> str:
    """A value or exception as text for an error message, cut to 200 characters: it may quote an entire file."""
    text = f"{type(found).__name__}: {found}" if isinstance(found, BaseException) else str(found)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def missing_folder(folder: Path) -> str:
    """Why the folder does not exist and how to create it, for an error message.

    It is not created automatically: if a disk is not mounted or its name is mistyped, that would use another disk.
    """
    if os.path.exists(folder):
        return "a file of that name; give another folder"
    nearest = next(one for one in folder.absolute().parents if os.path.exists(one))
    place = nearest if os.path.isdir(nearest) else f"{nearest}, a file"
    make = f"mkdir -p {shlex.quote(str(folder))}"
    return f"none (of its path only {place} exists); correct the path, or make the folder: {make}"


class ZeroError(Exception):
    """Base class of the errors that the runtime raises deliberately."""


class PlanError(ZeroError, ValueError):
    """A setting, model or plan that the runtime cannot run; the user must change it."""


class UnitStateError(ZeroError, RuntimeError):
    """A unit's state does not allow a transition or a gradient: a bug in the runtime, or a use of its parameters that
    the message describes."""


class CallOrderError(ZeroError, RuntimeError):
    """forward, backward and step were called in an order that loses gradients or work."""


class NonFiniteError(ZeroError, RuntimeError):
    """The loss or the gradient norm is not finite; nothing was updated."""


class DTypeError(ZeroError, RuntimeError):
    """Tensors or messages had other dtypes than the configuration asks for."""


class RankError(ZeroError, RuntimeError):
    """Ranks issued different collectives, or a rank died, failed or stopped.

    ranks: the ranks at fault. hung: they are alive and keep the others waiting.
    """

    def __init__(self, text: str, ranks: tuple[int, ...], *, hung: bool = False) -> None:
        super().__init__(text)
        self.ranks = ranks
        self.hung = hung


class PeerError(ZeroError, RuntimeError):
    """A rank that reads the others' memory (same_host/) waits in vain: another has ended, is late or issued something
    else."""


class RankMemoryError(RankError):
    """This rank is out of memory.

    facts: the phase, step and unit, the bytes held by component, and the requested size as the allocator printed it.
    on_host: host memory ran out on a rank whose device is a GPU.
    """

    def __init__(self, text: str, rank: int, facts: dict[str, object], *, on_host: bool) -> None:
        super().__init__(text, (rank,))
        self.facts = facts
        self.on_host = on_host


class ParameterReadError(ZeroError, RuntimeError):
    """A parameter was read or written while its full values are missing or stale, or where a write would be lost."""


class OffloadError(ZeroError):
    """A tier cannot hold, read or write offloaded shards; the message names the cause, the file and the unit."""


class CheckpointError(ZeroError):
    """A checkpoint cannot be written, or cannot be loaded into this run; the run was not changed."""
