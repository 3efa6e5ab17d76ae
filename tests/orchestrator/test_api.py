"""Sweeps from Python: the records of the command line's own way, the best first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from points import STUB
from sweep_runs import points

import orchestrator
from orchestrator.api import Refusal
from orchestrator.commands.sweep import SweepRequest
from orchestrator.machine import hardware
from orchestrator.records.run_state import RunState

HERE = Path(__file__).parent


@pytest.fixture
def stubbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The words that the command line was given; the points are of the worker without torch."""
    typed: list[list[str]] = []

    def request(words: list[str]) -> tuple[SweepRequest, hardware.Hardware]:
        typed.append(words)
        count = 1 if words == ["-m", "zero=stage2"] else 2
        found = points(tmp_path, [1, 4][:count])
        return SweepRequest("api", found, tuple(words), predicts=False, entry=STUB), hardware.detect()

    monkeypatch.setattr("orchestrator.api.sweep_request", request)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parents[1])]))
    monkeypatch.setenv("STUB_LACKING_MICRO", "4")
    return typed


def test_a_sweep_returns_a_record_a_point_the_measured_first(stubbed: list[list[str]]) -> None:
    records = orchestrator.sweep("batch.micro=1,4", "-m")
    assert stubbed == [["-m", "batch.micro=1,4"]]
    assert [(one.label, one.state) for one in records] == [("micro1", RunState.ok), ("micro4", RunState.oom)]
    assert records[0].tokens_per_second == 9812.0
    assert records[0].folder is not None
    assert (records[0].folder / "result.json").exists()
    assert (records[1].result, records[1].tokens_per_second) == (None, None)
    assert "out of memory" in records[1].message


def test_a_run_returns_its_one_record_and_again_what_was_measured(stubbed: list[list[str]]) -> None:
    assert orchestrator.run("zero=stage2").state is RunState.ok
    assert orchestrator.run("zero=stage2").state is RunState.cached


def test_what_is_written_is_the_user_s_alone_and_the_caller_s_umask_comes_back(
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


def test_what_is_wrong_with_the_words_is_raised_and_starts_nothing() -> None:
    with pytest.raises(Refusal, match="Did you mean 'stage2'"):
        orchestrator.sweep("zero=stge2")
    with pytest.raises(Refusal, match=r"batch\.global_size must be a multiple"):
        orchestrator.run("batch.global_size=7")
