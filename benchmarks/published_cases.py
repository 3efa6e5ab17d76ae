"""Reads the tables of `published/`, and the comparison of one prediction with one published number."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

FOLDER = Path(__file__).with_name("published")
GIB = 1 << 30


@dataclass(frozen=True)
class Comparison:
    """A prediction and a published number of the same unit. `reason`: why they do not agree, or what is special."""

    case: str
    predicted: float
    published: float
    agrees: bool
    reason: str = ""

    @property
    def error(self) -> float:
        """Relative to the published number."""
        return self.predicted / self.published - 1


@dataclass(frozen=True)
class LeftOut:
    """A row of a table that is not compared, and why."""

    case: str
    reason: str


def table(name: str) -> list[dict[str, str]]:
    """The rows of one table."""
    with (FOLDER / name).open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def summary(errors: Sequence[float]) -> str:
    """Median of the absolute errors and the worst error, in percent."""
    if not errors:
        return "-"
    return f"median {median(map(abs, errors)):.2%}, worst {max(errors, key=abs):+.2%}"
