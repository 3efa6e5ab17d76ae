"""A comparison names the fastest of the rows that did the same work, at the same batch and at their limits."""

from __future__ import annotations

import csv
import io
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from made_comparison import ROWS, SAME_BATCH, Row, write_comparison

from orchestrator.records.run_state import RunState
from orchestrator.records.sweep_record import SweepPaths, standings
from orchestrator.report import cautions, changes, comparison, extras, named_apart, ranking, sweep_files, sweep_table
from orchestrator.report.ranking import Ranked
from orchestrator.tracking import names
from orchestrator.tracking.sweep_runs import SweepRuns
from orchestrator.wings.engines import columns, section
from orchestrator.wings.engines.places import AT_ITS_LIMIT, AT_SAME_BATCH
from orchestrator.wings.page.report_points import points_of

PLAIN = Row("plain", "plain", 0, speed=2.0)
OURS = Row("ours", "zero", 2)
DDP = Row("ddp", "ddp", 0, speed=1.3)
OTHER_MOMENTS = DDP._replace(moments="bf16")
FAR = DDP._replace(off=1e-3)
LIMIT = [
    Row("ours-limit", "zero", 3, speed=1.1, at_limit=True),
    Row("ddp-limit", "ddp", 0, speed=1.2, at_limit=True),
    Row("fsdp2-limit", "fsdp2", 2, at_limit=True, fails=RunState.oom),
]
REFERENCE = {"plain": "the reference"}
ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> SweepPaths:
    sweep = write_comparison(tmp_path_factory.mktemp("comparison"))
    comparison.write(sweep)
    return sweep


def ranked_of(folder: Path, rows: Sequence[Row]) -> list[Ranked]:
    return comparison.ranked(write_comparison(folder, rows))


# Rows, how the answer begins, and the rows that have no place with the beginning of the reason.
ANSWERS: dict[str, tuple[Sequence[Row], str, dict[str, str]]] = {
    "another engine wins": ([PLAIN, OURS, DDP], "fastest: ddp", REFERENCE),
    "no win by other work": ([PLAIN, OURS, OTHER_MOMENTS], "fastest: ours", {**REFERENCE, "ddp": "≠ moments in bf16"}),
    "no tie with other work": (
        [PLAIN, OURS, OTHER_MOMENTS._replace(speed=1.0)],
        "fastest: ours",
        {**REFERENCE, "ddp": "≠ moments in bf16"},
    ),
    "a loss that is too far": ([PLAIN, OURS, FAR], "fastest: ours", {**REFERENCE, "ddp": "≠ loss off by"}),
    "a tie across engines": ([PLAIN, OURS, DDP._replace(speed=1.0)], "fastest: a tie of ours, ddp", REFERENCE),
    "without a reference": ([OURS, DDP], "fastest: ddp", {}),
    "nobody": ([PLAIN, FAR], "no point has a place: plain (the reference), ddp (≠ l", {**REFERENCE, "ddp": "≠ loss"}),
    "two winners": (
        [PLAIN, OURS, DDP._replace(speed=0.5), *LIMIT],
        "at the same batch: fastest: ours; at its own limit: fastest: ddp-limit",
        REFERENCE,
    ),
    "the limit alone": (LIMIT, "at its own limit: fastest: ddp-limit", {}),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_the_answer_names_the_fastest_of_those_that_did_the_same_work(tmp_path: Path, name: str) -> None:
    rows, answer, apart = ANSWERS[name]
    ranked = ranked_of(tmp_path, rows)
    assert re.match(rf"{re.escape(answer)}($|;|[^,])", ranking.conclusion(ranked))
    reasons = {row.entry.label: row.apart for row in ranked if row.apart}
    assert reasons.keys() == apart.keys()
    assert all(reasons[label].startswith(reason) for label, reason in apart.items())
    assert all(row.place is None and not row.tied for row in ranked if row.apart)


def test_a_row_without_a_place_is_last_of_those_measured_and_has_no_share_of_the_best(tmp_path: Path) -> None:
    ranked = ranked_of(tmp_path, [PLAIN, OTHER_MOMENTS, OURS])
    assert [row.entry.label for row in ranked] == ["ours", "plain", "ddp"]
    table = ranking.table(ranked)
    assert [row[table.header.index("vs best")] for row in table.rows] == ["best", "-", "-"]
    assert [row[table.header.index("work")] for row in table.rows] == ["=", "reference", "≠ moments in bf16"]
    assert cautions.without_place(ranked) == ["without a place: plain (the reference), ddp (≠ moments in bf16)"]
    assert named_apart.lines(ranked) == [], "one row with a place is no choice"
    assert cautions.warnings(ranked) == [], "that the reference has another number of ranks is no fault of the others"


def test_percentages_of_memory_compare_what_is_one_thing_and_a_comparison_without_a_reference_says_so(
    tmp_path: Path,
) -> None:
    sweep = write_comparison(tmp_path, [OURS, DDP])
    ranked = comparison.ranked(sweep)
    (memory,) = section.figures(points_of(sweep, ranked))  # no distances from plain PyTorch
    notes = [text.get_text() for text in memory.picture.axes.texts]
    assert notes == ["20.0 MiB", "16.0 MiB"], "resident memory is no prediction of tensors"
    (note,) = extras.places().notes([row.entry for row in ranked])
    assert note.startswith("no plain PyTorch was run: work is compared with that of ours, in wider bounds, and whether")


def test_each_table_has_its_own_places_and_shows_what_did_not_fit(whole: SweepPaths) -> None:
    ranked = comparison.ranked(whole)
    found = ranking.tables(ranked)
    assert list(found) == [AT_SAME_BATCH, AT_ITS_LIMIT]
    assert [len(table.rows) for table in found.values()] == [len(SAME_BATCH), len(ROWS) - len(SAME_BATCH)]
    assert [row[:3] for row in found[AT_ITS_LIMIT].rows] == [
        ("1", "deepspeed-stage3-bf16-at_limit", "10,400"),
        ("2", "zero-stage3-bf16-at_limit", "9,600"),
        ("-", "ddp-bf16-at_limit", "oom"),
    ]
    assert {row[0] for row in found[AT_SAME_BATCH].rows if "ddp" in row[1] or "plain" in row[1]} == {"-"}
    assert all(line.startswith(("at the same batch: ", "at its own limit: ")) for line in named_apart.lines(ranked))
    peaks = [line for line in named_apart.lines(ranked) if "smallest peak" in line]
    assert peaks[1] == "at its own limit: smallest peak: deepspeed-stage3-bf16-at_limit, 14.0 MiB above its start"


def test_the_report_has_both_tables_the_work_the_messages_and_the_settings(whole: SweepPaths) -> None:
    text = whole.report.read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)", text, re.MULTILINE)
    assert headings[:3] == ["At the same batch", "At its own limit", "Pictures"]
    assert headings[3:6] == ["The same work", "Messages of a step", "Bytes by dtype"]
    assert "Engine deepspeed" in headings
    assert "versions: torch=2.13.0+cu130 deepspeed=0.19.8" in text
    assert text.count("releases nothing after a forward") == 1
    pictures = set(re.findall(r"\(pictures/(\w+)\.svg\)", text))
    assert {"distance", "engine_memory"} <= pictures
    assert all((whole.pictures / f"{name}.svg").is_file() for name in pictures)
    assert "| ddp-fp32 | ddp (torch 2.13.0) | ≠ moments in bf16; 2 more |" in text


