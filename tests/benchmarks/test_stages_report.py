"""The report computes ratios within a round and medians with quartiles, and puts several runs into one table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.stages_report import (
    of_limit,
    of_parts,
    percent,
    quartiles,
    report_lines,
    short_table,
    spread,
    verdicts,
    write_report,
)

SECONDS = {
    "forward+backward": [1.0, 2.0, 4.0],
    "stage2": [1.25, 2.5, 5.0],
    "stage2 collectives": [0.1, 0.2, 0.4],
    "stage2 gradients": [0.05, 0.1, 0.1],
    "stage2 optimizer": [0.1, 0.0, 0.5],
}


def found(precision: str = "fp32") -> dict[str, Any]:
    size = {"layers": 2, "width": 64, "heads": 4, "vocab": 512, "seq": 64, "micro": 2}
    names = ("forward+backward", "stage2")
    peak = {"whole": 30.0, "steady": 20.4, "faulted": 0.0, "faulted_most": 1.0, "first_loss": 6.2, "last_loss": 6.1}
    return {
        "date": "2026-11-22",
        "device": "cpu",
        "machine": "a machine",
        "versions": "torch 2.13",
        "command": f"python benchmarks/stages.py --precision {precision}",
        "load_before": 0.1,
        "task": {"world": 2, "size": size, "precision": precision, "rounds": 3, "warmup": 1},
        "seconds": SECONDS,
        "losses": {name: [6.25, 6.24, 6.23, 6.22] for name in names},
        "memory": {"stage2": peak},
    }


def test_shares_are_computed_within_each_round() -> None:
    assert of_limit(found(), "stage2") == [0.8, 0.8, 0.8]  # although the steps became slower


def test_the_parts_are_summed_within_each_round() -> None:
    assert of_parts(found(), "stage2") == pytest.approx([1.0, 0.92, 1.0])


def test_quartiles_stay_within_the_range_of_the_values() -> None:
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)
    assert quartiles([1.0, 9.0]) == (3.0, 5.0, 7.0)
    assert quartiles([7.0]) == (7.0, 7.0, 7.0)
    assert percent([0.5, 0.6, 0.7]) == "60 % (55 to 65)"
    assert spread([1.0, 2.0, 3.0], 1e3, ".0f") == "2000 (1500 to 2500)"


def test_the_page_contains_command_machine_rounds_losses_and_drift_verdicts() -> None:
    page = "\n".join(report_lines(found()))
    for part in (
        "Command: `python benchmarks/stages.py --precision fp32`",
        "2 ranks on a machine; torch 2.13; fp32",
        "3 rounds after 1",
        "6.2500 to 6.2500 at the first step (expected 6.2",
        *verdicts(found()),
        "| stage 2 | 2500 (1875 to 3750) | 80 % (80 to 80) | 200 (150 to 300) | 100 (75 to 100) | 100 (50 to 300) |",
        "| 100 % (96 to",
        "| stage 2 | 20 | 30 | 0.00 | 1.00 | 6.1000 |",
    ):
        assert part in page


def test_the_short_table_has_a_row_for_each_stage_and_columns_for_each_precision() -> None:
    lines = short_table([found("fp32"), found("bf16")])
    assert lines[0] == (
        "| row | fp32: of forward + backward | fp32: MiB a rank | bf16: of forward + backward | bf16: MiB a rank |"
    )
    assert lines[2] == "| stage 2 | 80 % (80 to 80) | 20 | 80 % (80 to 80) | 20 |"
    assert sum("Drift of step times" in line for line in lines) == 2


def test_the_json_contains_the_verdicts_and_reproduces_the_page(tmp_path: Path) -> None:
    write_report(found(), tmp_path)
    page, numbers = (tmp_path / f"stages_cpu_fp32_2026-11-22.{kind}" for kind in ("md", "json"))
    again = json.loads(numbers.read_text())
    assert again["verdicts"] == verdicts(found())
    assert "\n".join(report_lines(again)) + "\n" == page.read_text()
