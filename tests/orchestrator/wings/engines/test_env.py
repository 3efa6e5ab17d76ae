"""Another engine's points: the environment of their ranks, their labels and keys, and a fault in one of their ranks is
named."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from harness.patience import HANG_S
from harness.ranks import fork_context
from points import TINY, config_of_line
from sweep_runs import left_behind

from orchestrator import wings
from orchestrator.compose import arguments, compose
from orchestrator.config.schema import to_dict
from orchestrator.launch.rank import ENTRY, RankInfo, leave_failed, run_recorded
from orchestrator.launch.verdict import Verdict, judge, look_at_ranks
from orchestrator.machine.hardware import Hardware
from orchestrator.planning.point import Point, Refused
from orchestrator.planning.points import judged
from orchestrator.planning.rules.scene import Scene
from orchestrator.records.record_file import write_json_atomic
from orchestrator.records.run_record import AttemptPaths
from orchestrator.records.run_state import RunState
from orchestrator.report.changes import Measured, by_setting
from orchestrator.text.extras import install_line
from orchestrator.wings.engines import ddp, environments
from zero_runtime.watch.journal import Journal
from zero_runtime.watch.judge import Note, Patience, RankStatus
from zero_runtime.watch.judge import judge as blame

ROOT = Path(__file__).parents[4]
SCENE = Scene(Hardware(4, "cpu"))
RANKS = f"{TINY} resources.ranks=2 zero=stage0"
SHARED = next(folder for folder in sys.path if (Path(folder) / "torch").is_dir())


def points_of(line: str, scene: Scene = SCENE) -> tuple[list[Point | Refused], list[str]]:
    return judged(compose.compose(arguments.split(line.split())), scene)


def compared(points: list[Point | Refused]) -> list[Point]:
    """The points that are not refused, without the reference that a comparison of engines adds."""
    return [point for point in points if isinstance(point, Point) and point.config.engine.kind != "plain"]


def environment(folder: Path, **versions: str) -> str:
    """A virtual environment with the packages of this one, except those of other versions. Returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    for name, version in versions.items():  # before the shared packages on the path, so this one is found
        (site / f"{name}-{version}.dist-info").mkdir()
        (site / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    (site / "shared.pth").write_text(f"{SHARED}\n")
    return str(folder / "bin" / "python")


@pytest.fixture(autouse=True)
def _asked_anew() -> None:
    environments._asked.cache_clear()


# ---- the environment ---------------------------------------------------------------------------------------------


def test_two_versions_of_a_package_are_two_points_with_short_labels_and_the_second_asks_no_interpreter_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = environment(tmp_path / "old", torch="2.12.9"), environment(tmp_path / "new" / ".venv", torch="2.99.0")
    asked: list[Any] = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *words, **more: asked.append(words) or run(*words, **more))
    monkeypatch.chdir(tmp_path)
    relative = os.path.relpath(new)
    points, problems = points_of(f"-m {RANKS} engine=zero,ddp engine.python={old},{relative}")
    assert problems == []
    found = {point.label: point.config.engine for point in compared(points)}
    assert {label: engine.versions for label, engine in found.items()} == {
        "zero-old": {"torch": "2.12.9"},
        "zero-new": {"torch": "2.99.0"},
        "ddp-old": {"torch": "2.12.9"},
        "ddp-new": {"torch": "2.99.0"},
    }
    assert found["ddp-new"].python == new, "a relative path would be another one from another folder"
    assert len(asked) == 2
    # Each environment has a reference, whose words repeat it: another torch rounds otherwise.
    references = {one.label: one for one in points if isinstance(one, Point) and one.config.engine.kind == "plain"}
    assert {label: one.config.engine.python for label, one in references.items()} == {
        "plain-old": old,
        "plain-new": new,
    }
    ((again,), _) = judged(compose.compose(arguments.split(list(references["plain-new"].overrides))), SCENE)
    assert isinstance(again, Point)
    assert again.config == references["plain-new"].config


def test_points_of_a_comparison_have_the_versions_of_their_packages() -> None:
    points, _ = points_of(f"-m {RANKS} engine=zero,ddp")
    ours, theirs = (point.config.engine.versions for point in compared(points))
    assert ours == {"torch": metadata.version("torch")}
    assert list(theirs) == ["torch"]


def test_environments_are_compared_though_their_versions_differ_too() -> None:
    engines = [{"python": None, "versions": {"torch": "2.13.0"}}, {"python": "/new", "versions": {"torch": "2.99.0"}}]
    points = [Measured(str(engine), "", {"engine": engine}, None, "error") for engine in engines]
    assert len(by_setting(points, "engine.python", 0.05).points) == 1
    assert len(by_setting(points, "seed", 0.05).points) == 0


