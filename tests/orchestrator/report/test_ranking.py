from __future__ import annotations

import csv
import io
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from points import make_config
from stub_worker import make_result

from orchestrator.report import cautions, ranking, summary, sweep_files
from orchestrator.report.entry import Entry
from orchestrator.report.narrow import narrowed
from orchestrator.text.paths import program

CONFIG = make_config(Path("outputs"))


def make_entry(
    label: str,
    median: float,
    *,
    data_hash: str = "c0ffee",
    rounds: Sequence[float] = (0.99, 0.995, 1.0, 1.0, 1.005, 1.01),
    session: str | None = "a sweep",
) -> Entry:
    """A point with this speed. rounds: the speed of each round, relative to it."""
    result = make_result(CONFIG, median)
    result["data"]["hash"] = data_hash
    speed = {"median": median, "p10": 0.9 * median, "p90": 1.1 * median}
    result["throughput"]["tokens_per_second"] = speed
    tokens = result["batch"]["tokens_per_step"]
    result["rounds"] = [
        {"number": number, "began": 0.0, "step_ms": [1e3 * tokens / (median * share)], "others_share": 0.0}
        for number, share in enumerate(rounds, start=1)
    ]
    result["session"] = session
    return Entry(label, "ok", result, overrides=(f"zero={label}", "sweeps=stages"))


FAILED = Entry("stage3", "error", None, "rank 1 was killed by SIGKILL", overrides=("zero=stage3",))
LACKING = Entry("stage0", "oom")


def order(*entries: Entry) -> list[tuple[str, int | None, bool]]:
    return [(one.entry.label, one.place, one.tied) for one in ranking.rank(entries)]


def test_the_fastest_point_is_first_and_failed_points_are_last() -> None:
    found = order(FAILED, make_entry("stage1", 100), make_entry("stage0", 200))
    assert found == [("stage0", 1, False), ("stage1", 2, False), ("stage3", None, False)]


def test_rows_that_their_rounds_do_not_tell_apart_from_the_first_of_their_group_are_ties() -> None:
    # In each round b is 0.5 % slower than a, and c 1.3 %: nobody chooses between a and b. That c is near b is no chain.
    found = order(make_entry("a", 100), make_entry("b", 99.5), make_entry("c", 98.7), make_entry("d", 50))
    assert found == [("a", 1, False), ("b", 1, True), ("c", 3, False), ("d", 4, False)]


def test_points_that_took_turns_are_told_apart_although_the_machine_changed_between_rounds() -> None:
    weather = (0.6, 1.0, 1.5, 0.8, 1.2, 1.0)
    one, other = make_entry("a", 100, rounds=weather), make_entry("b", 95, rounds=weather)
    assert order(one, other) == [("a", 1, False), ("b", 2, False)]
    apart = make_entry("b", 95, rounds=weather, session="another sweep")
    assert order(one, apart) == [("a", None, False), ("b", None, False)], "they shared no rounds"


UNSTEADY = (1.2, 1.0, 1.2, 1.0, 1.2, 1.0)


def test_rows_that_their_rounds_do_not_judge_have_no_place_and_others_keep_theirs() -> None:
    entries = make_entry("a", 100), make_entry("b", 90, rounds=UNSTEADY), make_entry("c", 100), make_entry("d", 50)
    assert order(*entries) == [("a", None, False), ("c", None, False), ("b", None, False), ("d", 4, False)]
    last = make_entry("e", 45, rounds=UNSTEADY)
    assert order(make_entry("a", 100), entries[3], last)[:1] == [("a", 1, False)]
    found = ranking.rank([make_entry("a", 100), entries[3], last])
    assert [(row.place, row.may_be) for row in found] == [(1, None), (None, 2), (None, 2)]
    (told,) = cautions.without_place(found)
    assert re.fullmatch(r"without a place: d, e \(these rounds would show .* only; \d+ more rounds show 5 %\)", told)


