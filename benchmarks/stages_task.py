"""What benchmarks/stages.py measures, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

from gpt import GptSize

ROWS = {f"stage{stage}": stage for stage in (0, 1, 2, 3)}
LIMIT = "forward+backward"
WARMUP = 2
SETTLED, STEADY = 16, 8  # steps until the heap has found its layout, and those whose peak and page faults count


@dataclass(frozen=True)
class Task:
    """What one set of ranks has to do, and where it says what it found."""

    folder: str
    world: int
    size: GptSize
    precision: str
    rounds: int
    peers: tuple[str, ...]
