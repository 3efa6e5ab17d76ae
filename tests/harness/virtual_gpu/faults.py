"""Named faults in the order of the device's work, injected on purpose to show that the virtual GPU finds them."""

from __future__ import annotations

from collections.abc import Callable

FAULTS: dict[str, Callable[[], None]] = {}


def fault(function: Callable[[], None]) -> Callable[[], None]:
    FAULTS[function.__name__] = function
    return function


def apply(name: str) -> None:
    FAULTS[name]()
