"""The largest micro-batch of a configuration that is predicted to fit, with its global batch."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.config.schema import RunConfig
from orchestrator.wings.predict.point_prediction import PointPrediction
from orchestrator.wings.predict.prediction import Predictions
from orchestrator.wings.predict.step import traced, with_share

SMALLEST = (1, 2)  # a batch of one is traced alone: torch treats dimensions of one differently


def largest_micros(configs: Sequence[RunConfig]) -> list[int | str]:
    """For each configuration the largest micro-batch of those that divide a rank's share of its global batch, and that
    fits with the most that libraries take; 1 if none does, or why it is not known."""
    asked = [one for config in configs for one in traced([config], sorted({*SMALLEST, _share(config)}))]
    predictions = Predictions(configs, asked, together=True)
    return [_largest(config, predictions) for config in configs]


def _largest(config: RunConfig, predictions: Predictions) -> int | str:
    share = _share(config)
    for micro in (one for one in range(share, 0, -1) if share % one == 0):
        found = predictions.of(with_share(config, micro))
        if isinstance(found, str):
            return found
        if found.limit_bytes is None:
            return "the limit is not known: give resources.memory_mib"
        if found.ceiling_bytes is None:
            return f"activations are not predicted: {found.unknown}"
        if _fits(found):
            return micro
    return 1


def _fits(found: PointPrediction) -> bool:
    assert found.limit_bytes is not None
    assert found.ceiling_bytes is not None
    return found.ceiling_bytes * found.ranks_share <= found.limit_bytes and not found.host_lacks


def _share(config: RunConfig) -> int:
    """The sequences of a step on one rank."""
    return config.batch.micro * config.batch.accumulation
