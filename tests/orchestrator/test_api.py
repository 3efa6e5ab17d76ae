"""Runs and sweeps started from Python behave as on the command line and return their records, best first."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from points import STUB
from sweep_runs import points

import orchestrator
from orchestrator.api import Refusal
from orchestrator.commands.sweep import SweepRequest
from orchestrator.machine import hardware
from orchestrator.planning.predictor import predictor
from orchestrator.records.run_state import RunState
from orchestrator.wings.predict import prediction
from orchestrator.wings.predict.point_prediction import PointPrediction
from zero_runtime.state_bytes import StateBytes

HERE = Path(__file__).parent


@pytest.fixture
def stubbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The words that each call passes to the command line; the points run the stub worker instead."""
    typed: list[list[str]] = []

    def request(words: list[str]) -> tuple[SweepRequest, hardware.Hardware]:
        typed.append(words)
        count = 1 if words == ["-m", "zero=stage2"] else 2
        found = points(tmp_path, [1, 4][:count])
        return SweepRequest("api", found, tuple(words), predicts="--predicts" in words, entry=STUB), hardware.detect()

    monkeypatch.setattr("orchestrator.api.sweep_request", request)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parents[1])]))
    monkeypatch.setenv("STUB_LACKING_MICRO", "4")
    return typed


def test_a_sweep_returns_one_record_per_point_with_measured_points_first(stubbed: list[list[str]]) -> None:
    records = orchestrator.sweep("batch.micro=1,4", "-m")
    assert stubbed == [["-m", "batch.micro=1,4"]]
    assert [(one.label, one.state) for one in records] == [("micro1", RunState.ok), ("micro4", RunState.oom)]
    assert records[0].tokens_per_second == 9812.0
    assert records[0].folder is not None
    assert (records[0].folder / "result.json").exists()
    assert (records[1].result, records[1].tokens_per_second) == (None, None)
    assert "out of memory" in records[1].message


def test_a_run_returns_one_record_and_is_cached_when_repeated(stubbed: list[list[str]]) -> None:
    assert orchestrator.run("zero=stage2").state is RunState.ok
    assert orchestrator.run("zero=stage2").state is RunState.cached


def test_a_run_that_cannot_fit_is_a_pruned_record_with_what_would_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = PointPrediction(StateBytes(2, 2, 2, 0), 5, remedies=("zero=stage3",), advised=True)
    monkeypatch.setattr(prediction, "predictions", lambda points, *_, **__: {point.label: large for point in points})
    record = orchestrator.run("zero=stage1", "resources.device=cpu", "tracking=none", f"output={tmp_path}")
    assert (record.state, record.result, record.folder) == (RunState.pruned, None, None)
    assert record.message == "the model states alone, 6 B, are more than 5 B; would fit: zero=stage3"


def test_files_are_private_to_the_user_and_the_callers_umask_is_restored(
    stubbed: list[list[str]], tmp_path: Path
) -> None:
    before = os.umask(0o022)
    try:
        (record,) = orchestrator.sweep("zero=stage2")
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
    assert record.folder is not None
    written = [path for path in tmp_path.rglob("*") if not path.is_symlink()]
    assert {"sweep.json", "plan.json", "report.md", "results.csv", "result.json"} <= {path.name for path in written}
    assert [path for path in written if path.stat().st_mode & 0o077] == []


def test_invalid_words_raise_a_refusal() -> None:
    with pytest.raises(Refusal, match="Did you mean 'stage2'"):
        orchestrator.sweep("zero=stge2")
    with pytest.raises(Refusal, match=r"batch\.global_size must be a multiple"):
        orchestrator.run("batch.global_size=7")


def test_a_sweep_displays_itself_as_its_table_and_turns_into_a_frame(stubbed: list[list[str]]) -> None:
    records = orchestrator.sweep("batch.micro=1,4")
    header, first, second, conclusion = repr(records).splitlines()
    assert header.split()[:2] == ["place", "point"]
    assert first.split()[1:3] == ["micro1", "9,812"]
    assert "oom" in second
    assert conclusion == records.conclusion
    assert records._repr_html_().startswith("<table><tr><th")
    frame = records.to_frame()
    assert list(frame["label"]) == ["micro1", "micro4"]
    assert frame["tokens_per_second_median"][0] == 9812.0
    assert (records.folder / "results.csv").is_file()


def test_progress_is_shown_on_stderr_if_asked_for(stubbed: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    orchestrator.sweep("batch.micro=1,4", progress=True)
    told = capsys.readouterr()
    assert told.out == ""
    assert "micro1: ok  9,812 tokens/s" in told.err
    orchestrator.sweep("batch.micro=1,4")  # stderr is no terminal here
    assert capsys.readouterr() == ("", "")


def test_a_plan_starts_nothing_and_displays_its_decisions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stubbed: list[list[str]]
) -> None:
    found = orchestrator.plan("batch.micro=1,4")
    assert stubbed == [["-m", "--plan", "batch.micro=1,4"]]
    assert [(point.label, point.decision) for point in found] == [
        ("micro1", RunState.queued),
        ("micro4", RunState.queued),
    ]
    assert "micro1  to run" in repr(found)
    assert "<td" in found._repr_html_()
    assert list(found.to_frame()["decision"]) == ["to run", "to run"]
    assert not (tmp_path / "sweeps").exists()


def test_a_plan_says_on_stderr_how_far_a_long_count_is(
    monkeypatch: pytest.MonkeyPatch, stubbed: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    def predict(points: object, tell: Callable[[str], None] | None = None, **settings: object) -> dict[str, object]:
        assert tell is not None
        tell("counting without running: 0 of 2 models and activations")
        return {}

    monkeypatch.setattr(predictor(), "predict", predict)
    monkeypatch.setattr(predictor(), "problems", lambda points: {})
    orchestrator.plan("batch.micro=1,4", "--predicts")
    assert capsys.readouterr() == ("", "counting without running: 0 of 2 models and activations\n")


def test_without_pandas_to_frame_says_what_to_do(stubbed: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        orchestrator.plan("batch.micro=1,4").to_frame()


@pytest.mark.parametrize(
    ("word", "told"),
    [("zero=stage1,stage2 measure.steps=4", "one word a string"), (["zero=stage1"], "for a list, sweep(*words)")],
)
def test_what_is_no_word_is_refused_with_what_to_write(word: str, told: str) -> None:
    with pytest.raises(Refusal, match=re.escape(told)):
        orchestrator.plan(word)


def test_the_package_lists_what_can_be_called_and_nothing_else() -> None:
    assert {name for name in dir(orchestrator) if not name.startswith("__")} == set(orchestrator.__all__)
