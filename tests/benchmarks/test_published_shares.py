"""The fit of the shares of data sheets: the table in the code is that of the report, and how sources are left out."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.published_shares import LeftOutSource, held_by, own_generations, range_of
from zero_runtime.predict.timing import data_sheet

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def test_the_table_in_the_code_is_that_of_the_latest_report() -> None:
    text = max(RESULTS.glob("published_shares_*.md")).read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| [\d.e-]+, by a factor of [\d.]+ \| ([\d.e-]+) \| ([\d.]*) \|$", text, re.M)
    assert len(rows) == 9
    assert {name: float(value) for name, value, _ in rows}.items() <= vars(data_sheet.PUBLISHED).items()
    hopper = vars(data_sheet.OWN["Hopper"])
    assert {name: float(value) for name, _, value in rows if value}.items() <= hopper.items()
    ends = re.search(r"The range is ([\d.]+) to ([\d.]+) of", text)
    assert ends is not None
    assert tuple(map(float, ends.groups())) == (data_sheet.SHORTEST, data_sheet.LONGEST)


def source(name: str, *ratios: float) -> LeftOutSource:
    """A source whose published times are these shares of the predicted ones."""
    cases: Any = [SimpleNamespace(source=name, generation="A100") for _ in ratios]
    return LeftOutSource(cases, [-math.log(ratio) for ratio in ratios])


def test_the_range_counts_each_source_alike() -> None:
    """Ten runs of one source weigh as much as one of another: a tenth of all is below and above."""
    many, one = source("many", *(0.5 + place / 10 for place in range(10))), source("one", 9.0)
    assert range_of([many]) == pytest.approx((0.5, 1.3))
    assert range_of([many, one]) == pytest.approx((0.6, 9.0))
    assert held_by(many, (0.55, 1.35)) == 8


def test_a_generation_has_shares_of_its_own_from_three_sources_on() -> None:
    cases: Any = [SimpleNamespace(source=name, generation=of) for name in "ab" for of in ("A100", "Hopper", "")]
    assert own_generations(cases) == []
    assert own_generations([*cases, *(SimpleNamespace(source="c", generation=of) for of in ("Hopper", ""))]) == [
        "Hopper"
    ]