def refusals(folder: Path) -> list[tuple[str, str, str]]:
    """Each refused interpreter, what is told, and a fix."""
    bare = folder / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    old, silent = folder / "old", folder / "text"
    old.write_text('#!/bin/sh\necho \'{"python": [3, 9], "packages": {}}\'\n')
    silent.write_text("no program")
    for file in (old, silent):
        file.chmod(0o755)
    null = "engine.python=null"
    return [
        (f"{folder}/none", "none, which is not there", null),
        (f"{bare}", "bare, which is a folder", f"engine.python={bare}/bin/python"),
        ("/bin/true", "/bin/true, which runs no Python", null),
        (f"{silent}", "text, which runs no Python", null),
        (f"{old}", "old, which is Python 3.9: expected 3.10 or newer", null),
        (f"{bare}/bin/python", f"{bare}/bin/python -m pip install torch transformers submitit", null),
    ]


def test_an_interpreter_that_cannot_run_ranks_is_refused_with_what_to_do(tmp_path: Path) -> None:
    for python, told, fix in refusals(tmp_path):
        _, problems = points_of(f"{RANKS} engine.python={python}")
        assert len(problems) == 1
        assert told in problems[0]
        assert fix in problems[0]


def test_ranks_of_another_launcher_have_its_interpreter() -> None:
    _, problems = points_of(
        f"{RANKS} engine.python={sys.executable}", Scene(Hardware(4, "cpu"), world=2, local_world=2)
    )
    assert "engine.python is for ranks that this command starts" in problems[0]


def test_an_engine_that_is_not_installed_is_a_refused_row_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ddp, "PACKAGES", ("no-such-engine", "torch"))
    monkeypatch.setattr(ddp, "EXTRA", "fast")
    points, problems = points_of(
        f"-m {RANKS} engine=ddp,zero,fsdp2 zero=stage1 engine.fsdp2.reshard_after_forward=true,false"
    )
    assert [point.label for point in points if isinstance(point, Refused)] == ["ddp"]  # it is one row
    points, problems = points_of(f"-m {RANKS} engine=ddp,zero")
    assert [type(point) for point in points] == [Refused, Point]
    assert f"engine=ddp needs the package no-such-engine: {install_line('fast')}" in problems[0]
    python = environment(tmp_path / "its")
    _, problems = points_of(f"{RANKS} engine=ddp engine.python={python}")
    assert f"needs the package no-such-engine: {python} -m pip install 'no-such-engine'" in problems[0]


@pytest.mark.full
def test_a_rank_imports_no_distribution_that_the_check_of_its_environment_does_not_know() -> None:
    program = """
import sys, importlib.metadata as metadata
import orchestrator.launch.local_executor, orchestrator.worker.train, orchestrator.wings.engines.foreign_runtime
import transformers.models.llama.modeling_llama
owners = metadata.packages_distributions()
print({owner.lower() for name in list(sys.modules) for owner in owners.get(name, [])})
"""
    told = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    dependencies = {"torch", "transformers", "mlflow", "sqlalchemy", "hydra-core", "submitit", "jinja2", "matplotlib"}
    dependencies |= {"numpy", "pyyaml", "safetensors", "rich", "psutil"}  # of pyproject.toml
    # jinja2 is torch's and transformers' own dependency.
    assert (eval(told.stdout) & dependencies) - {"jinja2"} <= set(environments.OF_RANKS)


@pytest.mark.full
def test_ranks_run_in_the_environment_of_their_point_and_with_the_code_of_another_checkout(tmp_path: Path) -> None:
    python, code, output = environment(tmp_path / "other"), tmp_path / "code", tmp_path / "out"
    subprocess.run(["git", "worktree", "add", "--detach", code], cwd=ROOT, check=True, capture_output=True)
    try:
        with (code / "orchestrator" / "worker" / "train.py").open("a") as file:
            file.write("\nimport sys\n\nprint('the other code with', sys.prefix, flush=True)\n")
        line = f"-m {RANKS} engine=ddp engine.python=null,{python} output={output}".replace("output=out ", "")
        ended = command(f"{line} resources.code={code} --json")
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", code], cwd=ROOT, check=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    points = [point for point in json.loads(ended.stdout)["points"] if not point["label"].startswith("plain")]
    prefixes = {"this_python": sys.prefix, "other": str(tmp_path / "other")}
    for point in points:
        logs = [file.read_text() for file in Path(point["attempt"]).glob("rank*.log")]
        assert [f"the other code with {prefixes[point['label']]}\n" in log for log in logs] == [True, True]
    assert points[0]["result"]["loss"] == points[1]["result"]["loss"]


