"""Typed commands end with the documented exit codes and messages, and import no heavy packages to do so."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator import cli
from orchestrator.commands.admission import Admission
from orchestrator.commands.sweep import SweepRequest
from orchestrator.compose import arguments
from orchestrator.compose.arguments import VERBS
from orchestrator.config.cluster import ClusterError
from orchestrator.machine import provenance
from orchestrator.planning.point import Point, Refused
from orchestrator.records.run_state import RunState
from orchestrator.text.paths import program

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "mlflow", "numpy", "transformers")


def typed(*words: str, cwd: Path = ROOT, **environ: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(ROOT / "run.py"), *words]
    return subprocess.run(line, capture_output=True, text=True, cwd=cwd, env={**os.environ, **environ}, check=False)


# One line for each place that refuses: composition, values, our rules, data, Hydra's grammar, sweeps, the output.
REFUSED = (
    *("zero=stge2", "batch.micro=abc", "batch.global_size=10", "data=text data.path=missing", "batch=[1"),
    *("-m batch.micro=glob(*)", "-m output=/proc/x zero=stage0,stage1", "--bogus"),
)
REFUSED_ALIKE = (
    *("zero.stagee=2", "+bogus=1", "++zero.bogus=1", "batch.micro=0", "data=text", "zero=[stage0,stage1]"),
    *("-m model=[gpt2] --plan", "--cfg job model.config.n_embd=3"),
)


@pytest.mark.parametrize("line", [*REFUSED, *(pytest.param(line, marks=pytest.mark.full) for line in REFUSED_ALIKE)])
def test_bad_input_is_refused_in_one_line_and_creates_no_files(line: str, tmp_path: Path) -> None:
    done = typed(*line.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert [one.split()[0] for one in lines] == ["error:", "nothing"]
    assert "Traceback" not in done.stderr
    assert "\033" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("line", ["zero=stage1", "-m seed=range(1,3) --plan", "fit model=gpt2", "generate prompt=a"])
def test_a_python_without_assertions_is_refused_in_one_line(line: str, tmp_path: Path) -> None:
    done = typed(*line.split(), cwd=tmp_path, PYTHONOPTIMIZE="1")
    assert (done.returncode, done.stdout) == (2, "")
    assert [one.split(":")[0] for one in done.stderr.splitlines()] == ["error", "nothing was started (exit 2)"]
    assert "unset PYTHONOPTIMIZE, and start python without -O" in done.stderr


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("cancle last", "'cancle' is not key=value. Did you mean '{program} cancel'?"),
        ("statsu --json", "Did you mean '{program} status'?"),
        ("--dry-run zero=stage1", "--plan shows the points of a sweep, and starts nothing"),
    ],
)
def test_misspelled_verbs_and_foreign_flags_get_a_suggestion(line: str, told: str) -> None:
    done = typed(*line.split())
    assert done.returncode == 2
    assert told.format(program=program()) in done.stderr


def test_suggested_commands_can_be_typed_from_the_current_folder(tmp_path: Path) -> None:
    assert f" {ROOT / 'run.py'} -m zero=stage1,stage2" in typed("zero=stage1,stage2", cwd=tmp_path).stderr
    assert f"needs -m (sweep): {program()} -m zero=" in typed("zero=stage1,stage2").stderr


def test_doctor_reports_what_works_and_the_error_of_slurm(tmp_path: Path) -> None:
    for name, text in (
        ("sbatch", ""),
        ("sinfo", "echo 'sinfo: error: first'; echo 'sinfo: fatal: no source' >&2; exit 1"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = typed("doctor", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 0
    assert "SLURM: sinfo: fatal: no source; is slurmctld up?" in done.stdout
    assert f"first       {program()} zero=stage2" in done.stdout
    assert "cluster=slurm" not in done.stdout


def test_ui_is_refused_in_a_folder_without_runs(tmp_path: Path) -> None:
    done = typed("ui", cwd=tmp_path)
    assert done.returncode == 2
    assert "there is no outputs/mlflow.db: a run without tracking=none creates it" in done.stderr


def test_all_broken_rules_are_reported_together(tmp_path: Path) -> None:
    line = "data=text data.path=missing batch.global_size=10 precision=fp32 precision.master=bf16 seed=-1"
    done = typed(*line.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("error:") == 4
    assert done.stderr.count("fix:") == 4


WRONG_WORDS = ("zero=stge2", "zero.stage=x", "cancle last")
# What a wrong word does without: rooms that plan, start, watch or report a point.
ROOMS = ("planning", "launch", "worker", "report", "tracking", "machine", "workloads")


@pytest.mark.parametrize("line", ["--help", *WRONG_WORDS, "data=text", "-m zero=stage0,stage1 data=text"])
def test_the_command_line_imports_nothing_heavy(line: str) -> None:
    code = f"import sys; from orchestrator.cli import main; main({line.split()!r}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "orchestrator.wings.predict" not in done.stdout.splitlines()[-1].split()
    # Only the last line: the help text contains "torch" too.
    loaded = {name.split(".")[0] for name in done.stdout.splitlines()[-1].split()}
    assert not loaded & set(HEAVY)
    if line in ("--help", *WRONG_WORDS):
        assert not loaded & {"submitit", "rich"}
        assert not {f"orchestrator.{room}" for room in ROOMS} & set(done.stdout.splitlines()[-1].split())
    if line == "--help":
        assert not loaded & {"hydra", "omegaconf"}


def test_help_lists_every_group_and_marks_the_defaults() -> None:
    done = typed("--help", "all")
    assert done.returncode == 0
    assert "stage2*" in done.stdout
    assert "model.config.KEY" in done.stdout
    for group in (ROOT / "conf").iterdir():
        assert group.stem in done.stdout or group.suffix
    usual = done.stdout.replace(program(), ".venv/bin/python run.py")  # the place of an interpreter may be longer
    assert max(map(len, usual.splitlines())) <= 120


def test_the_short_help_has_every_verb_and_fits_a_terminal() -> None:
    done = typed("zero=stage1", "-h")
    assert done.returncode == 0
    lines = done.stdout.replace(program(), "zlab").splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert [verb for verb in VERBS if not re.search(rf"^  (.*, )?{verb}\b", done.stdout, re.MULTILINE)] == []


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--cfg job zero=stage3", "stage: 3"),
        pytest.param("zero=stage1 -c job -p zero", "stage: 1", marks=pytest.mark.full),
        pytest.param("-c job --resolve sweeps=stages", "stage: 2", marks=pytest.mark.full),
        pytest.param("--cfg all", "searchpath", marks=pytest.mark.full),
        pytest.param("--info searchpath", "conf", marks=pytest.mark.full),
        pytest.param("--info defaults", "llama_tiny", marks=pytest.mark.full),
        ("--hydra-help", "--multirun"),
    ],
)
def test_hydras_own_flags_work_and_create_no_files(line: str, told: str, tmp_path: Path) -> None:
    done = typed(*line.split(), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert told in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--cfg job --package zerO", "package 'zerO' not found in config"),
        ("--hydra-help data.path=it's", "data.path=it's: it has a sign that needs quotes: type "),
    ],
)
def test_errors_of_hydras_own_flags_are_one_line(line: str, told: str) -> None:
    done = typed(*line.split())
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert first.startswith(f"error: {told}")
    assert second == "nothing was started (exit 2)"


@pytest.mark.full
def test_our_sweep_flags_can_be_combined_with_hydras_flags() -> None:
    done = typed("--hydra-help", *arguments.SWEEPING, "--retry", "oom", "--prune", "off", "--max-points", "3")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--multirun" in done.stdout


@pytest.mark.parametrize(("begun", "offered"), [("zero=", "zero=stage3"), ("sweeps=", "sweeps=stages")])
def test_the_shell_completes_options(begun: str, offered: str) -> None:
    line = f"python run.py {begun}"
    done = typed("-sc", "query=bash", COMP_LINE=line, COMP_POINT=str(len(line)))
    assert offered in done.stdout.split()


@pytest.mark.parametrize("verb", [*VERBS, ""])
def test_every_verb_has_a_version_and_help_with_the_typed_program_name(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/nowhere/zlab"])
    words = [verb] if verb else []
    with pytest.raises(SystemExit) if verb else contextlib.nullcontext() as end:
        assert cli.main([*words, "--help"]) == 0
    assert end is None or end.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: /nowhere/zlab {verb} [-h]" in shown if verb else "  /nowhere/zlab zero=stage2" in shown
    assert cli.main([*words, "--version"]) == 0
    assert capsys.readouterr().out == f"zero-lab {provenance.version_of('zero-lab')}\n"


@pytest.mark.parametrize("verb", ["logs", "ui", "export-weights", "io-bench", "launch"])
def test_verbs_without_json_output_say_so_in_one_line(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([verb, "--json"]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("error: --json: ")) == ("", 1)


@pytest.mark.full
def test_flags_that_show_the_configuration_read_the_users_conf_folder(tmp_path: Path) -> None:
    (tmp_path / "conf" / "model").mkdir(parents=True)
    own = (ROOT / "conf" / "model" / "gpt2.yaml").read_text().replace("name: gpt2", "name: my_own")
    (tmp_path / "conf" / "model" / "mine.yaml").write_text(own)
    done = typed("model=mine", "-c", "job", "-p", "model", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "name: my_own" in done.stdout
    assert "model/mine" in typed("model=mine", "-i", "defaults", cwd=tmp_path).stdout


class Seam:
    """Replaces the functions that run points, and records the arguments of each call."""

    def __init__(self) -> None:
        self.calls: list[Point] = []
        self.sweeps: list[SweepRequest] = []
        self.joined: list[Point] = []

    def run_point(self, point: Point, *, as_json: bool, admission: Admission) -> int:
        self.calls.append(point)
        self.as_json, self.admission = as_json, admission
        return 7

    def run_sweep(self, request: SweepRequest, hardware: object) -> int:
        self.sweeps.append(request)
        return 9

    def join(self, point: Point, *, admission: Admission) -> int:
        self.joined.append(point)
        self.admission = admission
        return 8


@pytest.fixture
def seam(monkeypatch: pytest.MonkeyPatch) -> Seam:
    found = Seam()
    monkeypatch.setattr("orchestrator.commands.sweep.run_sweep", found.run_sweep)
    monkeypatch.setattr("orchestrator.commands.run.run_point", found.run_point)
    monkeypatch.setattr("orchestrator.wings.torchrun.join.join", found.join)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return found


def test_a_single_run_is_started_with_its_resolved_configuration(seam: Seam, tmp_path: Path) -> None:
    assert cli.main(["zero=stage3", f"output={tmp_path}", "resources.ranks=3", "resources.device=cpu"]) == 7
    [point] = seam.calls
    assert point.label == "stage3-bf16-ranks3-device_cpu"
    assert (point.config.output, point.config.batch.global_size) == (str(tmp_path), 12)


def test_a_single_run_that_cannot_fit_is_refused_unless_pruning_is_off(seam: Seam) -> None:
    assert cli.main(["zero=stage3"]) == 7
    assert seam.admission == Admission(prune=True)
    assert cli.main(["zero=stage3", "--prune", "off"]) == 7
    assert seam.admission == Admission(prune=False)


def test_json_works_for_runs_and_sweeps_and_is_refused_for_joined_ranks(
    seam: Seam, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["zero=stage1", "--json"]) == 7
    assert seam.as_json
    assert cli.main(["sweeps=stages", "--json"]) == 9
    assert seam.sweeps[0].as_json
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["zero=stage1", "--json"]) == 2
    assert "ranks of torchrun or srun print none" in capsys.readouterr().err


def test_a_sweep_is_started_with_its_points_name_and_retry_states(seam: Seam) -> None:
    assert cli.main(["sweeps=stages", "--retry", "error,oom"]) == 9
    [request] = seam.sweeps
    assert (len(request.points), request.name, request.command) == (8, "stages", ("sweeps=stages",))
    assert request.wishes.retry == {RunState.error, RunState.oom}


def test_a_sweep_keeps_refused_points_as_rows_unless_all_points_are_refused(
    seam: Seam, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["-m", "zero=stage0,stage3", "offload=none,param_cpu"]) == 9
    [request] = seam.sweeps
    assert [isinstance(point, Refused) for point in request.points] == [False, True, False, False]
    assert "refused" not in capsys.readouterr().err, "the plan says it once"
    assert cli.main(["-m", "zero=stage0,stage1", "offload=param_cpu"]) == 2
    assert len(seam.sweeps) == 1


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--retry ok -m zero=stage0", "--retry ok: expected some of"),
        ("--fresh zero=stage0", "--fresh belongs to a sweep"),
        ("-m seed=range(nan,1)", "error: "),
        (f"+model.config.x={'[' * 300}{']' * 300}", "error: "),
        (
            "--anchor stge1 -m zero=stage0,stage1",
            "--anchor stge1: there is no point of that label. Did you mean 'stage1'?",
        ),
        ("--prune never -m zero=stage0", "--prune cannot be 'never'"),
        ("-m output={0}/a,{0}/b", "a sweep has one output, found {0}/a and {0}/b"),
    ],
)
def test_flags_of_a_sweep_are_checked(
    line: str, told: str, seam: Seam, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(line.format(tmp_path).split()) == 2
    assert told.format(tmp_path) in capsys.readouterr().err
    assert (seam.calls, seam.sweeps) == ([], [])


@pytest.mark.parametrize(
    ("fault", "line", "told"),
    [
        ("hang@step1:rank5", "zero=stage1", "expected a rank from 0 to 1 and a step from 1 to"),
        ("hang@step999:rank0", "-m zero=stage1,stage2", "which would never act; change it or unset ZLAB_FAULT"),
        ("nonsense", "zero=stage1", "ZLAB_FAULT must be like raise|"),
    ],
)
def test_a_fault_that_can_never_occur_is_refused(
    fault: str,
    line: str,
    told: str,
    seam: Seam,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ZLAB_FAULT", fault)
    assert cli.main([*line.split(), "resources.ranks=2"]) == 2
    assert told in capsys.readouterr().err
    assert (seam.calls, seam.sweeps) == ([], [])


def test_a_fault_that_can_occur_in_one_point_of_a_sweep_is_accepted(
    seam: Seam, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZLAB_FAULT", "hang@step1:rank3")
    assert cli.main(["-m", "resources.ranks=2,4"]) == 9


def test_a_sweep_whose_points_name_two_clusters_is_refused(
    seam: Seam, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert cli.main(["-m", "cluster=local,slurm", "resources.device=cpu", "resources.ranks=2"]) == 2
    told = "error: a sweep has one cluster, found local and slurm      fix: one sweep for each"
    assert told in capsys.readouterr().err
    assert seam.sweeps == []


def test_under_torchrun_the_process_joins_as_a_rank(seam: Seam, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert cli.main(["resources.device=cpu"]) == 8
    assert (seam.calls, seam.joined[0].config.resources.ranks) == ([], 4)


@pytest.mark.parametrize(
    ("line", "world", "told"),
    [
        ("-m zero=stage0,stage1", "2", "a sweep starts its own processes"),
        ("resources.ranks=3", "2", "resources.ranks must be the number of processes started, 2"),
        ("zero=stage1", "two", "the environment's WORLD_SIZE must be a whole number"),
    ],
)
def test_under_torchrun_commands_that_cannot_join_are_refused(
    line: str, world: str, told: str, seam: Seam, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", world)
    assert cli.main(line.split()) == 2
    assert told in capsys.readouterr().err
    assert (seam.calls, seam.joined) == ([], [])


def test_a_scheduler_that_does_not_answer_is_reported_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def silent(*_: object) -> int:
        raise ClusterError("sinfo: expected an answer within 30 s; try `scontrol ping`")

    monkeypatch.setattr("orchestrator.commands.sweep.run_sweep", silent)
    assert cli.main(["-m", "zero=stage0"]) == 2
    assert "error: sinfo: expected an answer" in capsys.readouterr().err


def test_run_py_is_short() -> None:
    assert len((ROOT / "run.py").read_text().splitlines()) <= 60


def test_a_python_without_the_packages_prints_what_to_type_instead() -> None:
    line = [sys.executable, "-S", str(ROOT / "run.py"), "zero=stage1"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "`make install`, then" in done.stderr or ": type" in done.stderr
    assert " zero=stage1\n" in done.stderr
    assert "Traceback" not in done.stderr
