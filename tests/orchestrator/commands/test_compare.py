"""`compare` and `report --against` tell a program whether a sweep became slower than another."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from points import STUB
from sweep_runs import points

from orchestrator import cli
from orchestrator.commands.sweep import SweepRequest, run_quietly
from orchestrator.exit_codes import BAD_USAGE, FAILED, INCOMPLETE, OK
from orchestrator.machine import hardware
from orchestrator.planning.point import Point
from orchestrator.records import sweep_record
from orchestrator.records.record_file import require_json, write_json_atomic
from orchestrator.records.sweep_record import SweepPaths
from orchestrator.report import sweep_table
from orchestrator.text.paths import verb

HERE = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def scene(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parents[1])]))
    monkeypatch.setenv("ZLAB_LOCKS", str(tmp_path / "locks"))
    monkeypatch.setenv("STUB_STEP_S", "0.0")


def swept(output: Path, *, rounds: int = 3, slower: float = 1.0) -> SweepPaths:
    """A sweep of one point, whose recorded steps are that much slower."""
    (point,) = points(output, [1])
    point = replace(point, config=replace(point.config, measure=replace(point.config.measure, rounds=rounds)))
    request = SweepRequest("batch", (point,), ("sweeps=batch",), predicts=False, entry=STUB)
    sweep = run_quietly(request, hardware.detect())
    (standing,) = sweep_record.standings(sweep)
    assert standing.attempt is not None
    result = require_json(standing.attempt.result)
    for one in result["rounds"]:
        one["step_ms"] = [slower * ms for ms in one["step_ms"]]
    write_json_atomic(standing.attempt.result, result)
    return sweep


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = cli.main(list(words))
    return code, capsys.readouterr().out


def test_a_slower_sweep_is_found_from_its_folder_its_name_and_its_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = swept(tmp_path / "a"), swept(tmp_path / "b", slower=1.06)
    output = str(tmp_path / "b")
    code, text = told(capsys, "compare", str(before.root), "last", "--output", output)
    assert (code, "worse: micro1 (slower)" in text) == (FAILED, True)
    code, text = told(capsys, "compare", after.name, str(before.root), "--output", output, "--json")
    assert (code, json.loads(text)["points"][0]["judgement"]) == (OK, "faster")
    code, text = told(capsys, "compare", str(before.root), after.name, "--output", output, "--threshold", "20 %")
    assert (code, "no regression of 20 %" in text) == (OK, True)
    code, text = told(capsys, "report", "--output", str(tmp_path / "a"), "--json")
    assert code == OK
    document = tmp_path / "base.json"
    document.write_text(text)
    code, text = told(capsys, "report", "--output", output, "--against", str(document))
    assert (code, "worse: micro1 (slower)" in text) == (FAILED, True)
    code, text = told(capsys, "report", "--output", output, "--against", str(document), "--json")
    assert (code, json.loads(text)["against"]["regressions"]) == (FAILED, ["micro1"])


@pytest.mark.full
def test_points_of_one_sweep_are_compared_by_a_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = [
        replace(one, config=replace(one.config, measure=replace(one.config.measure, rounds=3)))
        for one in points(tmp_path, [1, 2])
    ]
    run_quietly(SweepRequest("batch", made, ("sweeps=batch",), predicts=False, entry=STUB), hardware.detect())
    words = ["compare", "--output", str(tmp_path), "--json"]
    code, text = told(capsys, *words, "--by", "batch")
    assert (code, json.loads(text)["before"]) == (OK, "the first batch")
    ((label, settings),) = [(one["label"], one["settings"]) for one in json.loads(text)["points"]]
    assert (label, settings[0]) == ("micro2", "batch.micro: 1 -> 2")
    for wrong in (["--by", "bath"], ["last", "last", "--by", "batch"], []):
        assert told(capsys, *words, *wrong)[0] == BAD_USAGE


def test_two_checkouts_take_turns_and_the_next_command_compares_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (point,) = points(tmp_path, [1])
    measured = replace(point.config, measure=replace(point.config.measure, rounds=3))
    made = [
        Point(label, replace(measured, resources=replace(measured.resources, code=code)), (f"resources.code={code}",))
        for label, code in (("here", None), ("there", str(HERE.parents[1])))
    ]
    sweep = run_quietly(SweepRequest("batch", made, ("sweeps=batch",), predicts=False, entry=STUB), hardware.detect())
    standings = sweep_record.standings(sweep)
    assert [one.state.value for one in standings] == ["ok", "ok"]
    assert ["code" in one.planned.contents for one in standings] == [False, True]
    row = sweep_table.next_row(sweep, standings, runs=False)
    assert row.text == f"{verb('compare', sweep.root)} --by resources.code"
    code, text = told(capsys, "compare", sweep.name, "--by", "resources.code", "--output", str(tmp_path))
    assert (code, "resources.code: None -> " in text) == (OK, True)


def test_one_round_is_no_comparison_and_wrong_words_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = swept(tmp_path / "a", rounds=1)
    words = ["compare", str(sweep.root), "last", "--output", str(tmp_path / "a")]
    code, text = told(capsys, *words)
    assert (code, "not judged: both sides need at least 3 rounds" in text) == (INCOMPLETE, True)
    for wrong in (["--threshold", "0"], ["--threshold", "5 per cent"]):
        assert told(capsys, *words, *wrong)[0] == BAD_USAGE
    assert told(capsys, "compare", "nothing", "--output", str(tmp_path / "a"))[0] == BAD_USAGE
