"""How long a test waits for what must come. No test waits so long for what does come, however busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

HANG_S = 600.0  # after which something hangs; below pytest's own limit, so that the test can say what did not come
Found = TypeVar("Found")


def wait_until(look: Callable[[], Found], every_s: float = 0.02) -> Found:
    """What `look` finds, as soon as it finds anything true."""
    deadline = time.monotonic() + HANG_S
    while not (found := look()):
        assert time.monotonic() < deadline, f"{look} has found nothing for {HANG_S:g} s"
        time.sleep(every_s)
    return found