@pytest.mark.parametrize(
    ("speed", "first", "second", "places"),
    [
        (99.6, (0.999, 1.0, 1.001), (0.999, 1.0, 1.001), [1, 2]),  # nobody would choose by 0.4 %
        (89.0, (1.0, 0.97, 0.97), (0.97, 1.0, 1.05), [None, None]),  # too little to say slower, and no tie either
        (99.5, (0.995, 1.0, 1.005), (0.995, 1.0, 1.005), [1, 1]),
    ],
)
def test_rows_whose_ranges_lie_apart_are_no_tie(
    speed: float, first: Sequence[float], second: Sequence[float], places: list[int | None]
) -> None:
    found = order(make_entry("a", 100, rounds=first), make_entry("b", speed, rounds=second))
    assert found == [("a", places[0], False), ("b", places[1], places == [1, 1])]


ORDERS = {"a": (0.97, 1.0, 1.03), "b": (1.0, 1.03, 0.97)}


@pytest.mark.parametrize(("times", "is_judged"), [(2, False), (3, True)])
def test_as_many_more_rounds_as_are_proposed_show_what_is_asked(times: int, is_judged: bool) -> None:
    """Three more than six are proposed, see test_a_tie_names_no_winner_and_says_so."""
    found = order(*(make_entry(label, 100, rounds=times * each) for label, each in ORDERS.items()))
    assert [tied for _, _, tied in found] == [False, is_judged]


def test_the_next_command_measures_as_many_rounds_as_judge_the_rows() -> None:
    entries = [make_entry(label, 100, rounds=2 * each) for label, each in ORDERS.items()]
    measure = {"measure": {"steps": 60, "rounds": 6}}
    ranked = ranking.rank([replace(entry, config=measure) for entry in entries])
    found = ranking.with_more_rounds(["-m", "zero=stage0,stage1", "measure=standard", "measure.steps=60"], ranked)
    assert found == ["-m", "zero=stage0,stage1", "measure=standard", "measure.rounds=9", "measure.steps=90"]


def test_speeds_of_fewer_than_three_rounds_have_no_place_and_no_winner() -> None:
    ranked = ranking.rank([make_entry("a", 100, rounds=(1.0,)), make_entry("b", 50, rounds=(1.0,)), LACKING])
    assert [(row.entry.label, row.place) for row in ranked] == [("a", None), ("b", None), ("stage0", None)]
    assert ranking.conclusion(ranked) == (
        "not ranked: each point was measured in 1 round, and differences between speeds show from 3; "
        "measure=standard has more"
    )
    table = ranking.table(ranked)
    assert table.header[3] == "p10-p90"
    assert table.rows[0][:4] == ("-", "a", "100", "90.0-110")


def test_a_result_without_rounds_is_a_row_without_a_place_beside_ranked_ones() -> None:
    (unrounded := make_entry("old", 200)).result.pop("rounds")  # type: ignore[union-attr]
    ranked = ranking.rank([unrounded, make_entry("a", 100), make_entry("b", 50)])
    assert [(row.entry.label, row.place) for row in ranked] == [("old", None), ("a", 1), ("b", 2)]
    assert ranking.conclusion(ranked) == "fastest: a"
    assert ranking.table(ranked).rows[0][3] == "-"


def test_exact_values_are_ranked_without_rounds_and_tie_only_if_they_are_equal() -> None:
    entries = [make_entry(label, 100, rounds=(1.0,)) for label in "abc"]
    for entry, loss in zip(entries, (2.0, 1.0, 2.0), strict=True):
        assert entry.result is not None
        entry.result["loss"]["last"] = loss
    found = [(row.entry.label, row.place, row.tied) for row in ranking.rank(entries, "loss_last")]
    assert found == [("b", 1, False), ("a", 2, False), ("c", 2, True)]


def test_the_ranking_does_not_depend_on_the_order_of_the_columns() -> None:
    entries = [make_entry("slow", 100), make_entry("fast", 200)]
    shuffled = [Entry(one.label, "ok", dict(reversed((one.result or {}).items()))) for one in entries]
    assert order(*shuffled) == order(*entries)


