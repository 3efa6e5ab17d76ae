"""What a plan asks of a predictor, which is a wing: what points need, and what would fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from orchestrator import wings
from orchestrator.config.schema import RunConfig
from orchestrator.planning.point import Point

NOT_ASKED = "it was not counted"
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Prediction:
    """What one rank of a point needs, before it runs.

    states_bytes: of model states alone. expected: all that is predicted, in one line. cannot_fit: why the point cannot
    fit; empty if it may. fixes: overrides with which it would, as far as they were searched for. record: the complete
    prediction as plain data, with its bytes, their limit and the speed.
    """

    states_bytes: int
    expected: str
    cannot_fit: str
    fixes: tuple[str, ...]
    record: dict[str, Any]


class Predictor(Protocol):
    """Counts without running, in a process of its own."""

    def predict(
        self,
        points: Sequence[Point],
        tell: Tell | None = None,
        *,
        within_s: float = math.inf,
        unknown: dict[str, str] | None = None,
    ) -> dict[str, Prediction]:
        """The predictions by label. A point whose model cannot be built has none; `unknown` gets the reason.

        `tell` is called with messages about the progress. within_s: the most time that the counts may take for the
        points, and again for the settings that would fit. What is not counted by then is not predicted.
        """

    def problems(self, points: Sequence[Point], *, counting_within_s: float = 0.0) -> dict[str, str]:
        """By label, the problems of models that cannot be built, in the words that a job would use.

        counting_within_s: if it is positive, what a prediction will ask for is counted too, for at most this time.
        """

    def fixes(self, config: RunConfig, memory: Mapping[str, Any]) -> str:
        """For a rank that was out of memory: the bytes that it held, and the settings that would free enough. memory:
        what it recorded, with "wanted" and, by kind, the bytes "held"."""


def predictor() -> Predictor:
    """The predictor of the wings' table, which is imported by the first call."""
    found: Predictor = wings.load(wings.PREDICTOR)
    return found
