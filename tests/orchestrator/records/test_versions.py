"""An answer that was made with other versions is kept, and plan, row, warning and files say with which."""

from __future__ import annotations

import csv
import io
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from points import make_config, make_point
from stub_worker import make_result

from orchestrator.config.schema import to_dict
from orchestrator.machine import hardware, provenance
from orchestrator.planning import decision
from orchestrator.planning.point import Wishes
from orchestrator.records import sweep_record
from orchestrator.records.record_file import require_json, write_json_atomic
from orchestrator.records.run_record import new_attempt
from orchestrator.records.run_state import RunState
from orchestrator.records.sweep_record import Planned, SweepPaths
from orchestrator.report import cautions, comparison, ranking, sweep_files

NOW = {"torch": "2.15.0+cu132", "transformers": "5.24.0", "peft": "0.21.2", "triton": "3.7.1"}


@pytest.fixture(autouse=True)
def versions_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "version_of", NOW.get)
    monkeypatch.setattr(hardware, "described_cpu", lambda: "AMD EPYC, native bf16")
    monkeypatch.delenv("ZLAB_KERNELS", raising=False)


def planned(output: Path) -> list[Planned]:
    points = [replace(make_point(make_config(output, stage=stage)), label=f"stage{stage}") for stage in (1, 2)]
    return decision.decide(points, output, lambda _: "cpu", Wishes(), {})


def measure(
    output: Path, stage: int, ranks: dict[str, str], state: RunState = RunState.ok, **made: Any
) -> list[Planned]:
    """Writes a result of `ranks`, what they record of their environment, and `made`, the provenance; then the plan."""
    config = make_config(output, stage=stage)
    attempt = new_attempt(output, to_dict(config), f"stage{stage}", "cpu")
    write_json_atomic(attempt.paths.provenance, {**require_json(attempt.paths.provenance), **made})
    attempt.move(RunState.starting)
    attempt.move(RunState.running)
    if state is RunState.ok:
        result = make_result(config) | {"measured_at": time.time()}
        here = {"torch": NOW["torch"], "cpu": "AMD EPYC, native bf16"}
        write_json_atomic(attempt.paths.result, result | {"environment": {**result["environment"], **here, **ranks}})
    attempt.move(state, message="" if state is RunState.ok else "the ranks needed 9 GiB")
    return planned(output)


CASES = {
    "all as now": ({}, {}, ""),
    "another build of torch": ({"torch": "2.15.0+cpu"}, {}, "torch 2.15.0+cpu (now 2.15.0+cu132)"),
    "another transformers": ({}, {"packages": {"transformers": "5.1.0"}}, "transformers 5.1.0 (now 5.24.0)"),
    "a processor of the same name": (
        {"cpu": "AMD EPYC, no native bf16"},
        {},
        "processor AMD EPYC, no native bf16 (now AMD EPYC, native bf16)",
    ),
    "other kernels": ({}, {"variables": {"ZLAB_KERNELS": "reference"}}, "ZLAB_KERNELS reference (now auto)"),
    "packages that such a point does not use": ({}, {"packages": {"triton": "1.0", "peft": "0.1"}}, ""),
    "a record of an earlier version": ({}, {"packages": None, "python": None, "variables": None}, ""),
}


@pytest.mark.parametrize(("ranks", "made", "words"), CASES.values(), ids=CASES)
def test_the_plan_says_with_what_a_kept_point_was_measured(
    tmp_path: Path, ranks: dict[str, str], made: dict[str, Any], words: str
) -> None:
    kept = measure(tmp_path, 1, ranks, **made)[0]
    assert kept.decision is RunState.cached
    told = kept.reason.partition(", code abc")[2]
    assert told == f"{', ' if words else ''}{words}; --fresh to measure again"
    assert Planned.from_dict(kept.to_dict()) == kept


def test_a_failure_with_other_versions_is_an_answer_that_names_them(tmp_path: Path) -> None:
    kept = measure(tmp_path, 1, {}, RunState.oom, packages={"torch": "2.13.0+cpu"})[0]
    assert kept.decision is RunState.oom
    assert kept.reason.startswith("the ranks needed 9 GiB; on ")
    assert kept.reason.endswith(" with torch 2.13.0+cpu (now 2.15.0+cu132); --retry oom to run it again")


def test_a_table_with_points_of_two_versions_of_torch_marks_the_row_and_warns(tmp_path: Path) -> None:
    measure(tmp_path, 1, {"torch": "2.13.0+cpu"})
    plan = measure(tmp_path, 2, {})
    sweep = sweep_record.open_sweep(tmp_path, "zero", plan, {"command": [], "rank_by": ""})
    ranked = comparison.ranked(SweepPaths(sweep.root))
    cells = {row.entry.label: row_cells[-1] for row, row_cells in zip(ranked, ranking.table(ranked).rows, strict=True)}
    assert cells["stage1"].endswith(", torch 2.13.0+cpu")
    assert "torch" not in cells["stage2"]
    (warning,) = [line for line in cautions.warnings(ranked) if "versions" in line]
    assert warning == (
        "rows were measured with other versions, so their speeds and memory do not compare with those of now: "
        "torch 2.13.0+cpu (now 2.15.0+cu132): stage1; --fresh measures all again"
    )
    assert warning in sweep_files.report_md("zero", ranked)
    rows = csv.DictReader(io.StringIO(sweep_files.results_csv(ranked)))
    assert {row["label"]: row["made_with"] for row in rows} == {"stage1": "torch 2.13.0+cpu", "stage2": ""}
    comparison.write(sweep)
    assert ", reused, torch 2.13.0+cpu" in sweep.page.read_text(encoding="utf-8")