def command(line: str, fault: str = "") -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "ZLAB_FAULT": fault}
    return subprocess.run(
        [sys.executable, "run.py", *line.split()], cwd=ROOT, env=environ, capture_output=True, text=True
    )


# ---- keys and labels ---------------------------------------------------------------------------------------------

LABELS = [
    (
        "-m engine=zero,ddp zero=stage0,stage1 precision=fp32",
        {"zero-stage0", "zero-stage1", "ddp-stage0"},
    ),
    ("engine=ddp zero=stage0 precision=fp32", {"ddp-stage0-fp32"}),
    (
        "-m engine=zero,ddp engine.ddp.bucket_cap_mb=1,2.5 zero=stage0",
        {"zero", "ddp-bucket_cap_mb1", "ddp-bucket_cap_mb2.5"},
    ),
    ("-m engine=ddp +engine.ddp.static_graph=true,false zero=stage0", {"static_graph_true", "static_graph_false"}),
]


@pytest.mark.parametrize(("line", "labels"), LABELS)
def test_labels_name_the_engine_and_its_own_settings(line: str, labels: set[str]) -> None:
    points, _ = points_of(line)
    assert labels == {point.label for point in compared(points)}


def test_keys_of_an_engine_are_typed_as_it_spells_them_also_where_hydra_composes(tmp_path: Path) -> None:
    for line in (f"{RANKS} engine=ddp", f"{RANKS} engine=ddp +model.config.note=${{seed}}"):
        composed = compose.compose(arguments.split(f"{line} engine.ddp.a.b=8 engine.ddp.a.c=x".split()))
        assert composed.points[0].values["engine"]["ddp"] == {"a": {"b": 8, "c": "x"}}
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "buckets.yaml").write_text("axes:\n  engine.ddp.bucket_cap_mb: [1, 25]\n")
    line = f"--config-dir {tmp_path} sweeps=buckets engine=ddp zero=stage0 model=llama_tiny"
    found = compose.compose(arguments.split(line.split()))
    assert [point.values["engine"]["ddp"]["bucket_cap_mb"] for point in found.points] == [1, 25]


def test_a_point_says_nothing_of_the_settings_of_another_engine() -> None:
    points, _ = points_of(f"-m {RANKS} engine=zero,ddp engine.ddp.bucket_cap_mb=1,25")
    ours = [point for point in compared(points) if point.config.engine.is_own]
    assert len(ours) == 1
    assert not any("bucket_cap_mb" in word for word in ours[0].overrides)


WRONG = [
    (
        "engine.deepsped.zero_optimization.overlap_comm=1",
        "Did you mean 'engine.deepspeed.zero_optimization.overlap_comm'",
    ),
    (
        "engine.fsdp2.reshard_after_forward=8",
        "engine.fsdp2 changes nothing but points of engine=fsdp2, found engine=zero",
    ),
    ("engine=ddp engine.ddp.bucket_cap=8", "found bucket_cap      fix: engine.ddp.bucket_cap_mb=8"),
    ("engine=ddp model.model_type=mixtral", "trains no mixture of experts (MoE), found model.model_type=mixtral"),
    ("engine=ddp +model.config.num_experts=8", "trains no mixture of experts (MoE), found model.config.num_experts=8"),
]


@pytest.mark.parametrize(("words", "told"), WRONG)
def test_wrong_settings_of_an_engine_are_refused(words: str, told: str) -> None:
    from orchestrator.compose import overrides
    from orchestrator.compose.settable import read_tree

    problems = overrides.check(words.split(), read_tree(), multirun=False)
    assert any(told in problem for problem in problems or points_of(f"{RANKS} {words}")[1])


# ---- failures ----------------------------------------------------------------------------------------------------


def note(rank: int, others: int, idle_s: float) -> Note:
    journal = Journal()
    journal.end_start()
    place, ops = journal.read()
    return Note(rank, RankStatus.RUNNING, place, ops, idle_s, others=others)


@pytest.mark.parametrize(
    ("others", "idle_s", "ranks"),
    [
        ((8, 7), 61.0, (1,)),
        ((7, 7), 61.0, ()),  # all have come equally far, so none keeps another waiting
        ((8, 7), 9.0, ()),
        ((0, 0), 61.0, ()),
    ],
)
def test_the_rank_that_has_issued_fewer_collectives_of_an_engine_is_to_blame(
    others: tuple[int, int], idle_s: float, ranks: tuple[int, ...]
) -> None:
    notes = [note(rank, count, idle_s) for rank, count in enumerate(others)]
    assert blame(notes, Patience(5.0, 60.0, 300.0)).ranks == ranks


