"""The group that divides the layers of a model or its sequences over ranks, and the ranks that read different data."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.config.strict import Limits


@dataclass(frozen=True)
class Parallel:
    """How many ranks compute on one batch.

    `tp`: tensor parallelism: this many consecutive ranks hold slices of each layer and compute on the same batch; ZeRO
    shards over the others, so that a global batch has micro x accumulation x ranks / tp sequences. `patterns`: which
    layers are divided and how, such as `*.mlp.down=row`, for models whose structure is not known; the kinds are column,
    `column:N` (N fused matrices), row and replicated. `sp`: sequence parallelism: this many consecutive ranks read the
    same sequences, compute with a part of each, and exchange parts for heads at attention; ZeRO shards over all ranks,
    and a global batch has micro x accumulation x ranks / sp sequences.
    """

    tp: int = 1
    patterns: list[str] = field(default_factory=list)
    sp: int = 1

    def __post_init__(self) -> None:
        limits = Limits(vars(self), "parallel")
        limits.at_least(1, tp=1, sp=1)
        rule = "column, column:N, row or replicated (gathered and summed layers are of scripts, and not predicted)"
        limits.must(
            "patterns", lambda found: not any(one.endswith(("=gathered", "=summed")) for one in found), rule, []
        )
        limits.conclude()

    @property
    def group(self) -> int:
        """The number of consecutive ranks that read the same batch."""
        return self.tp * self.sp

    def data_ranks(self, ranks: int) -> int:
        """The number of ranks that ZeRO shards over: one of each tensor-parallel group."""
        return max(1, ranks // self.tp)

    def batch_ranks(self, ranks: int) -> int:
        """The number of ranks with different batches."""
        return max(1, ranks // self.group)

    def same_batch(self) -> str:
        """Such as " / tp 2": the ranks of a group read the same batch. Empty if all ranks read different ones."""
        return "".join(f" / {name} {degree}" for name, degree in (("tp", self.tp), ("sp", self.sp)) if degree > 1)
