"""Points that Hydra's sweepers propose are run like our own, and the sweeper gets the metric or the error of each."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from enum import Enum
from pathlib import Path

import pytest
import yaml
from harness.patience import HANG_S, wait_until
from points import STUB

from orchestrator import cli
from orchestrator.commands import hydra_app, verbs
from orchestrator.commands import sweep as sweep_command
from orchestrator.commands.sweep import SweepRequest
from orchestrator.compose import compose
from orchestrator.config.strict import Refusal
from orchestrator.machine.hardware import Hardware
from orchestrator.records import sweep_record
from orchestrator.records.run_state import RunState
from orchestrator.records.sweep_record import SweepPaths
from orchestrator.report.screen import Screen
from orchestrator.wings.optuna import trials
from orchestrator.wings.optuna.trials import Asked

HERE = Path(__file__).parents[1]
ROOT = HERE.parents[1]
TINY = ("precision=fp32", "resources.device=cpu", "resources.ranks=1", "resources.threads=1", "tracking=none")
needs_optuna = pytest.mark.skipif(
    importlib.util.find_spec("hydra_plugins.hydra_optuna_sweeper") is None,
    reason="needs the extra `optuna`, which `dev` has",
)


@pytest.fixture(autouse=True)
def scene(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(ROOT)]))
    monkeypatch.setenv("STUB_STEP_S", "0.0")


def speed(stage: int) -> float:
    """The tokens/s that the stub worker reports."""
    return 9412.0 + 100 * stage**2


# ---- a batch of lines ------------------------------------------------------------------------------------------------


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
    assert [one.values for one in found] == [(speed(3),), None, None, None, (speed(3),), (speed(3),)]
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
    again = trials.measure([line], Asked(("loss_last",), retry="error"))[0]
    assert (again.state, again.values) == (RunState.ok, (4.9018,))
    kept = trials.measure([line], Asked(("loss_last", "tokens_per_second")))[0]
    assert (kept.state, kept.values) == (RunState.cached, (4.9018, speed(2)))
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


# ---- through Hydra ---------------------------------------------------------------------------------------------------

COMMAND = """
import sys
from dataclasses import replace
from orchestrator.commands import hydra_app, sweep as sweep_command
run_quietly = sweep_command.run_quietly
sweep_command.run_quietly = lambda request, hardware, screen: run_quietly(
    replace(request, entry="stub_worker:run_rank", predicts=False), hardware, screen)
raise SystemExit(hydra_app.main(sys.argv[1:]))
"""


def typed(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", COMMAND, *TINY, "output=out", *words]
    return subprocess.run(line, capture_output=True, text=True, cwd=folder, env={**os.environ, **environ}, check=False)


class Direction(Enum):
    """Has the names of the type that Optuna's sweeper uses for the direction."""

    minimize = 1
    maximize = 2


def study_of(folder: Path) -> Path:
    (found,) = folder.glob("out/studies/*")
    return found


@pytest.mark.full
def test_hydras_basic_sweeper_runs_our_points(tmp_path: Path) -> None:
    done = typed(tmp_path, "zero=stage0,stage3", "hydra.launcher.rank_by=tokens_per_second")
    assert done.returncode == 0, done.stderr
    assert f"#0 stage0: tokens_per_second {speed(0):,.6g} (ok)" in done.stdout
    assert f"#1 stage3: tokens_per_second {speed(3):,.6g} (ok)" in done.stdout
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out"]
    (sweep,) = sweep_record.all_sweeps(tmp_path / "out")
    assert sweep.name.endswith("_zero")
    assert (study_of(tmp_path) / "multirun.yaml").exists()


@pytest.mark.full
def test_a_failed_point_ends_the_basic_sweeper_with_its_error_and_no_traceback(tmp_path: Path) -> None:
    done = typed(tmp_path, "zero=stage0,stage3", STUB_FAILING_STAGE="3")
    assert done.returncode == 1
    assert "stage3: error: " in done.stderr
    assert "stage 3 was told to fail" in done.stderr
    assert "Traceback" not in done.stderr
    assert f"#0 stage0: tokens_per_second {speed(0):,.6g} (ok)" in done.stdout