def test_a_tie_names_no_winner_and_says_so() -> None:
    tied = ranking.rank([make_entry("a", 100), make_entry("b", 100.5)])
    assert ranking.conclusion(tied) == "fastest: a tie of b, a"
    noisy = ranking.rank([make_entry(label, 100, rounds=2 * each) for label, each in ORDERS.items()])
    # Logarithms of the ratios: -0.030, -0.030 and 0.060, twice; their standard error of 0.019 times t(5; 0.99) = 3.36.
    # With t(6; 0.99) = 3.14, t(7) = 3.00 and t(8) = 2.90 the ninth round is the first to bring it below log(1.05).
    told = (
        "not ranked: these rounds would show differences from 7 % only; 3 more rounds show 5 %; the fastest is one of "
    )
    assert ranking.conclusion(noisy) == f"{told}a, b"
    steady = ranking.rank([make_entry(label, 100, rounds=4 * each) for label, each in ORDERS.items()])
    assert ranking.conclusion(steady) == "fastest: a tie of a, b; a difference of up to 4 % would not show"
    exact = ranking.rank([make_entry("a", 100), make_entry("b", 100)], "loss_last")
    assert ranking.conclusion(exact) == "best by last training loss: a tie of a, b"
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
    assert cautions.reused(ranked) == [line]
    page = sweep_files.report_md("2026_zero", ranked)
    assert line in page
    assert "| 11-21 21:29 |" in page
    first, second = csv.DictReader(io.StringIO(sweep_files.results_csv(ranked)))
    assert (first["label"], first["measured_at"], first["reused"]) == ("old", "2026-11-21 21:29:00", "True")
    assert (second["measured_at"], second["reused"]) == ("2026-11-22 10:00:00", "False")


def test_a_row_of_another_machine_with_the_same_hardware_names_it() -> None:
    old = made_at("old", "2026-11-21 21:29", "cached")
    assert old.result is not None
    old.result["environment"] = {"host": "node7"}
    (line,) = cautions.reused(ranking.rank([made_at("new", "2026-11-22 10:00"), old]))
    assert "old measured 2026-11-21 21:29 on node7, reused. " in line


def test_rows_measured_in_one_session_are_not_marked_as_reused() -> None:
    ranked = ranking.rank([made_at("a", "2026-11-22 10:00"), made_at("b", "2026-11-22 10:01"), FAILED])
    assert ranking.table(ranked).header == ranking.HEADER
    assert cautions.reused(ranked) == []


def test_many_reused_rows_are_counted_in_one_line() -> None:
    ranked = ranking.rank([made_at(f"p{one}", "2026-11-21 21:29", "cached") for one in range(6)])
    (line,) = cautions.reused(ranked)
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
    assert cautions.warnings(ranking.rank(entries)) == told
    rows = csv.DictReader(io.StringIO(sweep_files.results_csv(ranking.rank(entries))))
    assert [row["others_share"] for row in rows] == ["unknown" if one is None else str(one) for one in shares]


def made_over(label: str, backend: str, reason: str | None = "", kind: str = "auto", world: int = 2) -> Entry:
    entry = make_entry(label, 100)
    assert entry.result is not None
    entry.result.update({"backend": backend, "world": world, "device": "cpu", "backend_reason": reason})
    if reason is None:  # a result of an earlier version
        del entry.result["backend_reason"]
    return replace(entry, config={**entry.config, "comm": {"kind": kind}})


