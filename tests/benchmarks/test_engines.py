"""README's table of engines has every engine's speed by stage, the winners in bold, and what has no place marked."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from made_comparison import write_comparison

from benchmarks.engines import BEGIN, END, ROOT, keep, table, with_table
from orchestrator.report import comparison


def test_the_table_is_that_of_the_sweep_and_goes_between_the_marks(tmp_path: Path) -> None:
    sweep = write_comparison(tmp_path)
    comparison.write(sweep)
    rows = list(csv.DictReader(sweep.results.read_text(encoding="utf-8").splitlines()))
    lines = table(rows)
    assert lines[0] == "| batch | precision | stage | zero-lab | DeepSpeed | FSDP2 | DDP |"
    assert "| at the same batch | bf16 | 1 | **7,600, 18.0 MiB** | 6,400, 18.0 MiB |  |  |" in lines
    assert lines[2].startswith("| at the same batch | bf16 | 0 |  |  |  | 10,400, 20.0 MiB (≠ moments in bf16; ")
    assert lines[-2:] == [
        "| at its own limit | bf16 | 0 |  |  |  | oom |",
        "| at its own limit | bf16 | 3 | 9,600, 14.0 MiB | **10,400, 14.0 MiB** |  |  |",
    ]
    text = with_table(f"before\n{BEGIN}old\n{END}\nafter\n", lines)
    assert text.startswith(f"before\n{BEGIN}\n| batch")
    assert text.endswith(f"|\n\n{END}\nafter\n")
    assert "old" not in text
    (kept,) = keep([(sweep.root, rows)], tmp_path / "results").iterdir()
    assert {path.name for path in kept.iterdir()} == {"report.md", "results.csv", "pictures"}


def test_the_readme_has_the_marks() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.count(BEGIN) == readme.count(END) == 1


def test_a_readme_without_marks_is_an_error() -> None:
    with pytest.raises(SystemExit, match="has no table between"):
        with_table("nothing", [])
