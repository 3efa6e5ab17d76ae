"""The logger of DeepSpeed's `utils.logging`."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from zero_runtime.world import is_joined, own_rank

logger = logging.getLogger("zero_runtime")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks only: None or -1 among them for all; a process without a group is rank 0."""
    rank = own_rank() if is_joined() else 0
    if ranks is None or -1 in ranks or rank in ranks:
        logger.log(level, "[rank %d] %s", rank, message)