def test_the_page_has_both_tables_and_a_section_for_the_engines(whole: SweepPaths) -> None:
    page = whole.page.read_text(encoding="utf-8")
    assert re.findall(r'scope="rowgroup" colspan="\d+">([^<]*)<', page) == [AT_SAME_BATCH, AT_ITS_LIMIT]
    assert '<section id="engines">' in page
    assert all(f'<figure id="{name}">' in page for name in ("distance", "engine_memory"))


def test_the_numbers_have_the_engine_and_its_work(whole: SweepPaths) -> None:
    text = sweep_files.results_csv(comparison.ranked(whole))
    found = {row["label"]: row for row in csv.DictReader(io.StringIO(text))}
    assert found["ddp-fp32"]["work"].startswith("≠ moments in bf16; loss off by ")
    assert [found["plain-bf16"][name] for name in ("engine", "work", "place")] == ["plain", "reference", ""]
    assert found["deepspeed-stage1-bf16"]["engine_versions"] == "torch=2.13.0+cu130 deepspeed=0.19.8"
    assert found["ddp-bf16-at_limit"]["at_limit"] == "True"
    assert found["zero-stage2-fp32"]["peak_above_start_bytes"] == str(16 << 20)


def test_programs_and_mlflow_are_told_both_winners_and_why_a_row_has_no_place(whole: SweepPaths) -> None:
    told = sweep_table.document(whole, standings(whole))
    assert '"apart": "the reference", "table": "at the same batch"' in told
    runs = SweepRuns.__new__(SweepRuns)
    runs._sweep = whole
    best = runs._facts()[names.BEST]
    assert best.endswith("; at its own limit: deepspeed-stage3-bf16-at_limit")
    assert "ddp" not in best


