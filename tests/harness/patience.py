"""How long a test waits for an event that must happen. An event that does happen never takes so long, however busy the
machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

HANG_S = 600.0  # a longer wait means a hang; below pytest's own limit, so that the test can report what is missing
Found = TypeVar("Found")


def wait_until(look: Callable[[], Found], every_s: float = 0.02) -> Found:
    """Call `look` until it returns a true value, and return that value."""
    deadline = time.monotonic() + HANG_S
    while not (found := look()):
        assert time.monotonic() < deadline, f"{look} has found nothing for {HANG_S:g} s"
        time.sleep(every_s)
    return found
