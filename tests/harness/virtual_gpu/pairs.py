"""Rows in which every two values of two settings meet, wherever the product accepts them together."""

from __future__ import annotations

import random
from itertools import combinations
from typing import Any

from harness.virtual_gpu.row import Row

VALUES: dict[str, tuple[Any, ...]] = {
    "stage": (0, 1, 2, 3),
    "offload": (
        *("none", "activations", "optimizer", "params", "both"),
        *("optimizer nvme", "both nvme", "params cpu optimizer nvme"),
    ),
    "recompute": ("none", "full", "every_nth", "by_operation"),
    "micro_batches": (1, 3),
    "shard_ranks": (None, 1, 2, 4),
    "prefetch": (0, 1, 3),
    "optimizer": ("adamw", "adamw8bit", "lamb", "lion", "sgd", "torch"),
    "precision": ("bf16", "fp32", "fp16"),
    "world": (8, 64),
    "late": (False, True),
    "tied": (False, True),
    "frozen": (False, True),
    "embedding_last": (False, True),
}
Pair = tuple[tuple[str, Any], tuple[str, Any]]
CANDIDATES, IDLE_ROUNDS = 200, 10  # rows that are drawn for each choice; choices without a new pair before the end


def is_accepted(row: Row) -> bool:
    """Whether the product runs the row; see ZeroPlan, OffloadPlan.check and OptimizerConfig.updates_units_alone."""
    moves_states = row.offload not in ("none", "activations", "params")
    moves_params = row.offload.startswith(("params", "both"))
    return (
        (row.shard_ranks is None or row.stage > 0)
        and (not moves_params or row.stage == 3)
        and (row.optimizer not in ("lamb", "torch") or not (moves_states or moves_params))
        and (moves_states or not row.late)
    )


def pairs_of(row: Row) -> set[Pair]:
    return set(combinations([(name, getattr(row, name)) for name in VALUES], 2))


def covering_rows(seed: int = 0) -> list[Row]:
    """The same list in every process: of random accepted rows, again and again that with the most new pairs."""
    chance = random.Random(seed)
    seen: set[Pair] = set()
    rows: list[Row] = []
    idle = 0
    while idle < IDLE_ROUNDS:
        drawn = [Row(**{name: chance.choice(values) for name, values in VALUES.items()}) for _ in range(CANDIDATES)]
        best = max(filter(is_accepted, drawn), key=lambda row: len(pairs_of(row) - seen))
        idle = idle + 1 if pairs_of(best) <= seen else 0
        if not idle:
            seen |= pairs_of(best)
            rows.append(best)
    return rows
