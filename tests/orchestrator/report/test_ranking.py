from __future__ import annotations

import csv
import io
import time
from dataclasses import replace
from pathlib import Path

import pytest
from points import make_config
from stub_worker import make_result

from orchestrator.report import ranking
from orchestrator.report.ranking import Entry
from orchestrator.text.paths import program

CONFIG = make_config(Path("outputs"))


def make_entry(label: str, median: float, *, data_hash: str = "c0ffee", spread: float = 0.01) -> Entry:
    result = make_result(CONFIG, median)
    result["data"]["hash"] = data_hash
    speed = {"median": median, "p10": median * (1 - spread), "p90": median * (1 + spread)}
    result["throughput"]["tokens_per_second"] = speed
    return Entry(label, "ok", result, overrides=(f"zero={label}", "sweeps=stages"))


FAILED = Entry("stage3", "error", None, "rank 1 was killed by SIGKILL", overrides=("zero=stage3",))
LACKING = Entry("stage0", "oom")


def order(*entries: Entry) -> list[tuple[str, int | None, bool]]:
    return [(one.entry.label, one.place, one.tied) for one in ranking.rank(entries)]


def test_the_fastest_point_is_first_and_failed_points_are_last() -> None:
    found = order(FAILED, make_entry("stage1", 100), make_entry("stage0", 200))
    assert found == [("stage0", 1, False), ("stage1", 2, False), ("stage3", None, False)]


def test_rows_whose_ranges_overlap_that_of_the_first_row_of_their_group_are_ties() -> None:
    # c overlaps b, and b overlaps a, but c does not overlap a: a chain does not make everything one tie.
    found = order(make_entry("a", 100), make_entry("b", 98.5), make_entry("c", 97), make_entry("d", 50))
    assert found == [("a", 1, False), ("b", 1, True), ("c", 3, False), ("d", 4, False)]


def test_the_ranking_does_not_depend_on_the_order_of_the_columns() -> None:
    entries = [make_entry("slow", 100), make_entry("fast", 200)]
    shuffled = [Entry(one.label, "ok", dict(reversed((one.result or {}).items()))) for one in entries]
    assert order(*shuffled) == order(*entries)


def test_a_tie_names_no_winner_and_says_so() -> None:
    tied = ranking.rank([make_entry("a", 100), make_entry("b", 100.5)])
    assert ranking.conclusion(tied) == "fastest: a tie of b, a: their spreads overlap"
    (smaller := make_entry("a", 100)).result["memory"]["states"][0]["measured_bytes"] -= 1  # type: ignore[index]
    tied = ranking.rank([smaller, make_entry("b", 100.5)])
    assert ranking.conclusion(tied).endswith("; a has the smallest model states")
    assert ranking.conclusion(ranking.rank([make_entry("a", 100), LACKING])) == "fastest: a"
    assert ranking.conclusion(ranking.rank([FAILED])) == "no point has a result"


def test_the_fastest_of_some_points_is_not_called_the_fastest_of_all() -> None:
    left = [replace(FAILED, state=state) for state in ("cancelled", "queued")]
    ranked = ranking.rank([make_entry("a", 100), LACKING, *left])
    assert ranking.conclusion(ranked) == "fastest of the 2 of 4 points that have an answer: a"


def made_at(label: str, when: str, state: str = "ok", others: float | None = 0.0, median: float = 100) -> Entry:
    entry = make_entry(label, median)
    assert entry.result is not None
    entry.result["load"] = {"others_share": others}
    return replace(entry, state=state, measured_at=time.mktime(time.strptime(when, "%Y-%m-%d %H:%M")))


def test_a_reused_row_is_marked_with_its_time_in_every_form_of_the_comparison() -> None:
    old = made_at("old", "2026-11-21 21:29", "cached", median=110)
    ranked = ranking.rank([made_at("new", "2026-11-22 10:00"), old])
    table = ranking.table(ranked)
    assert table.header[-1] == "reused from"
    assert [row[-1] for row in table.rows] == ["11-21 21:29", ""]
    line = (
        "1 of 2 rows was measured earlier: old measured 2026-11-21 21:29, reused. --fresh measures all in one session"
    )
    assert ranking.reused(ranked) == [line]
    page = ranking.report_md("2026_zero", ranked)
    assert line in page
    assert "| 11-21 21:29 |" in page
    first, second = csv.DictReader(io.StringIO(ranking.results_csv(ranked)))
    assert (first["label"], first["measured_at"], first["reused"]) == ("old", "2026-11-21 21:29:00", "True")
    assert (second["measured_at"], second["reused"]) == ("2026-11-22 10:00:00", "False")


def test_rows_measured_in_one_session_are_not_marked_as_reused() -> None:
    ranked = ranking.rank([made_at("a", "2026-11-22 10:00"), made_at("b", "2026-11-22 10:01"), FAILED])
    assert ranking.table(ranked).header == ranking.HEADER
    assert ranking.reused(ranked) == []


