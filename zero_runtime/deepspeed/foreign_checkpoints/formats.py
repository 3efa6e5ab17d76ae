"""Detects which library wrote the checkpoint in a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from zero_runtime.deepspeed.foreign_checkpoints.dcp import is_dcp, open_dcp
from zero_runtime.deepspeed.foreign_checkpoints.deepspeed import is_deepspeed, open_deepspeed
from zero_runtime.deepspeed.foreign_checkpoints.source import ForeignCheckpoint


def foreign_reader(path: Path) -> Callable[[Iterable[str]], ForeignCheckpoint] | None:
    """A function that opens another library's checkpoint, given the parameter names; None for any other folder."""
    if is_deepspeed(path):
        return partial(open_deepspeed, path)
    if is_dcp(path):
        return partial(open_dcp, path)
    return None