@pytest.mark.parametrize(
    ("entries", "over", "told"),
    [
        ([made_over("a", "shm"), made_over("b", "shm")], None, []),
        ([made_over("a", "gloo", None), made_over("b", "gloo", None)], None, []),
        ([made_over("a", "shm", kind="shm"), made_over("b", "gloo", kind="gloo")], ["shm", "gloo"], []),
        ([made_over("a", "gloo", world=1), made_over("b", "gloo", world=1)], None, []),
        (
            [made_over("a", "shm"), made_over("b", "gloo", None)],
            ["shm", "gloo"],
            [
                "ranks with comm=auto sent over gloo, so their speeds do not compare with those of the others: no "
                "reason is known: b"
            ],
        ),
        (
            [made_over("a", "gloo", "Yama"), made_over("b", "gloo", "Yama")],
            None,
            ["ranks with comm=auto sent over gloo: Yama: a, b"],
        ),
    ],
)
def test_rows_over_gloo_in_place_of_shared_reads_are_shown_with_the_reason(
    entries: list[Entry], over: list[str] | None, told: list[str]
) -> None:
    ranked = ranking.rank(entries)
    assert cautions.warnings(ranked) == told
    table = ranking.table(ranked)
    assert ("over" in table.header) == (over is not None)
    if over is not None:
        place = table.header.index("over")
        assert sorted(row[place] for row in table.rows) == sorted(over)
    rows = csv.DictReader(io.StringIO(sweep_files.results_csv(ranked)))
    assert {row["backend_reason"] for row in rows} <= {"", "Yama"}


def test_a_single_run_says_why_it_used_gloo() -> None:
    result = made_over("a", "gloo", "Yama forbids it").result
    assert ", gloo because Yama forbids it, torch" in summary.machine_row(result or {}).text
    assert ", shm, torch" in summary.machine_row(made_over("a", "shm").result or {}).text


def test_a_single_run_reports_the_share_that_other_processes_took() -> None:
    result = made_at("a", "2026-11-22 10:00", others=0.48).result
    assert cautions.load_text(result or {}) == "other processes took 48 % of the cores while this was measured"
    assert cautions.load_text({}) is None


def test_points_with_different_data_cause_a_warning() -> None:
    same = ranking.rank([make_entry("a", 100), make_entry("b", 90)])
    assert cautions.warnings(same) == []
    other = ranking.rank([make_entry("a", 100), make_entry("b", 90, data_hash="beef")])
    (warning,) = cautions.warnings(other)
    assert "data hash" in warning
    assert "beef: b" in warning


def test_points_with_different_tokens_per_step_cause_a_warning_about_losses_only() -> None:
    (other := make_entry("b", 90)).result["batch"]["tokens_per_step"] *= 2  # type: ignore[index]
    told = "the points differ in tokens a step, so their losses do not compare (tokens/s do): 2,048: a; 4,096: b"
    assert cautions.warnings(ranking.rank([make_entry("a", 100), other])) == [told]


def test_a_failed_point_is_a_row_and_its_reason_is_reported() -> None:
    ranked = ranking.rank([make_entry("a", 100), FAILED])
    table = ranking.table(ranked)
    assert table.rows[1][1:3] == ("stage3", "error")
    assert all(len(row) == len(table.header) for row in table.rows)
    page = sweep_files.report_md("2026_zero", ranked)
    assert "stage3: error: rank 1 was killed by SIGKILL" in page
    assert ranking.rule(ranking.DEFAULT_METRIC) in page


def test_the_csv_has_one_row_for_each_point_and_units_in_its_column_names() -> None:
    text = sweep_files.results_csv(ranking.rank([make_entry("a", 100.125), FAILED]))
    good, bad = csv.DictReader(io.StringIO(text))
    assert float(good["tokens_per_second_median"]) == 100.125
    assert float(good["backward_ms"]) == 61.0
    assert good["command"] == f"{program()} zero=a"
    assert (bad["state"], bad["tokens_per_second_median"]) == ("error", "")


def test_the_next_command_measures_the_winner_longer_or_runs_the_failed_point_alone() -> None:
    assert ranking.next_after_sweep(ranking.rank([make_entry("a", 100)])) == f"{program()} zero=a measure=standard"
    assert ranking.next_after_sweep(ranking.rank([FAILED])) == f"{program()} zero=stage3"
    line = ranking.longer(("zero=stage2", "measure.steps=3", "measure.min_s=2", "output=a b"), evaluates=False)
    assert line == f"{program()} zero=stage2 'output=a b' measure=standard"


