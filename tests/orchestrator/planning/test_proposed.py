"""Every command that the tool proposes can be pasted: it is split as by a shell, parsed, composed and checked."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

import pytest
from points import make_config
from stub_worker import make_result

from orchestrator.commands import doctor
from orchestrator.commands.next_run import next_after_run
from orchestrator.compose import arguments, overrides
from orchestrator.compose.arguments import SHARED_PARSER, VERBS
from orchestrator.compose.line import composed
from orchestrator.compose.settable import read_tree
from orchestrator.machine.hardware import Hardware
from orchestrator.planning.points import checked_points
from orchestrator.planning.rules.scene import Scene
from orchestrator.report import ranking, summary
from orchestrator.report.entry import Entry
from orchestrator.text import paths
from orchestrator.wings import load
from orchestrator.wings.generate import generate

CLUSTER = Scene(Hardware(cores=2, cpu="cpu", slurm=True))
TYPED = ("zero=stage2", "precision=bf16", "data.path=null", "measure.steps=10", "measure.warmup_steps=1")


@pytest.fixture
def own(tmp_path: Path) -> str:
    """The --config-dir flag of a folder with an option of the user's own; the folder's name contains a space."""
    folder = tmp_path / "my conf"
    (folder / "zero").mkdir(parents=True)
    (folder / "zero" / "mine.yaml").write_text((paths.CODE / "conf" / "zero" / "stage1.yaml").read_text())
    return f"--config-dir={folder}"


def problems(line: str, scene: Scene = CLUSTER) -> list[str]:
    """The problems that the command line reports for a command; nothing is started."""
    program = shlex.split(paths.program())
    words = shlex.split(line, comments=False)
    assert words[: len(program)] == program
    words = words[len(program) :]
    if words[:1] and words[0] in VERBS:
        if words[0] == "generate":
            generate.config_of(generate.read(words[1:]))  # a Refusal says what is wrong
            return []
        parser: argparse.ArgumentParser = load(VERBS[words[0]]).parser()
        parser.parse_args(words if VERBS[words[0]] == SHARED_PARSER else words[1:])
        return []
    asked = arguments.split(words)
    _, wrong = checked_points(composed(asked), scene)
    return wrong


def measured(*typed: str, evaluates: bool = False) -> str:
    result = make_result(make_config(Path("outputs")), 100.0)
    result["loss"] |= {"perplexity": 90.0} if evaluates else {}
    return ranking.next_after_sweep(ranking.rank([Entry("a", "ok", result, overrides=typed)]))


def after_run(*typed: str) -> str:
    (point,), wrong = checked_points(composed(arguments.split([*typed])), CLUSTER)
    assert wrong == []
    return next_after_run(point, CLUSTER)


@pytest.mark.full
def test_the_commands_proposed_after_a_run_and_after_a_sweep_can_be_pasted(own: str) -> None:
    for typed in (TYPED, (own, "zero=mine", "output=a b"), ("zero.prefetch=0", "experiment=paper_bytes")):
        for line in (after_run(*typed), summary.run_command(typed), measured(*typed)):
            assert problems(line) == []


# Settings that some stages refuse, and the stages that take them.
PARTIAL = (
    ("measure=eval zero=stage3", "0,3"),
    ("measure=eval zero=stage3 measure.steps=3 data=synthetic batch.micro=2", "0,3"),
    ("measure=eval zero=stage3 offload=optimizer_param_nvme", ""),
    ("optimizer=onebitadam optimizer.clip_norm=null zero=stage1", "0,1"),
    ("optimizer=onebitadam optimizer.clip_norm=null zero=stage0 measure.steps=4", "0,1"),
    ("zero=stage2 zero.gather_dtype=int8", "1,2,3"),
    ("zero=stage3 zero.reduce_dtype=int4 zero.error_feedback=true", "1,2,3"),
    ("zero=stage3 precision=bf16_pure zero.gather_dtype=int8", ""),
    ("zero=stage3 offload=optimizer_param_cpu", ""),
    ("zero=stage1 optimizer=adamw8bit", "0,1,2,3"),
)


@pytest.mark.parametrize(("line", "stages"), PARTIAL)
def test_no_command_proposes_a_stage_that_refuses_the_settings(line: str, stages: str) -> None:
    typed = line.split()
    then = after_run(*typed)
    if stages:
        assert "-m zero=" + ",".join(f"stage{one}" for one in stages.split(",")) in then
    else:
        assert "-m" not in then.split()
    evaluates = "measure=eval" in typed
    for proposed in (then, measured(*typed, evaluates=evaluates)):
        assert problems(proposed) == []
        assert not evaluates or "generate" in proposed or "measure=eval" in proposed


def test_an_evaluation_of_a_text_is_followed_by_its_weights_text_from_a_prompt(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("text")
    line = measured("measure=eval", "zero=stage0", "data=text", f"data.path={file}", evaluates=True)
    assert line.endswith("generate zero=stage0 prompt=Once")
    assert problems(line) == []
    assert measured("measure=eval", "data=synthetic", evaluates=True).endswith("generate tokens=5,6,7")


def test_the_winner_is_measured_longer_even_if_the_steps_were_typed() -> None:
    words = shlex.split(measured(*TYPED))
    (point,) = composed(arguments.split(words[len(shlex.split(paths.program())) :])).points
    assert (point.values["measure"]["steps"], point.values["measure"]["warmup_steps"]) == (60, 10)


def test_a_point_keeps_the_config_dir_flag_that_its_options_need(own: str) -> None:
    points, wrong = checked_points(composed(arguments.split([own, "zero=mine"])), CLUSTER)
    assert (wrong, points[0].overrides, points[0].label) == ([], (own, "zero=mine"), "mine-bf16")


def test_the_command_that_a_refusal_proposes_can_be_pasted(own: str) -> None:
    tree = read_tree(own.partition("=")[2])
    lists = ["zero=mine,stage2", "batch.micro=range(1,3)"]
    (problem,) = overrides.check(lists, tree, multirun=False, flags=[own])
    assert problems(problem.partition("needs -m (sweep): ")[2]) == []
    for word in (["zero=[stage0,stage1]"], ["plan", "zero=stage1"], ["sweep", "zero=stage1"], ["statsu"]):
        (problem,) = overrides.check(word, tree, multirun=False)
        assert problems(problem.partition("Did you mean '")[2].partition("'?")[0]) == []


@pytest.mark.parametrize(("gres", "device"), [("gpu:a100:4", "cuda"), ("(null)", "cpu")])
def test_the_commands_that_the_doctor_proposes_can_be_pasted(
    gres: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("sbatch", ""), ("sinfo", f"echo 'main* 1-00:00:00 2 {gres}'")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    rows = {row.name: row.text for row in doctor.what_works(doctor._slurm())}
    assert f"resources.device={device}" in rows["cluster"]
    for name in ("first", "then", "cluster"):
        assert problems(rows[name]) == []


def test_the_commands_proposed_for_a_sweep_can_be_pasted(tmp_path: Path) -> None:
    sweep = tmp_path / "my out" / "sweeps" / "2026-11-22_01-35-04_zero"
    for name in ("watch", "cancel", "resume", "retry", "status", "logs", "report"):
        assert problems(paths.verb(name, sweep)) == []
    assert problems(paths.dashboard(tmp_path / "my out")) == []


def environment(folder: Path) -> Path:
    """A bin folder like that of `python -m venv`: a link to the interpreter, and a script."""
    folder.mkdir(parents=True)
    (folder / "python").symlink_to(os.path.realpath(sys.executable))
    (folder / "zlab").write_text("#!/bin/sh\n")
    (folder / "zlab").chmod(0o755)
    return folder


def test_proposed_commands_name_the_program_as_it_can_be_typed_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, other = environment(tmp_path / ".venv" / "bin"), environment(tmp_path / "other" / "bin")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paths, "STARTED_IN", tmp_path)
    monkeypatch.setattr(sys, "executable", str(ours / "python"))
    for path, called, told in (
        (ours, "run.py", "python run.py"),
        (other, "run.py", ".venv/bin/python run.py"),
        (tmp_path, "run.py", ".venv/bin/python run.py"),
        (other, "my code/run.py", ".venv/bin/python 'my code/run.py'"),
        (ours, str(ours / "zlab"), "zlab"),
        (other, str(ours / "zlab"), ".venv/bin/zlab"),
    ):
        monkeypatch.setenv("PATH", str(path))
        monkeypatch.setattr(sys, "argv", [called])
        assert paths.program() == told
    (tmp_path / "deeper").mkdir()
    monkeypatch.chdir(tmp_path / "deeper")
    monkeypatch.setenv("PATH", str(other))
    monkeypatch.setattr(sys, "argv", ["run.py"])
    assert paths.program() == f"{ours / 'python'} {tmp_path / 'run.py'}"
