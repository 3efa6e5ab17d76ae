"""The group that divides the layers of a model over ranks, and the ranks that are left to read different data."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.config.strict import Limits


@dataclass(frozen=True)
class Parallel:
    """How many ranks compute with one model.

    `tp`: tensor parallelism: this many consecutive ranks hold slices of each layer and compute on the same batch; ZeRO
    shards over the others, so that a global batch has micro x accumulation x ranks / tp sequences. `patterns`: which
    layers are divided and how, such as `*.mlp.down=row`, for models whose structure is not known; the kinds are column,
    `column:N` (N fused matrices), row and replicated.
    """

    tp: int = 1
    patterns: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        limits = Limits(vars(self), "parallel")
        limits.at_least(1, tp=1)
        limits.conclude()

    def data_ranks(self, ranks: int) -> int:
        """The number of ranks with different batches, which ZeRO shards over: one of each tensor-parallel group."""
        return max(1, ranks // self.tp)
