"""A backward through the models of several runtimes, as that of a generator's loss through its discriminator.

The runtime whose `backward` was called starts it. Every other one that it reaches joins: its units are gathered and
released as in a backward of its own, and its gradients stay on each rank, as inside `no_sync`, until its next backward.
Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

from zero_runtime.errors import CallOrderError, PlanError


@dataclass(eq=False)
class SharedBackward:
    """A backward that a runtime started. `ends`: called in turn when it has ended, for the runtimes that joined it."""

    scale: float
    ends: list[Callable[[], None]] = field(default_factory=list)


# Of this process; the innermost is the last. Hooks of one runtime are not told which other runtime runs them.
_UNDER_WAY: list[SharedBackward] = []


@contextmanager
def backward_through(scale: float) -> Iterator[None]:
    """The context of a runtime's backward, whose loss was multiplied by `scale`; other runtimes may join it."""
    backward = SharedBackward(scale)
    _UNDER_WAY.append(backward)
    try:
        yield
    finally:
        _UNDER_WAY.pop()
        for end in backward.ends:
            end()


def backward_under_way() -> SharedBackward | None:
    """The backward that a runtime has started and that has not ended; None in any other backward."""
    return _UNDER_WAY[-1] if _UNDER_WAY else None


def refuse_foreign(name: str, scale: float, own_scale: float) -> NoReturn:
    """Raise the error for a gradient that another runtime's backward cannot leave here."""
    found = f"the backward of another engine has a gradient for parameter {name!r} of this one"
    freeze = "freeze its parameters for that backward with requires_grad_(False)"
    if scale != own_scale:
        raise PlanError(f"{found}, scaled by {scale} where this one's are by {own_scale}: expected one scale; {freeze}")
    raise CallOrderError(
        f"{found}, whose own gradients are reduced already: expected that backward after step() of this engine; call "
        f"step() before it, or {freeze}"
    )
