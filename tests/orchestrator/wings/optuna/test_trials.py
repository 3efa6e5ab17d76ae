"""Points that a program proposes are run like our own, and the program gets the metric or the error of each."""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from points import STUB

from orchestrator import cli
from orchestrator.commands import sweep as sweep_command
from orchestrator.commands import verbs
from orchestrator.commands.sweep import SweepRequest
from orchestrator.config.strict import Refusal
from orchestrator.machine.hardware import Hardware
from orchestrator.records.run_state import RunState
from orchestrator.records.sweep_record import SweepPaths
from orchestrator.report.screen import Screen
from orchestrator.wings.optuna import trials
from orchestrator.wings.optuna.trials import Asked

HERE = Path(__file__).parents[2]
ROOT = HERE.parents[1]
TINY = ("precision=fp32", "resources.device=cpu", "resources.ranks=1", "resources.threads=1", "tracking=none")
needs_optuna = pytest.mark.skipif(
    importlib.util.find_spec("optuna") is None, reason="needs the extra `optuna`, which `dev` has"
)


@pytest.fixture(autouse=True)
def scene(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(ROOT)]))
    monkeypatch.setenv("STUB_STEP_S", "0.0")


def speed(stage: int) -> float:
    """The tokens/s that the stub worker reports."""
    return 9412.0 + 100 * stage**2


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> list[SweepRequest]:
    """Makes points run the stub worker; the list receives the request of each sweep."""
    asked: list[SweepRequest] = []
    run_quietly = sweep_command.run_quietly

    def run(request: SweepRequest, hardware: Hardware, screen: Screen | None = None) -> SweepPaths:
        asked.append(request)
        return run_quietly(replace(request, entry=STUB, predicts=False), hardware, screen)

    monkeypatch.setattr(sweep_command, "run_quietly", run)
    return asked


@pytest.mark.full
def test_a_batch_of_lines_is_one_sweep_and_gives_one_outcome_per_line_in_order(
    tmp_path: Path, stub: list[SweepRequest], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STUB_FAILING_STAGE", "1")
    monkeypatch.setenv("STUB_LACKING_MICRO", "8")
    fixed = (*TINY, f"output={tmp_path}")
    proposed = [
        ("zero=stage3", "batch.micro=2"),
        ("zero=stage1", "batch.micro=2"),  # raises
        ("zero=stage2", "batch.micro=8"),  # out of memory
        ("zero=stage2", "batch.micro=-1"),  # out of range
        ("zero=stage3", "batch.micro=2"),  # repeats the first
        ("zero=stage3", "++batch.micro=2"),  # the first in another spelling
    ]
    found = trials.measure([(*fixed, *line) for line in proposed], Asked(fixed=fixed))
    assert [one.state for one in found] == [
        RunState.ok,
        RunState.error,
        RunState.oom,
        RunState.refused,
        RunState.ok,
        RunState.ok,
    ]
    assert [one.value for one in found] == [speed(3), None, None, None, speed(3), speed(3)]
    assert [one.fits_not for one in found] == [False, False, True, True, False, False]
    assert "stage 1 was told to fail" in found[1].message
    assert "out of memory in forward" in found[2].message
    assert "batch.micro" in found[3].message
    (request,) = stub
    assert len(request.points) == 3
    assert found[0].label == "stage3-micro2"
    # Another terminal lists the sweep, but is told to run the program that proposed it instead of `resume`.
    assert verbs.main(["list", "--output", str(tmp_path)]) == 0
    assert verbs.PROPOSED in capsys.readouterr().out
    assert cli.main(["resume", "last", "--output", str(tmp_path)]) == 2
    assert "run that again" in capsys.readouterr().err


@pytest.mark.full
def test_measured_points_are_cached_and_failed_points_are_retried_on_request(
    tmp_path: Path, stub: list[SweepRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = (*TINY, f"output={tmp_path}", "zero=stage2")
    monkeypatch.setenv("STUB_FAILING_STAGE", "2")
    assert trials.measure([line], Asked())[0].state is RunState.error
    monkeypatch.delenv("STUB_FAILING_STAGE")
    assert trials.measure([line], Asked())[0].state is RunState.error
    again = trials.measure([line], Asked("loss_last", retry="error"))[0]
    assert (again.state, again.value) == (RunState.ok, 4.9018)
    kept = trials.measure([line], Asked("loss_last"))[0]
    assert (kept.state, kept.value) == (RunState.cached, 4.9018)
    assert len(list(tmp_path.glob("points/*/attempts/*"))) == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["batch.micr=2"], "Did you mean 'batch.micro'"),
        (["sweeps=stages"], "this is a sweep"),
        (["cluster=slurm"], "cluster=slurm sends and leaves"),
    ],
)
def test_a_line_that_is_not_a_single_local_point_is_refused(
    words: list[str], told: str, stub: list[SweepRequest]
) -> None:
    with pytest.raises(Refusal, match=told):
        trials.measure([TINY, (*TINY, *words)], Asked())
    assert stub == []


@needs_optuna
@pytest.mark.full
def test_the_ask_and_tell_example_of_the_optuna_page_runs(
    tmp_path: Path, stub: list[SweepRequest], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "optuna.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "docs/optuna.md", "exec"), {})
    assert len(stub) == 4
    shown = capsys.readouterr().out
    assert "optimizer.lr" in shown
    assert "4.9018" in shown