@pytest.mark.full
def test_an_interrupt_cancels_the_batch(tmp_path: Path) -> None:
    line = [sys.executable, "-c", COMMAND, *TINY, "output=out", "zero=stage0,stage3"]
    process = subprocess.Popen(line, cwd=tmp_path, env={**os.environ, "STUB_STEP_S": "5"})
    wait_until(lambda: list(tmp_path.glob("out/points/*/attempts/*/state.json")))
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=HANG_S) == 130
    (sweep,) = sweep_record.all_sweeps(tmp_path / "out")
    assert {one.state for one in sweep_record.standings(sweep)} == {RunState.cancelled}


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("hydra/launcher=basic", "only hydra/launcher=zlab runs points"),
        ("--fresh", "--fresh is not known to Hydra"),
        ("--config-name=own", "chosen with experiment=NAME"),
        ("--bogus", "there is no flag '--bogus'"),
    ],
)
def test_unsupported_words_are_refused_before_hydra_starts(
    word: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hydra_app.main(["zero=stage1,stage2", word]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sweeper", "launcher", "told"),
    [
        ({}, {"rank_by": "step_mss"}, "Did you mean 'step_ms'?"),
        ({}, {"retry": "ok"}, "--retry ok: expected some of"),
        ({"direction": "minimize"}, {}, "looks for the worst tokens_per_second      fix: hydra.sweeper.direction=max"),
        ({"direction": Direction.maximize}, {"rank_by": "step_ms"}, "fix: hydra.sweeper.direction=minimize"),
        (
            {"direction": ["minimize", "maximize"]},
            {},
            "expected one for each of tokens_per_second, found minimize maximize      fix: hydra.sweeper.direction=max",
        ),
        (
            {"direction": ["maximize", Direction.maximize]},
            {"rank_by": ["tokens_per_second", "peak_bytes"]},
            "looks for the worst peak_bytes      fix: hydra.sweeper.direction=[maximize,minimize]",
        ),
        (
            {"direction": "maximize"},
            {"rank_by": ["tokens_per_second", "peak_bytes"]},
            "expected one for each of tokens_per_second peak_bytes, found maximize",
        ),
        ({}, {"rank_by": ["tokens_per_second", "speed"]}, "there is no metric 'speed'"),
        ({}, {"unfit": "bad"}, "expected null or a number for each of tokens_per_second, found bad"),
        ({}, {"rank_by": ["step_ms", "peak_bytes"], "unfit": 1e9}, "a number for each of step_ms peak_bytes, found 1"),
    ],
)
def test_a_study_with_invalid_settings_is_refused_before_its_first_proposal(
    sweeper: dict[str, object], launcher: dict[str, object], told: str
) -> None:
    plugin = importlib.import_module("hydra_plugins.zlab_launcher")
    settings = compose.OmegaConf.merge(compose.OmegaConf.structured(plugin.ZlabLauncherConf), launcher)
    sources = [{"provider": "main", "path": "conf"}]
    hydra = {"job": {"config_name": "config"}, "runtime": {"config_sources": sources}, "overrides": {"task": []}}
    config = compose.OmegaConf.create({"hydra": {"sweeper": sweeper, **hydra}})
    made = plugin.ZlabLauncher(settings.rank_by, settings.unfit, settings.retry)
    with pytest.raises(plugin.CompactHydraException) as refused:
        made.setup(hydra_context=None, task_function=None, config=config)
    assert told in str(refused.value)


# ---- Optuna ----------------------------------------------------------------------------------------------------------


@needs_optuna
@pytest.mark.full
def test_optuna_receives_the_metric_or_the_failure_of_each_proposal(tmp_path: Path) -> None:
    """A search declared in a file, of six proposals, two at a time; one stage raises, one micro-batch does not fit."""
    folder = tmp_path / "conf" / "experiment"
    folder.mkdir(parents=True)
    study = {
        "defaults": [
            {"override /hydra/launcher": "zlab"},
            {"override /hydra/sweeper": "optuna"},
            {"override /hydra/sweeper/sampler": "random"},
        ],
        "hydra": {
            "sweeper": {
                "direction": "maximize",
                "n_trials": 6,
                "n_jobs": 2,
                "max_failure_rate": 1.0,
                "sampler": {"seed": 3},
                "params": {"zero": "choice(stage0,stage1,stage2,stage3)", "batch.micro": "choice(2,8)"},
            },
            "launcher": {"unfit": 0.0},
        },
    }
    text = yaml.safe_dump(study, sort_keys=False)
    (folder / "search.yaml").write_text(f"# @package _global_\n{text}")
    done = typed(tmp_path, "experiment=search", STUB_FAILING_STAGE="1", STUB_LACKING_MICRO="8")
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"#(\d) (\S+): (.*)", done.stdout)
    assert [int(number) for number, _, _ in lines] == list(range(6))
    ends = {label: text for _, label, text in lines}
    for label, text in ends.items():
        stage, micro = int(label[5]), int(label[-1])
        if stage == 1:
            assert text.startswith("no value (error: ")
        elif micro == 8:
            assert text.startswith("tokens_per_second 0 (oom: ")
        else:
            assert text.startswith(f"tokens_per_second {speed(stage):,.6g} ")
    measured = [int(label[5]) for label, text in ends.items() if "(ok)" in text]
    assert measured, "the seed proposes points of every kind"
    assert any("no value" in text for text in ends.values())
    assert any("(oom" in text for text in ends.values())
    best = yaml.safe_load((study_of(tmp_path) / "optimization_results.yaml").read_text())
    assert best["best_value"] == speed(max(measured))
    assert best["best_params"]["zero"] == f"stage{max(measured)}"
    assert len(sweep_record.all_sweeps(tmp_path / "out")) == 3, "a batch is a sweep"
    # Each point combines the typed words, the settings of the file and the proposal, as in a command of ours.
    configs = [json.loads(path.read_text()) for path in tmp_path.glob("out/points/*/config.json")]
    assert {config["precision"]["param"] for config in configs} == {"fp32"}


@needs_optuna
@pytest.mark.full
def test_optuna_receives_a_metric_for_each_objective(tmp_path: Path) -> None:
    """Speed and loss: of the stages, which have the same loss, the faster one is best; what does not fit is not."""
    sampler = ("hydra/sweeper=optuna", "hydra/sweeper/sampler=grid")
    study = (*sampler, "hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=4", "hydra.launcher.unfit=[0,1e9]")
    metrics = ("hydra.launcher.rank_by=[tokens_per_second,loss_last]", "hydra.sweeper.direction=[maximize,minimize]")
    space = ("zero=choice(stage1,stage2)", "batch.micro=choice(2,8)")
    done = typed(tmp_path, *study, *metrics, *space, STUB_LACKING_MICRO="8")
    assert done.returncode == 0, done.stderr
    assert "tokens_per_second 0, loss_last 1e+09 (oom: " in done.stdout
    assert "tokens_per_second 9,812, loss_last 4.9018 (ok)" in done.stdout
    solutions = yaml.safe_load((study_of(tmp_path) / "optimization_results.yaml").read_text())["solutions"]
    assert {tuple(one["values"]) for one in solutions} == {(speed(2), 4.9018)}


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
