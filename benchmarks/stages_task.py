"""Defines what benchmarks/stages.py measures and for how long, and the names of its rows in reports."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpt import GptSize

ROWS = {f"stage{stage}": stage for stage in (0, 1, 2, 3)}
LIMIT = "forward+backward"
# For each setting of a peer, the stage of our row with which it is compared.
PEERS = {"fsdp2": 2, "fsdp2 reshard": 3} | {f"deepspeed {stage}": stage for stage in range(4)}
TITLES = {
    LIMIT: "forward + backward alone",
    **{name: f"ours, stage {stage}" for name, stage in ROWS.items()},
    "fsdp2": "FSDP2, reshard_after_forward=False (as stage 2)",
    "fsdp2 reshard": "FSDP2, reshard_after_forward=True (as stage 3)",
    **{f"deepspeed {stage}": f"DeepSpeed, stage {stage}" for stage in range(4)},
}
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
    peers: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Tokens of one step over all ranks."""
        return self.world * self.size.micro * self.size.seq

    @property
    def trained(self) -> tuple[str, ...]:
        """The rows that take complete steps."""
        return (*ROWS, *self.peers)
