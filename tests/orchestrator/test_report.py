from __future__ import annotations

import csv
import io
from pathlib import Path

from points import make_config
from stub_worker import make_result

from orchestrator import report
from orchestrator.paths import program
from orchestrator.report import Entry
from orchestrator.summary import next_after_run

CONFIG = make_config(Path("outputs"))


def make_entry(label: str, median: float, *, data_hash: str = "c0ffee", spread: float = 0.01) -> Entry:
    result = make_result(CONFIG, median)
    result["data"]["hash"] = data_hash
    speed = {"median": median, "p10": median * (1 - spread), "p90": median * (1 + spread)}
    result["throughput"]["tokens_per_second"] = speed
    return Entry(label, "ok", result, overrides=(f"zero={label}", "sweeps=stages"))


FAILED = Entry("stage3", "error", None, "rank 1 was killed by SIGKILL", overrides=("zero=stage3",))


def order(*entries: Entry) -> list[tuple[str, int | None, bool]]:
    return [(one.entry.label, one.place, one.tied) for one in report.rank(entries)]


def test_the_fastest_is_first_and_what_failed_is_last() -> None:
    found = order(FAILED, make_entry("stage1", 100), make_entry("stage0", 200))
    assert found == [("stage0", 1, False), ("stage1", 2, False), ("stage3", None, False)]


def test_rows_whose_ranges_overlap_are_ties_of_the_first_of_their_group() -> None:
    # c overlaps b, and b overlaps a, but c does not overlap a: a chain does not make everything one tie.
    found = order(make_entry("a", 100), make_entry("b", 98.5), make_entry("c", 97), make_entry("d", 50))
    assert found == [("a", 1, False), ("b", 1, True), ("c", 3, False), ("d", 4, False)]


def test_the_ranking_does_not_depend_on_the_order_of_the_columns() -> None:
    entries = [make_entry("slow", 100), make_entry("fast", 200)]
    shuffled = [Entry(one.label, "ok", dict(reversed((one.result or {}).items()))) for one in entries]
    assert order(*shuffled) == order(*entries)


def test_a_tie_names_no_winner_and_says_so() -> None:
    tied = report.rank([make_entry("a", 100), make_entry("b", 100.5)])
    assert report.conclusion(tied) == "fastest: a tie of b, a: their spread does not tell them apart"
    (smaller := make_entry("a", 100)).result["memory"]["states"][0]["measured_bytes"] -= 1  # type: ignore[index]
    tied = report.rank([smaller, make_entry("b", 100.5)])
    assert report.conclusion(tied).endswith("; a holds the least model states")
    assert report.conclusion(report.rank([make_entry("a", 100), FAILED])) == "fastest: a"
    assert report.conclusion(report.rank([FAILED])) == "no point has a result"


def test_points_on_other_data_are_warned_about() -> None:
    same = report.rank([make_entry("a", 100), make_entry("b", 90)])
    assert report.warnings(same) == []
    other = report.rank([make_entry("a", 100), make_entry("b", 90, data_hash="beef")])
    (warning,) = report.warnings(other)
    assert "data hash" in warning
    assert "beef: b" in warning


def test_a_failed_point_is_a_row_and_its_reason_is_told() -> None:
    ranked = report.rank([make_entry("a", 100), FAILED])
    table = report.table(ranked)
    assert table.rows[1][1:3] == ("stage3", "error")
    assert all(len(row) == len(table.header) for row in table.rows)
    page = report.report_md("2026_zero", ranked)
    assert "stage3: error: rank 1 was killed by SIGKILL" in page
    assert report.rule(report.DEFAULT_METRIC) in page


def test_the_csv_has_one_full_line_for_each_point_with_units_in_its_names() -> None:
    text = report.results_csv(report.rank([make_entry("a", 100.125), FAILED]))
    good, bad = csv.DictReader(io.StringIO(text))
    assert float(good["tokens_per_second_median"]) == 100.125
    assert float(good["backward_ms"]) == 61.0
    assert good["command"] == f"{program()} zero=a"
    assert (bad["state"], bad["tokens_per_second_median"]) == ("error", "")


def test_the_next_command_measures_the_winner_longer_or_runs_the_failed_point_alone() -> None:
    assert report.next_after_sweep(report.rank([make_entry("a", 100)])) == f"{program()} zero=a measure=standard"
    assert report.next_after_sweep(report.rank([FAILED])) == f"{program()} zero=stage3"
    after = next_after_run(("zero=stage2", "precision=bf16", "data.path=a b"))
    assert after == f"{program()} -m zero=stage0,stage1,stage2,stage3 precision=bf16 'data.path=a b'"