def act(kind: str) -> None:
    """The fault, on the rank that has it."""
    if kind == "oom":
        import torch

        torch.empty(1 << 60, dtype=torch.uint8)
    if kind == "raise":
        raise ValueError("a fault in the engine")
    if kind == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def fault_in_backward(engine: str, kind: str, step: int) -> None:
    """The rank's engine has the fault in the middle of its backward pass of this step."""
    module, calls = wings.load(wings.ENGINES[engine]), []
    build: Callable[[Any], Any] = module.build

    def faulty(task: Any) -> Any:
        built = build(task)
        backward = built.backward

        def failing(loss: Any) -> None:
            calls.append(loss)
            if len(calls) == step:
                loss.register_hook(lambda _: act(kind))
            backward(loss)

        built.backward = failing
        return built

    module.build = faulty


def _rank_main(root: Path, rank: int, engine: str, kind: str, place: str) -> None:
    os.environ["MASTER_ADDR"], os.environ["DS_ACCELERATOR"] = "127.0.0.1", "cpu"
    if place == "backward" and rank == 1:
        fault_in_backward(engine, kind, step=2)
    elif place == "before":
        os.environ["ZLAB_FAULT"] = f"{kind}@step2:rank1"
    ended = run_recorded(AttemptPaths(root), RankInfo(rank, 2, rank, root / "rendezvous"), ENTRY)
    if isinstance(ended, BaseException):
        leave_failed()
    os._exit(0)


def failed(root: Path, engine: str, kind: str, place: str) -> Verdict | None:
    """How a run of two ranks with the fault in rank 1 ended, in which no process is left."""
    attempt = AttemptPaths(root)
    stage = {"ddp": 0, "fsdp2": 3, "deepspeed": 2}[engine]
    line = f"{RANKS} engine={engine} zero=stage{stage} measure.steps=4 resources.stuck_s=3"
    write_json_atomic(attempt.config, to_dict(config_of_line(line)))
    words = (root, engine, kind, place)
    ranks = [fork_context().Process(target=_rank_main, args=(root, rank, *words[1:])) for rank in range(2)]
    for rank in ranks:
        rank.start()
    deadline, exits = time.monotonic() + HANG_S, {}
    while len(exits) < 2 and time.monotonic() < deadline:
        for number, rank in enumerate(ranks):
            if rank.exitcode is not None and str(number) not in exits:
                exits[str(number)] = {"code": rank.exitcode, "time": time.time(), "monotonic": time.monotonic()}
        time.sleep(0.05)
    for rank in ranks:
        rank.kill()
    assert len(exits) == 2, "a rank did not end"
    write_json_atomic(attempt.exits, exits)
    return judge(look_at_ranks(attempt, 2), has_result=attempt.result.exists(), controller_alive=True)


STATES = {"raise": RunState.error, "sigkill": RunState.error, "hang": RunState.hang, "oom": RunState.oom}
TOLD = {"raise": "a fault in the engine", "sigkill": "SIGKILL", "hang": "", "oom": "out of memory"}
SHORT = [("ddp", "backward", "sigkill")]
CASES = [
    pytest.param(engine, place, kind, marks=[] if (engine, place, kind) in SHORT else pytest.mark.full)
    for engine in ("ddp", "fsdp2", "deepspeed")
    for place in ("backward", "before")
    for kind in STATES
]


@pytest.mark.parametrize(("engine", "place", "kind"), CASES)
def test_a_fault_in_a_rank_of_another_engine_ends_the_run_and_is_named(
    engine: str, place: str, kind: str, tmp_path: Path
) -> None:
    if importlib.util.find_spec(wings.ENGINES[engine]) is None:
        pytest.skip(f"engine={engine} is not part of this checkout")
    if engine == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed: pip install 'zero-lab[deepspeed]'")
    verdict = failed(tmp_path, engine, kind, place)
    assert verdict is not None
    assert (verdict.state, verdict.rank) == (STATES[kind], 1), verdict
    assert (TOLD[kind] if place == "backward" else "") in verdict.message


@pytest.mark.full
def test_a_sweep_goes_on_after_a_killed_rank_of_another_engine(tmp_path: Path) -> None:
    line = f"-m {RANKS} engine=zero,ddp measure.steps=4 output={tmp_path}".replace("output=out ", "")
    ended = command(f"{line} --json", "sigkill@step2:rank1")
    assert ended.returncode == 1, ended.stderr
    states = {row["label"]: row["state"] for row in json.loads(ended.stdout)["points"]}
    assert states["zero"] == states["ddp"] == "error"
    assert left_behind(tmp_path) == []
