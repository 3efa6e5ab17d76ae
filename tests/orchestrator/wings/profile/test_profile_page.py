"""A point's profile in the report: its pictures, the table of holders, and records that no picture can show."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from made_sweep import write_sweep
from matplotlib.patches import StepPatch
from matplotlib.text import Text

from orchestrator.records.record_file import write_json_atomic
from orchestrator.records.record_shapes import PROFILE, misfit
from orchestrator.records.run_record import AttemptPaths
from orchestrator.records.sweep_record import SweepPaths
from orchestrator.report import comparison
from orchestrator.wings.page import page
from orchestrator.wings.page.charts.canvas import document, png
from orchestrator.wings.page.figures import figures_of
from orchestrator.wings.page.report_points import ReportPoint, points_of
from orchestrator.wings.profile.efficiency import profile_rows, rate_rows
from orchestrator.wings.profile.profile_figures import (
    LAYERS,
    MOST_MODULES,
    MOST_PROFILES,
    by_module,
    over_time,
    shown_profiles,
)
from orchestrator.wings.profile.profile_page import holders_table

MIB = 1 << 20
SUMMARY = {
    "model_flops_per_step": 6_000_000_000,
    "executed_flops_per_step": 7_500_000_000,
    "model_flops_per_s": 30e9,
    "peak_flops_per_s": None,
    "peak_source": None,
    "mfu": None,
    "hfu": None,
    "step_ms": 200.0,
    "peak_bytes": 30 * MIB,
    "peak_rank": 1,
    "peak_phase": "backward",
    "peak_module": "layers.3.mlp",
    "peak_holder": "optimizer_states layers.*",
    "peak_holder_bytes": 8 * MIB,
    "traces": ["traces/rank0.json.gz", "traces/rank1.json.gz"],
}


def module(name: str, ms: float, flops: int = 0) -> dict[str, Any]:
    zero = {"recompute_ms": 0.0, "recompute_flops": 0}
    times = {"forward_ms": ms / 3, "backward_ms": 2 * ms / 3, "forward_flops": flops // 3}
    return {"name": name, **zero, **times, "backward_flops": flops - flops // 3}


def profile(modules: int = 3) -> dict[str, Any]:
    starts = [float(at) for at in range(0, 200, 2)]
    held = {name: [0] * len(starts) for name in LAYERS}
    held["parameters"] = [6 * MIB] * len(starts)
    held["activations"] = [int(MIB * (20 - abs(at - 100) / 5)) for at in starts]
    holder = {"component": "optimizer_states", "name": "layers.*", "tensors": 8, "largest_bytes": MIB}
    return {
        "rank": 1,
        "device": "cpu",
        "step_ms": 200.0,
        "modules": [module(f"layers.*.part{at}", 30.0 - at, 6_000_000) for at in range(modules)],
        "outside_ms": {"communication_exposed": 20.0, "optimizer": 10.0, "data": 0.01},
        "timeline": {
            "ms": starts,
            "bytes": held,
            "phases": [
                {"name": "forward", "start_ms": 1.0, "end_ms": 80.0},
                {"name": "backward", "start_ms": 80.0, "end_ms": 190.0},
                {"name": "optimizer", "start_ms": 190.0, "end_ms": 199.0},
            ],
        },
        "peak": {
            "ms": 100.0,
            "bytes": 30 * MIB,
            "phase": "backward",
            "module": "layers.3.mlp",
            "components": {"parameters": 6 * MIB, "activations": 20 * MIB},
            "holders": [{**holder, "bytes": 8 * MIB}, {**holder, "component": "other", "name": "", "bytes": 4 * MIB}],
        },
    }


def profiled_sweep(folder: Path, count: int, *, modules: int = 3) -> SweepPaths:
    sweep = write_sweep(folder, count)
    for row in comparison.ranked(sweep):
        attempt = AttemptPaths(Path(row.entry.folder))
        assert row.entry.result is not None
        write_json_atomic(attempt.result, {**row.entry.result, "profile": SUMMARY})
        write_json_atomic(attempt.profile, profile(modules))
    return sweep


def one_point(folder: Path, **changes: Any) -> ReportPoint:
    sweep = profiled_sweep(folder, 1)
    (point,) = points_of(sweep, comparison.ranked(sweep))
    return replace(point, profile={**point.profile, **changes})


def test_the_shapes_of_the_made_records_are_those_of_real_ones() -> None:
    assert misfit(profile(), PROFILE) is None


def test_the_page_and_the_markdown_show_the_first_profiles_and_count_the_others(tmp_path: Path) -> None:
    sweep = profiled_sweep(tmp_path, MOST_PROFILES + 2)
    comparison.write(sweep)
    text, report = sweep.page.read_text(), sweep.report.read_text()
    names = [f"{kind}_{at}" for at in range(1, MOST_PROFILES + 1) for kind in ("memory_over_time", "time_by_module")]
    assert re.findall(r'figure id="((?:memory_over|time_by)[^"]+)"', text) == names
    assert sorted(path.stem for path in sweep.pictures.glob("*_[0-9].svg")) == sorted(names)
    assert "2 more points have a profile" in text
    assert "no MFU: conf/hardware has no dense peak of this device and dtype" in text
    assert "25.0% more executed" in text
    assert "most of it: optimizer states layers.*, 8.00 MiB" in report
    assert "| optimizer states | layers.* | 8.00 MiB | 27 % | 8 | 1.00 MiB |" in report
    assert "| all others | - | 18.0 MiB | 60 % | - | - |" in report
    assert "(pictures/memory_over_time_1.svg)" in report
    assert "model_flops_per_s" in sweep.results.read_text().splitlines()[0]


def test_a_sweep_without_profiles_has_no_section_of_them(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, 2)
    points = points_of(sweep, comparison.ranked(sweep))
    assert shown_profiles(points) == []
    assert 'id="profiles"' not in page.page("plain", points, figures_of(points), {})


def test_the_timeline_stacks_its_layers_up_to_the_peak_and_names_phases_with_room(tmp_path: Path) -> None:
    figure = over_time(one_point(tmp_path), 1)
    lower, upper = figure.picture.figure.findobj(StepPatch)  # layers without any bytes are left out
    assert list(lower.get_data().values) == list(upper.get_data().baseline), "the activations stand on the parameters"
    texts = [text.get_text() for text in figure.picture.figure.findobj(Text)]
    assert {"forward", "backward", "peak 30.0 MiB in backward of layers.3.mlp"} <= set(texts)
    assert "optimizer" not in texts, "9 ms are narrower than the word"


def test_modules_beyond_the_first_are_summed_up(tmp_path: Path) -> None:
    point = one_point(tmp_path, modules=profile(MOST_MODULES + 5)["modules"])
    texts = [text.get_text() for text in by_module(point, 1).picture.figure.findobj(Text)]
    assert "5 more modules" in texts
    assert "communication exposed" in texts
    assert "data" not in texts, "it takes less than a thousandth of the step"
    assert "30.0 ms, 200 MFLOP/s" in texts


def test_numbers_that_no_picture_can_show_are_drawn_as_nothing(tmp_path: Path) -> None:
    odd = profile()
    odd["timeline"]["bytes"]["activations"] = [math.nan] * 100
    odd["timeline"]["bytes"]["parameters"] = [10**400, *[1] * 99]
    odd["timeline"]["bytes"]["gradients"] = [1.0]
    odd["modules"][0]["forward_ms"] = math.inf
    odd["outside_ms"]["optimizer"] = math.nan
    odd["peak"]["bytes"] = -1
    point = one_point(tmp_path, **odd)
    drawn = [over_time(point, 1), by_module(point, 1)]
    for figure in drawn:
        text = document(figure.picture)
        ElementTree.fromstring(text)
        assert not re.search(r"\b(nan|inf)\b", text), figure.name
    assert png([figure.picture for figure in drawn])
    assert holders_table(point.profile).rows
    empty = one_point(tmp_path / "empty", timeline={"ms": [], "bytes": {}, "phases": []}, modules=[], outside_ms={})
    for figure in (over_time(empty, 1), by_module(empty, 1)):
        ElementTree.fromstring(document(figure.picture))


def test_a_damaged_profile_is_left_out_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sweep = profiled_sweep(tmp_path, 1)
    (row,) = comparison.ranked(sweep)
    AttemptPaths(Path(row.entry.folder)).profile.write_text('{"rank": "one"}')
    (point,) = points_of(sweep, [row])
    assert point.profile == {}
    assert any("profile.json" in record.getMessage() for record in caplog.records)


def test_rows_name_mfu_where_there_is_a_dense_peak_and_say_why_where_there_is_none() -> None:
    on_gpu = {**SUMMARY, "peak_flops_per_s": 989.5e12, "peak_source": "hardware=h100_80gb", "mfu": 0.41, "hfu": 0.5}
    rows = {row.name: row.text for row in profile_rows({"world": 8, "profile": on_gpu})}
    assert rows["utilisation"] == "MFU 41.0 %, HFU 50.0 % of 989.5 TFLOP/s a GPU, dense (hardware=h100_80gb)"
    rows = {row.name: row.text for row in profile_rows({"world": 8, "profile": SUMMARY})}
    assert rows["utilisation"].startswith("no MFU: ")
    assert profile_rows({"world": 8}) == []


@pytest.mark.parametrize(
    ("peak", "mfu", "told"),
    [
        (None, None, "no MFU: no dense peak of this CPU is known"),
        (1e15, 0.41, "MFU 41.0 % of 1,000 TFLOP/s a GPU, dense"),
    ],
)
def test_a_run_without_a_profile_says_its_rate(peak: float | None, mfu: float | None, told: str) -> None:
    speed = {"model_flops_per_s": 2.5e12, "peak_flops_per_s": peak, "mfu": mfu}
    (row,) = rate_rows(speed, "cpu" if peak is None else "cuda")
    assert row == ("TFLOP/s", f"2.5 median, 6 FLOP for each trained parameter and token; {told}")
    assert rate_rows({}, "cpu") == []