def test_many_reused_rows_are_counted_in_one_line() -> None:
    ranked = ranking.rank([made_at(f"p{one}", "2026-11-21 21:29", "cached") for one in range(6)])
    (line,) = ranking.reused(ranked)
    assert line.startswith("6 of 6 rows were measured earlier: p0 measured 2026-11-21 21:29, reused; p1 ")
    assert "; 2 more. --fresh" in line


@pytest.mark.parametrize(
    ("shares", "told"),
    [
        ((0.01, 0.09), []),
        ((0.0, None), []),
        ((0.48, 0.45), ["other processes took this share of the cores while a row was measured: 48 %: r0; 45 %: r1"]),
        (
            (0.86, 0.92),  # one row had 14 % of the cores, the other 8 %
            [
                "the rows were measured under different loads, so speeds do not compare; other processes took this "
                "share of the cores while a row was measured: 86 %: r0; 92 %: r1"
            ],
        ),
        (
            (0.02, 0.48),
            [
                "the rows were measured under different loads, so speeds do not compare; other processes took this "
                "share of the cores while a row was measured: 2 %: r0; 48 %: r1"
            ],
        ),
    ],
)
def test_rows_measured_while_other_processes_were_busy_cause_a_warning(
    shares: tuple[float | None, ...], told: list[str]
) -> None:
    entries = [made_at(f"r{at}", "2026-11-22 10:00", others=one, median=100 - at) for at, one in enumerate(shares)]
    assert ranking.warnings(ranking.rank(entries)) == told
    rows = csv.DictReader(io.StringIO(ranking.results_csv(ranking.rank(entries))))
    assert [row["others_share"] for row in rows] == ["unknown" if one is None else str(one) for one in shares]


def test_a_single_run_reports_the_share_that_other_processes_took() -> None:
    result = made_at("a", "2026-11-22 10:00", others=0.48).result
    assert ranking.load_text(result or {}) == "other processes took 48 % of the cores while this was measured"
    assert ranking.load_text({}) is None


def test_points_with_different_data_cause_a_warning() -> None:
    same = ranking.rank([make_entry("a", 100), make_entry("b", 90)])
    assert ranking.warnings(same) == []
    other = ranking.rank([make_entry("a", 100), make_entry("b", 90, data_hash="beef")])
    (warning,) = ranking.warnings(other)
    assert "data hash" in warning
    assert "beef: b" in warning


def test_points_with_different_tokens_per_step_cause_a_warning_about_losses_only() -> None:
    (other := make_entry("b", 90)).result["batch"]["tokens_per_step"] *= 2  # type: ignore[index]
    told = "the points differ in tokens a step, so their losses do not compare (tokens/s do): 2,048: a; 4,096: b"
    assert ranking.warnings(ranking.rank([make_entry("a", 100), other])) == [told]


def test_a_failed_point_is_a_row_and_its_reason_is_reported() -> None:
    ranked = ranking.rank([make_entry("a", 100), FAILED])
    table = ranking.table(ranked)
    assert table.rows[1][1:3] == ("stage3", "error")
    assert all(len(row) == len(table.header) for row in table.rows)
    page = ranking.report_md("2026_zero", ranked)
    assert "stage3: error: rank 1 was killed by SIGKILL" in page
    assert ranking.rule(ranking.DEFAULT_METRIC) in page


def test_the_csv_has_one_row_for_each_point_and_units_in_its_column_names() -> None:
    text = ranking.results_csv(ranking.rank([make_entry("a", 100.125), FAILED]))
    good, bad = csv.DictReader(io.StringIO(text))
    assert float(good["tokens_per_second_median"]) == 100.125
    assert float(good["backward_ms"]) == 61.0
    assert good["command"] == f"{program()} zero=a"
    assert (bad["state"], bad["tokens_per_second_median"]) == ("error", "")


def test_the_next_command_measures_the_winner_longer_or_runs_the_failed_point_alone() -> None:
    assert ranking.next_after_sweep(ranking.rank([make_entry("a", 100)])) == f"{program()} zero=a measure=standard"
    assert ranking.next_after_sweep(ranking.rank([FAILED])) == f"{program()} zero=stage3"
    line = ranking.longer(("zero=stage2", "measure.steps=3", "output=a b"), evaluates=False)
    assert line == f"{program()} zero=stage2 'output=a b' measure=standard"


def test_missing_steps_of_a_learning_curve_cause_a_warning() -> None:
    entry = make_entry("stage1", 100)
    assert entry.result is not None
    entry.result["loss"] |= {"first": None, "missing_steps": [[1, 5], [7, 7], [9, 10]]}
    missing = "the losses of steps 1 to 5, 7 and 9 to 10 are missing"
    assert ranking.warnings(ranking.rank([entry])) == [f"stage1: {missing} from the record of the earlier attempt"]
