"""The fit of the shares of data sheets: the table in the code is that of the report, and how sources are left out."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.published_shares import Fitted, LeftOutSource, held_by, of_case, own_generations, range_of
from benchmarks.published_speed import FIRST_ATTENTION
from zero_runtime.predict.timing import data_sheet

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def test_the_table_in_the_code_is_that_of_the_latest_report() -> None:
    text = max(RESULTS.glob("published_shares_*.md")).read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| [\d.e-]+, by a factor of [\d.]+ \| ([\d.e-]+) \| ([\d.]*) \|$", text, re.M)
    assert len(rows) == 11
    found = {name: float(value) for name, value, _ in rows}
    assert found.pop("older") == FIRST_ATTENTION
    assert found.items() <= vars(data_sheet.PUBLISHED).items()
    hopper = vars(data_sheet.OWN["Hopper"])
    assert {name: float(value) for name, _, value in rows if value}.items() <= hopper.items()
    ends = re.search(r"The range is ([\d.]+) to ([\d.]+) of", text)
    assert ends is not None
    assert tuple(map(float, ends.groups())) == (data_sheet.SHORTEST, data_sheet.LONGEST)


def source(name: str, *ratios: float) -> LeftOutSource:
    """A source whose published times are these shares of the predicted ones."""
    cases: Any = [SimpleNamespace(source=name, generation="A100") for _ in ratios]
    return LeftOutSource(cases, [-math.log(ratio) for ratio in ratios])


def test_the_range_is_that_of_one_more_source() -> None:
    """Two sources with means of 0 and 0.2, and a variance of 0.02 within the first: t of 90 % with one degree of
    freedom is 3.078 (any table of Student's t); the spread is the root of 0.02 * 3 / 2 + 0.02."""
    many, one = source("many", math.exp(0.1), math.exp(-0.1)), source("one", math.exp(0.2))
    half = 3.0777 * math.sqrt(0.02 * 1.5 + 0.02)
    assert range_of([many, one]) == pytest.approx((math.exp(0.1 - half), math.exp(0.1 + half)), rel=1e-4)
    assert held_by(source("new", 0.5, 1.0, 2.0, 3.0), range_of([many, one])) == 2


def test_attention_of_the_first_kernels_has_a_share_of_its_own() -> None:
    table: Any = {"": Fitted(attention=0.5, older=0.6)}
    older, newer = (SimpleNamespace(generation="", row={"kernels": name}) for name in ("flash_1", "flash"))
    assert of_case(table, older).attention == pytest.approx(0.3)  # type: ignore[arg-type]
    assert of_case(table, newer).attention == 0.5  # type: ignore[arg-type]


def test_a_generation_has_shares_of_its_own_from_three_sources_on() -> None:
    cases: Any = [SimpleNamespace(source=name, generation=of) for name in "ab" for of in ("A100", "Hopper", "")]
    assert own_generations(cases) == []
    assert own_generations([*cases, *(SimpleNamespace(source="c", generation=of) for of in ("Hopper", ""))]) == [
        "Hopper"
    ]