def test_missing_steps_of_a_learning_curve_cause_a_warning() -> None:
    entry = make_entry("stage1", 100)
    assert entry.result is not None
    entry.result["loss"] |= {"first": None, "missing_steps": [[1, 5], [7, 7], [9, 10]]}
    missing = "the losses of steps 1 to 5, 7 and 9 to 10 are missing"
    assert cautions.warnings(ranking.rank([entry])) == [f"stage1: {missing} from the record of the earlier attempt"]


def test_the_load_of_other_processes_is_a_column_where_it_is_notable() -> None:
    quiet, busy = made_at("a", "2026-11-22 10:00"), made_at("b", "2026-11-22 10:00", others=0.23, median=50)
    assert ranking.table(ranking.rank([quiet])).header == ranking.HEADER
    table = ranking.table(ranking.rank([quiet, busy]))
    assert (table.header[-1], [row[-1] for row in table.rows]) == ("others", ["0 %", "23 %"])


@pytest.mark.parametrize(
    ("median", "then"),
    [(101, "rows of that day can be compared with those of today"), (80, "--fresh measures them again")],
)
def test_an_anchor_says_how_much_rows_of_an_earlier_day_are_off(median: float, then: str) -> None:
    before = made_at("old", "2026-11-21 21:29", median=100)
    assert before.result is not None
    before.result["measured_at"] = before.measured_at
    again = replace(made_at("old", "2026-11-22 10:00", median=median), anchor=before.result)
    kept = made_at("kept", "2026-11-21 21:29", "cached")
    _, line = cautions.reused(ranking.rank([again, kept]))
    assert line.startswith(f"the anchor old is now {median:.1f} % (")
    assert "as fast as on 2026-11-21" in line
    assert line.endswith(then)


def test_results_csv_has_a_column_for_each_setting_that_differs() -> None:
    rows = [("zero=stage1", "batch.micro=2"), ("zero=stage3",)]
    entries = [
        replace(make_entry(f"row{at}", 100 - at), overrides=(*words, "tracking=none"), config={"batch": {"micro": 4}})
        for at, words in enumerate(rows)
    ]
    found = list(csv.DictReader(io.StringIO(sweep_files.results_csv(ranking.rank(entries)))))
    assert [(row["zero"], row["batch.micro"]) for row in found] == [("stage1", "2"), ("stage3", "4")]
    assert "tracking" not in found[0]


def test_the_table_as_text_is_never_cut_and_as_html_is_escaped() -> None:
    found = ranking.table(ranking.rank([make_entry("a" * 200, 100.0), make_entry("<b>", 50.0)]))
    header, *lines = sweep_files.plain(found).splitlines()
    assert "loss last" in header
    assert "a" * 200 in lines[0]
    assert lines[0].index("best") + len("best") == lines[1].index("%") + 1 == header.index("vs best") + len("vs best")
    assert "&lt;b&gt;" in sweep_files.html(found)
    assert "<b>" not in sweep_files.html(found)


def test_the_column_that_sorts_the_rows_is_kept_on_a_narrow_terminal() -> None:
    rows = ranking.rank([make_entry("a", 100.0), make_entry("b", 50.0)], "step_ms")
    assert "step ms" in narrowed(ranking.table(rows), 60).table.header
    by_speed = narrowed(ranking.table(ranking.rank([make_entry("a", 100.0)])), 60)
    assert by_speed.left_out == ("step ms", "states/rank", "sent/step", "loss last")
    table = summary.Table(("point", "tokens/s", "memory", "range"), (("a", "1,000", "32 MiB", "-"),))
    assert narrowed(table._replace(drops=("memory", "range")), 24).left_out == ("range",)  # it says nothing
