"""The runtime's errors: what was expected, what was found, what to do."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from pathlib import Path

_SHOWN = 3
_LONGEST = 200


def some(names: Iterable[str]) -> str:
    """The first few of many names, and how many more there are: for a message."""
    names = list(map(brief, names))
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", ".join(names[:_SHOWN]) or "none") + rest


def brief(found: object) -> str:
    """What a file said, or an error that quotes it, for a message: it may be as long as the file."""
    text = f"{type(found).__name__}: {found}" if isinstance(found, BaseException) else str(found)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def missing_folder(folder: Path) -> str:
    """Why there is no such folder, and how to make it: for a message.

    Nobody makes it in passing: where a drive is not mounted, or its name is mistyped, that would use another drive.
    """
    if os.path.exists(folder):
        return "a file of that name; give another folder"
    nearest = next(one for one in folder.absolute().parents if os.path.exists(one))
    place = nearest if os.path.isdir(nearest) else f"{nearest}, a file"
    make = f"mkdir -p {shlex.quote(str(folder))}"
    return f"none (of its path only {place} exists); correct the path, or make the folder: {make}"


class ZeroError(Exception):
    """Base of every error that the runtime raises on purpose."""


class PlanError(ZeroError, ValueError):
    """A setting, a model or a plan that the runtime cannot run; the user's to mend."""


class UnitStateError(ZeroError, RuntimeError):
    """A unit was asked for a move that its state does not allow; ours to mend."""


class CallOrderError(ZeroError, RuntimeError):
    """forward, backward and step were called in an order that loses gradients or work."""


class NonFiniteError(ZeroError, RuntimeError):
    """The loss or the gradient norm is not a number; nothing was updated."""


class RankError(ZeroError, RuntimeError):
    """Ranks issued different collectives, or one died, failed or stopped; `ranks` are those to blame.

    `hung`: those live, and keep the others waiting.
    """

    def __init__(self, text: str, ranks: tuple[int, ...], *, hung: bool = False) -> None:
        super().__init__(text)
        self.ranks = ranks
        self.hung = hung


class RankMemoryError(RankError):
    """This rank could not get memory; `facts` are the phase, step and unit, and the bytes wanted as they were told.

    `on_host`: it was the host's, while the rank's device is another.
    """

    def __init__(self, text: str, rank: int, facts: dict[str, object], *, on_host: bool) -> None:
        super().__init__(text, (rank,))
        self.facts = facts
        self.on_host = on_host


class ParameterReadError(ZeroError, RuntimeError):
    """A parameter was read while its full values are not there, or are those of the step before."""


class OffloadError(ZeroError):
    """A tier cannot hold, read or write what rests there; names the cause, the file and the unit."""


class CheckpointError(ZeroError):
    """A checkpoint cannot be written, or cannot be read into this run; nothing of the run was changed."""
