"""An output folder that belongs to another user, is writable to everybody or has an unusable path is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator import cli
from orchestrator.config.cluster import Cluster, ClusterKind
from orchestrator.machine.hardware import Hardware
from orchestrator.planning.rules.output import (
    output_can_be_written_down,
    output_is_the_user_s,
    place_problems,
    slurm_takes_the_output,
)
from orchestrator.planning.rules.scene import Scene

SCENE = Scene(Hardware(cores=4, cpu="cpu"))
STRANGER = 61234


def trouble(output: Path) -> str:
    found = output_is_the_user_s(SCENE, str(output))
    return "" if found is None else found.found


def make(folder: Path, mode: int = 0o700) -> Path:
    folder.mkdir(parents=True)
    folder.chmod(mode)
    return folder


@pytest.fixture
def give_away() -> Callable[[Path], None]:
    """A function that gives a folder to another user."""
    if os.getuid() != 0:
        pytest.skip("only root can give folders to another user")
    return lambda folder: os.chown(folder, STRANGER, STRANGER)


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o775, 0o2770])
def test_the_users_own_folder_is_accepted_even_if_its_group_may_write_to_it(mode: int, tmp_path: Path) -> None:
    assert trouble(make(tmp_path / "out", mode)) == ""
    assert trouble(tmp_path / "new" / "folder") == ""


@pytest.mark.parametrize("mode", [0o777, 0o702, 0o1777])
def test_a_folder_that_everybody_may_write_to_is_refused(mode: int, tmp_path: Path) -> None:
    output = make(tmp_path / "out", mode)
    assert f"{output} is writable to others (d" in trouble(output)
    inside = make(tmp_path / "mine" / "points", mode)
    assert f"{inside} is writable to others" in trouble(tmp_path / "mine")


def test_a_parent_folder_that_everybody_may_write_to_is_refused_unless_it_is_sticky(tmp_path: Path) -> None:
    above = make(tmp_path / "above", 0o777)
    output = make(above / "deep" / "out")
    assert f"{above} is writable to everybody" in trouble(output)
    assert f"{above} is writable to everybody" in trouble(above / "not" / "there")
    above.chmod(0o1777)
    assert trouble(output) == ""


def test_a_link_is_checked_at_its_own_location_and_at_its_target(tmp_path: Path) -> None:
    target = make(tmp_path / "target", 0o777)
    (tmp_path / "link").symlink_to(target)
    assert "is writable to others" in trouble(tmp_path / "link")
    target.chmod(0o700)
    assert trouble(tmp_path / "link") == ""
    make(tmp_path / "open", 0o777)
    (tmp_path / "open" / "link").symlink_to(target)
    assert "is writable to everybody" in trouble(tmp_path / "open" / "link")


@pytest.mark.parametrize("name", ["", "points", "sweeps"])
def test_a_folder_of_another_user_is_refused(name: str, tmp_path: Path, give_away: Callable[[Path], None]) -> None:
    folder = make(tmp_path / "out" / name if name else tmp_path / "out")
    give_away(folder)
    assert f"{folder} belongs to user {STRANGER}" in trouble(tmp_path / "out")


def test_parent_folders_may_belong_to_another_user(tmp_path: Path, give_away: Callable[[Path], None]) -> None:
    project = make(tmp_path / "project", 0o2775)
    give_away(project)
    assert trouble(project / "me" / "out") == ""


def test_the_command_refuses_an_unsafe_output_in_one_line_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = make(tmp_path / "out", 0o777)
    line = ["zero=stage1", "tracking=none", f"output={output}", "model=llama_tiny"]
    for words in (line, ["-m", *line], ["--plan", *line]):
        assert cli.main(words) == 2
        told = capsys.readouterr().err.splitlines()
        assert [one for one in told if one.startswith(("error", "refused"))], told
        assert "output must be yours" in told[0]
        assert "Traceback" not in "".join(told)
    assert list(output.iterdir()) == []


def test_a_path_that_is_not_valid_utf_8_is_refused() -> None:
    assert output_can_be_written_down(SCENE, "/a/ünï#?%\n") is None
    found = output_can_be_written_down(SCENE, "/a/\udcff")
    assert found is not None
    assert "output must be a path in UTF-8, found /a/\\udcff" in str(found)


@pytest.mark.parametrize("name", ["a%jb", "a%20b", "a\nb", "a\tb"])
def test_characters_that_sbatch_would_misread_are_refused_only_on_slurm(name: str) -> None:
    slurm = Cluster(ClusterKind.slurm)
    assert slurm_takes_the_output(SCENE, f"/out/{name}", Cluster()) is None
    assert slurm_takes_the_output(SCENE, "/out/a#b ? c", slurm) is None
    found = slurm_takes_the_output(SCENE, f"/out/{name}", slurm)
    assert found is not None
    assert "without % and control characters" in found.rule


def test_an_output_that_cannot_be_created_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    for output, told in (
        ("/proc/x", "No such file"),  # root passes the permission check
        (str(tmp_path / ("long" * 100)), "name too long"),
        (str(tmp_path / "file" / "x"), "Not a directory"),
        (str(tmp_path / "broken"), "File exists"),
        ("a\0b", "null"),  # Python 3.13 says "null character"
    ):
        (problem,) = place_problems(output)
        assert "expected a folder that can be written to, found" in problem
        assert told in problem
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "file"]
