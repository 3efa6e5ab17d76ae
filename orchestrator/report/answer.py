"""All that the pictures and the page take from the ranking: a point's speed and its range, the rule and the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.report import cautions, named_apart, ranking
from orchestrator.report.ranking import DEFAULT_METRIC, Ranked

RANGE_WORDS = (
    "the 95 % range between rounds, none from fewer than 3; ties are judged round by round, so ranges of "
    "rows that differ may overlap"
)


def speed(result: dict[str, Any]) -> float | None:
    """tokens/s of all ranks."""
    return ranking.METRICS[DEFAULT_METRIC].read(result)


def speed_range(result: dict[str, Any]) -> tuple[float, float] | None:
    """The range of tokens/s between rounds; None if there is none."""
    spread = ranking.speed(result)
    return None if spread is None else (spread.low, spread.high)


def by_speed(rows: Sequence[Ranked]) -> bool:
    """Whether the rows are ordered by tokens/s."""
    return not rows or rows[0].metric == DEFAULT_METRIC


def rule(rows: Sequence[Ranked]) -> str:
    """How the rows are ordered, and what a tie is."""
    return ranking.rule(rows[0].metric if rows else DEFAULT_METRIC)


def conclusion(rows: Sequence[Ranked]) -> str:
    """The best point or the tie."""
    return ranking.conclusion(rows)


def apart(rows: Sequence[Ranked]) -> list[str]:
    """The cheapest and the smallest point, each in a line, as far as they are known."""
    return named_apart.lines(rows)


def notes(rows: Sequence[Ranked]) -> list[str]:
    """What a reader should know of rows that were measured earlier."""
    return cautions.reused(rows)


def warnings(rows: Sequence[Ranked]) -> list[str]:
    """Reasons why the rows do not compare."""
    return cautions.warnings(rows)
