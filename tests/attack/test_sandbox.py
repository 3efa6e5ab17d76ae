"""The sandbox detects forbidden actions, and a failing input is shown with the variables that repeat it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import trials
from sandbox import SANDBOX
from trials import WRONG, Trial, Wrong, attack


def raised(error: BaseException) -> None:
    raise error


def spun() -> None:
    while True:
        pass


FOUND: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a process": ("started", lambda folder: subprocess.run([sys.executable, "--version"], check=False)),
    "a fork": ("started", lambda folder: os.fork()),
    "a shell": ("started", lambda folder: os.system("true")),
    "a connection": ("started", lambda folder: socket.create_connection(("127.0.0.1", 9))),
    "a library": ("imported", lambda folder: __import__("zlab_canary")),
    "a new file": ("changed", lambda folder: (folder / "new").write_text("x")),
    "a file opened to append": ("changed", lambda folder: (folder / "there").open("a")),
    "a descriptor to write": ("changed", lambda folder: os.open(folder / "there", os.O_RDWR)),
    "a file removed": ("changed", lambda folder: (folder / "there").unlink()),
    "a file renamed away": ("changed", lambda folder: (folder / "there").rename(folder / "mine" / "x")),
    "rights": ("changed", lambda folder: (folder / "there").chmod(0)),
    "an exception": ("tracebacks", lambda folder: raised(KeyError("x"))),
    "an exception that hides what was stopped": ("started", lambda folder: raised(hidden())),
    "an exit": ("wrong exit codes", lambda folder: sys.exit(0)),
    "a judgement": ("unclear messages", lambda folder: raised(Wrong("unclear messages", "two lines"))),
    "no end": ("endless", lambda folder: spun()),
}


def hidden() -> BaseException:
    try:
        os.fork()
    except BaseException:  # as a library might
        return ValueError("something else")
    return ValueError("it forked")


@pytest.mark.parametrize("name", FOUND)
def test_forbidden_actions_are_stopped_and_counted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, call = FOUND[name]
    (tmp_path / "there").write_text("x")
    (tmp_path / "mine").mkdir()
    monkeypatch.setattr("sandbox.CPU_S", 0.05)
    counted: dict[str, int] = {}

    def tally(door: str, **counts: int) -> None:
        counted.update(counts)

    def case(trial: Trial) -> None:
        trial.shown = "the input"
        trial.watched(lambda: call(tmp_path), may_write=[tmp_path / "mine"])

    with pytest.raises(pytest.fail.Exception) as failure:
        attack("a door", [7], tally, case)
    assert f"ZLAB_ATTACK_SEED={trials.SEED} ZLAB_ATTACK_ONLY=7" in str(failure.value)
    assert "the input" in str(failure.value)
    wanted = {one.replace(" ", "_"): int(one == kind) for one in WRONG}
    assert counted == {"inputs": 1, **wanted}
    assert (tmp_path / "there").read_text() == "x"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "there"]


def test_allowed_changes_and_imports_are_not_stopped(tmp_path: Path) -> None:
    def work() -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "b").write_text("x")
        (tmp_path / "a" / "b").unlink()
        (tmp_path / "a").rmdir()
        __import__("orchestrator.compose.labels")

    with SANDBOX.watching([tmp_path]):
        work()
    assert SANDBOX.seen == []
    (tmp_path / "after").write_text("it is deaf again")


def test_an_input_depends_only_on_its_number() -> None:
    drawn: list[float] = []
    for tried in ([1, 2, 3], [3], [2]):
        attack("a door", tried, lambda door, **counts: None, lambda trial: drawn.append(trial.chance.random()))
    assert drawn[2] == drawn[3]
    assert drawn[1] == drawn[4]
    assert len(set(drawn)) == 3