def test_the_next_command_exports_the_winner(tmp_path: Path) -> None:
    ranked = ranked_of(tmp_path, [PLAIN, OURS, DDP])
    command, _, folder = ranking.next_after_sweep(ranked).partition(" export ")
    assert command.endswith("run.py")
    assert Path(folder).absolute() == Path(ranked[0].entry.folder)
    reference_first = [replace(ranked[0], place=None, apart="the reference"), *ranked]
    assert ranking.next_after_sweep(reference_first) == f"{command} export {folder}"


def test_compare_judges_no_pair_whose_work_differs(tmp_path: Path) -> None:
    ranked = ranked_of(tmp_path, [PLAIN, OURS, OTHER_MOMENTS, Row("fsdp2", "fsdp2", 2, speed=0.5)])
    points = {
        row.entry.label: changes.Measured("ours", "", row.entry.config, row.entry.result, row.entry.state, row.apart)
        for row in ranked
    }
    judged = {other: changes.changes([points["ours"]], [points[other]], 0.05, ("a", "b")) for other in ("ddp", "fsdp2")}
    assert [one.judgement.value for one in judged["fsdp2"].points] == ["slower"]
    assert [one.judgement.value for one in judged["ddp"].points] == ["not judged"]
    assert changes.conclusion(judged["ddp"]) == "not judged: the work differs"
    assert "not judged, because the work differs: ours: ≠ moments in bf16" in changes.notes(judged["ddp"])


def test_a_single_run_says_its_engine_settings_and_notes(whole: SweepPaths) -> None:
    entry = next(row.entry for row in comparison.ranked(whole) if row.entry.label == "deepspeed-stage3-fp32")
    assert entry.result is not None
    told = {row.name.strip(): row.text for row in columns.rows(entry.result, entry.config)}
    assert told["engine"] == "deepspeed, torch 2.13.0+cu130, deepspeed 0.19.8"
    assert told["settings"] == "zero_optimization.stage=3 gradient_clipping=0.0"
    assert told["note"].startswith("below 1e9 live parameters")
    assert extras.places().notes([entry]) == [f"deepspeed: {told['note']}"]


def test_other_sweeps_are_as_before(tmp_path: Path) -> None:
    sweep = write_comparison(tmp_path, [OURS, OURS._replace(label="slower", stage=3, speed=0.5)])
    ranked = comparison.ranked(sweep)
    entries = [row.entry for row in ranked]
    assert ranking.conclusion(ranked) == "fastest: ours"
    assert (columns.columns(entries), columns.cells(entries[0], entries), extras.places().notes(entries)) == (
        [],
        {},
        [],
    )
    points = points_of(sweep, ranked)
    assert (section.section(points), section.markdown(points, "pictures"), section.figures(points)) == ("", [], [])
    assert list(ranking.tables(ranked)) == [""]


def test_a_row_whose_work_was_not_counted_has_no_place(tmp_path: Path) -> None:
    entries = [row.entry for row in ranked_of(tmp_path, [PLAIN, OURS, DDP])]
    old: dict[str, Any] = {name: value for name, value in (entries[0].result or {}).items() if name != "work"}
    again = ranking.rank([replace(entries[0], result=old), *entries[1:]])
    assert {row.entry.label: row.apart[:1] for row in again if row.apart} == {"ddp": "?", "plain": "t"}
    assert ranking.conclusion(again) == "fastest: ours"


@pytest.mark.full
def test_a_cut_of_the_shipped_sweep_has_equal_work_in_every_row(tmp_path: Path) -> None:
    """The real engines, DeepSpeed where it is installed; tests/house/test_conf.py composes the whole sweep."""
    engines = ["zero", "fsdp2", "ddp", *(["deepspeed"] if find_spec("deepspeed") else [])]
    words = (
        *("sweeps=engines", f"engine={','.join(engines)}", "zero=stage0,stage2", "precision=bf16"),
        # auto is fp32 on a processor without products in bf16, where FSDP2 and DeepSpeed compute in bf16 all the same.
        "precision.compute=bf16",
        *("batch.at_limit=false", "batch.global_size=8", "batch.seq=32", "measure=quick", "measure.steps=15"),
        *("resources.device=cpu", "resources.ranks=2", "resources.threads=1", "data=synthetic", "tracking=none"),
        *("model=llama_tiny", f"output={tmp_path}"),
    )
    done = subprocess.run([sys.executable, "run.py", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (numbers,) = tmp_path.glob("sweeps/*/results.csv")
    found = {row["label"]: row["work"] for row in csv.DictReader(io.StringIO(numbers.read_text(encoding="utf-8")))}
    assert len(found) == 1 + len(engines) * 2 - 2
    assert set(found.values()) == {"=", "reference"}, found
