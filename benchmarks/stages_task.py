"""Defines what benchmarks/stages.py measures and for how long, and the names of its rows in reports."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpt import GptSize

ROWS = {f"stage{stage}": stage for stage in (0, 1, 2, 3)}
LIMIT = "forward+backward"
PARTS = ("collectives", "gradients", "optimizer")  # of a row, besides; each is measured alone
TITLES = {LIMIT: "forward + backward alone", **{name: f"stage {stage}" for name, stage in ROWS.items()}}
WARMUP = 2
SETTLED, STEADY = 6, 4  # steps until the heap has settled, and later steps whose peak and page faults count


@dataclass(frozen=True)
class Task:
    """The task of one set of ranks, and the folder for its results."""

    folder: str
    world: int
    size: GptSize
    precision: str
    rounds: int
    comm: str = "auto"

    @property
    def tokens(self) -> int:
        """Tokens of one step over all ranks."""
        return self.world * self.size.micro * self.size.seq
