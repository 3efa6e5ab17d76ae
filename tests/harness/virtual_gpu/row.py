"""The name of a row. Imports no torch: the tests' own process lists rows and does not run them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from zero_runtime.plan import OuterSharding

SEQUENCES = 2  # of a micro-batch


@dataclass(frozen=True)
class Row:
    """What runs on the virtual GPU.

    offload: a key of rows.TIERS.
    late: helper threads run as late as possible, instead of as early. embedding_last: the model registers its embedding
    after its blocks. no_sync: all backwards of a step but the last run inside no_sync. skips: the gradients of the
    second step overflow, so it is skipped. traced: a step's activations are traced, as predictions of memory do.
    """

    stage: int = 3
    offload: str = "none"
    recompute: str = "none"
    micro_batches: int = 1
    shard_ranks: int | None = None
    prefetch: int = 1
    optimizer: str = "adamw"
    precision: str = "bf16"
    world: int = 8
    rank: int = 3
    late: bool = False
    tied: bool = False
    frozen: bool = False
    embedding_last: bool = False
    vocab: int = 37
    width: int = 20
    blocks: int = 4
    tokens: int = 16
    no_sync: bool = False
    skips: bool = False
    traced: bool = False
    steps: int = 3
    outer_sharding: OuterSharding | None = None

    def __str__(self) -> str:
        """The settings that differ from the defaults: `stage=2,offload=both`."""
        values = [(setting, getattr(self, setting.name)) for setting in fields(self)]
        words = [f"{setting.name}={value}" for setting, value in values if value != setting.default]
        return ",".join(words) or f"stage={self.stage}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
