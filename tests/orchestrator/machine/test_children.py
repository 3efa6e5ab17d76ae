"""No process of zero-lab imports modules from the current folder, whatever files are in it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.patience import HANG_S
from points import TINY

from orchestrator.commands import ui as dashboard
from orchestrator.machine import children

ROOT = Path(__file__).resolve().parents[3]
# Names that a user's own files may have, and names that an attacker would choose to have a file imported.
NAMES = ("queue", "random", "yaml", "torch", "numpy", "psutil", "rich", "submitit", "transformers", "json", "argparse")


@pytest.fixture
def trapped(tmp_path: Path) -> Path:
    """A folder of modules that record it when they are imported."""
    for name in (*NAMES, "orchestrator", "zero_runtime", "mlflow"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path)!r} + '/imported', 'a').write({name!r} + ' ')\n")
    return tmp_path


def run(words: list[str], cwd: Path, environ: dict[str, str]) -> str:
    done = subprocess.run(words, cwd=cwd, env=environ, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    assert not (cwd / "imported").exists(), (cwd / "imported").read_text()
    return done.stdout


@pytest.mark.parametrize("path", [None, "", ":", "HERE", ":HERE", "HERE::HERE", "HERE:"])
def test_the_path_of_a_child_has_our_code_and_pythonpath_but_not_the_current_folder(
    path: str | None, trapped: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    mine = tmp_path_factory.mktemp("mine")
    (mine / "shown.py").write_text(
        "import sys, queue, random, json, argparse; print(*sys.argv[1:], *sys.path, sep='\\n')"
    )
    base = {key: value for key, value in os.environ.items() if key != children.PYTHONPATH}
    if path is not None:
        base[children.PYTHONPATH] = path.replace("HERE", str(mine))
    if path is None or "HERE" not in path:
        assert "usage" in run(children.words("json.tool", "--help"), trapped, children.environment(base))
        return
    for flags in ((), ("-u",)):
        told = run(children.words("shown", "a b", "--c", flags=flags), trapped, children.environment(base)).splitlines()
        assert told[:2] == ["a b", "--c"]
        assert str(mine) in told
        assert str(ROOT) in told
        assert not {"", str(trapped), str(ROOT / "orchestrator")} & set(told)


def test_children_start_if_pythonsafepath_is_set(trapped: Path) -> None:
    environ = {**os.environ, "PYTHONSAFEPATH": "1", children.PYTHONPATH: str(ROOT / "tests")}
    told = run(children.words("json.tool", "--help"), trapped, environ)
    assert "usage" in told


def test_a_dot_in_pythonpath_is_kept_and_empty_entries_are_removed() -> None:
    assert children.environment({"PYTHONPATH": ".::/mine:", "A": "b"}) == {"PYTHONPATH": ".:/mine", "A": "b"}
    assert children.environment({"A": "b"}) == {"A": "b"}


@pytest.mark.full
def test_a_run_imports_nothing_from_the_current_folder(trapped: Path) -> None:
    environ = {**os.environ, children.PYTHONPATH: ":"}
    run([sys.executable, str(ROOT / "run.py"), *TINY.split()], trapped, environ)
    assert list(trapped.glob("out/points/*/attempts/01/result.json"))


@pytest.mark.full
def test_a_sweep_with_tracking_imports_nothing_from_the_current_folder(trapped: Path) -> None:
    line = TINY.replace("tracking=none", "").replace("zero=stage1", "zero=stage0,stage1")
    run([sys.executable, str(ROOT / "run.py"), "-m", *line.split()], trapped, dict(os.environ))
    assert len(list(trapped.glob("out/points/*/attempts/01/result.json"))) == 2
    assert (trapped / "out" / "mlflow.db").exists()


@pytest.mark.parametrize("words", [["-c", "from orchestrator.start import console; console()"]])
def test_our_programs_started_with_python_m_or_c_ignore_the_current_folder(words: list[str], tmp_path: Path) -> None:
    # None is called `orchestrator`: python -m and -c find the first module by the path that Python itself sets up.
    for name in ("queue", "random", "yaml", "torch", "numpy", "psutil", "hydra", "omegaconf"):
        (tmp_path / f"{name}.py").write_text(f"open('imported', 'a').write({name!r})\n")
    told = run([sys.executable, *words, "--help"], tmp_path, {**os.environ, children.PYTHONPATH: f"{ROOT}:"})
    assert told


def test_a_current_folder_that_was_deleted_is_reported_in_one_line(tmp_path: Path) -> None:
    line = ["/bin/sh", "-c", 'rmdir "$PWD"; exec "$@"', "sh", sys.executable, str(ROOT / "run.py"), "list"]
    (tmp_path / "gone").mkdir()
    done = subprocess.run(line, cwd=tmp_path / "gone", capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: the current folder was deleted: change to one that exists\n"


def test_the_dashboards_server_runs_in_the_root_folder(
    trapped: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path_factory.mktemp("output")
    monkeypatch.chdir(trapped)
    assert (
        dashboard.server_command("sqlite:///x", output, 5000, "127.0.0.1")[:3] == children.words("mlflow", "server")[:3]
    )
    code = "import os; print(os.getcwd())"
    log = output / "log"
    dashboard._until_interrupt([sys.executable, "-c", code], {}, log, dashboard.Screen())
    assert log.read_text() == "/\n"


@pytest.mark.parametrize("file", sorted((ROOT / "orchestrator").rglob("*.py")), ids=lambda file: file.name)
def test_only_two_modules_name_the_interpreter(file: Path) -> None:
    names = {ast.unparse(node) for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)}
    assert "sys.executable" not in names or file.name in ("children.py", "paths.py"), (
        "children.words makes such commands"
    )


def test_a_child_of_another_checkout_imports_its_modules(trapped: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    program = Path(children.program_in(str(other)))
    program.parent.mkdir(parents=True)
    program.write_text(Path(children.__file__).read_text())
    (other / "orchestrator" / "__init__.py").touch()
    (other / "orchestrator" / "who.py").write_text("print(__file__)\n")
    told = run(children.words("orchestrator.who", code=str(other)), trapped, children.environment(dict(os.environ)))
    assert told.strip() == str(other / "orchestrator" / "who.py")
