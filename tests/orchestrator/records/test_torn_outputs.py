"""One bad record in an output folder is reported, and every verb and every sweep works for all other records."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from ended_output import FILES, Scene, ended
from harness.attack_counts import Tally
from harness.corruptions import CORRUPTIONS
from made_sweep import write_sweep

from orchestrator import cli
from orchestrator.commands import verbs
from orchestrator.records import sweep_record
from orchestrator.records.record_file import read_json
from orchestrator.records.run_state import RunState
from orchestrator.records.sweep_record import SweepPaths
from orchestrator.report import comparison

VERBS = (["list"], ["list", "--json"], ["status"], ["status", "--json"], ["report"], ["watch"], ["logs"])


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("scene") / "outputs")


@pytest.fixture
def scene(pristine: Scene) -> Scene:
    pristine.restore()
    return pristine


Capture = pytest.CaptureFixture[bytes]
SHORT = ("half", "another record", "missing")  # invalid JSON, another shape, no file


def printed(capture: Capture) -> tuple[str, str]:
    """stdout and stderr as text; undecodable bytes are replaced, since `logs` prints the bytes of a log unchanged."""
    out, err = capture.readouterr()
    return out.decode(errors="replace"), err.decode(errors="replace")


def go_on(scene: Scene, file: str, corruption: str, capture: Capture, verbs: list[list[str]]) -> None:
    path = FILES[file](scene)
    results = {one: read_json(one) for one in scene.output.glob("points/*/attempts/*/result.json") if one != path}
    CORRUPTIONS[corruption](path)
    for verb in verbs:
        code = cli.main([*verb, "--output", str(scene.output)])
        out, err = printed(capture)
        assert code in (0, 1, 2, 3), out + err
        assert code != 2 or err.startswith("error: "), err
        if verb == ["list"]:
            assert scene.other.name in out
    assert cli.main(["status", scene.other.name, "--output", str(scene.output)]) in (0, 1)
    planned = scene.plan()
    assert [one.decision for one in planned[1:3]] == [RunState.cached] * 2
    for one, point in zip(planned, scene.points, strict=True):
        if one.decision is RunState.queued:
            ended(scene.output, point)
    again = sweep_record.open_sweep(scene.output, "torn", scene.plan(), {})
    assert again.log.is_file() or not again.log.exists()
    states = [one.state for one in sweep_record.standings(again)]
    assert states == [RunState.cached] * 3 + [RunState.error]
    assert cli.main(["status", "--output", str(scene.output)]) == 1
    assert {one: read_json(one) for one in results} == results


def test_outputs_that_were_moved_or_copied_have_the_same_answers(tmp_path: Path) -> None:
    """As people take them from a cluster."""
    sweep = write_sweep(tmp_path / "outputs", 4, failed=[0])
    told = [(one.state, one.result) for one in sweep_record.standings(sweep)]
    assert sum(result is not None for _, result in told) == 3
    moved = (tmp_path / "outputs").rename(tmp_path / "elsewhere") / "sweeps" / sweep.name
    assert [(one.state, one.result) for one in sweep_record.standings(SweepPaths(moved))] == told


@pytest.mark.parametrize("file", FILES)
def test_a_sweep_can_be_repeated_after_any_one_file_is_damaged(file: str, scene: Scene, capsysbinary: Capture) -> None:
    for number, corruption in enumerate(SHORT):
        scene.restore()
        go_on(scene, file, corruption, capsysbinary, [list(VERBS[number % len(VERBS)]), ["list"]])


@pytest.mark.full
@pytest.mark.parametrize("corruption", CORRUPTIONS)
@pytest.mark.parametrize("file", FILES)
def test_every_verb_works_after_any_one_file_is_damaged(
    file: str, corruption: str, scene: Scene, capsysbinary: Capture, tally: Tally
) -> None:
    go_on(scene, file, corruption, capsysbinary, [list(verb) for verb in VERBS])
    tally("torn records", commands=len(VERBS) + 2, tracebacks=0, wrong_exit_codes=0, results_lost=0)


def test_another_users_output_is_reported_in_one_line(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("list", "status"):
        assert cli.main([verb, "--output", str(scene.output)]) in (0, 1)  # as this user first, to import modules
        capsys.readouterr()
        with as_another_user(scene.output):
            assert cli.main([verb, "--output", str(scene.output)]) == 1
        shown = capsys.readouterr()
        assert shown.out == ""
        assert re.fullmatch(
            r"error: .*: Permission denied; it belongs to another user: give output=FOLDER .*\n", shown.err
        ), shown.err


@contextlib.contextmanager
def as_another_user(output: Path) -> Iterator[None]:
    """Root becomes a user that owns nothing; any other user loses access to the sweeps folder."""
    if os.geteuid() == 0:
        os.seteuid(65534)
    else:
        (output / "sweeps").chmod(0)
    try:
        yield
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
        (output / "sweeps").chmod(0o700)


def test_only_the_end_of_a_huge_log_is_shown(
    scene: Scene, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verbs, "LOG_BYTES", 4)
    assert cli.main(["logs", "--output", str(scene.output)]) == 0
    out, err = capsys.readouterr()
    assert out == "ine\n"
    assert "rank1.log has 7 B, of which the last 4 B follow" in err


def test_a_report_that_cannot_be_written_is_still_shown(
    scene: Scene,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(path: Path, text: str, *, lasting: bool) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(comparison, "write_text_atomic", refused)
    assert cli.main(["report", "--output", str(scene.output)]) == 1  # as without the error: one point failed
    assert "stage2" in capsys.readouterr().out
    assert f"warning: {scene.sweep.report} could not be written: Read-only file system" in caplog.text


def test_a_sweep_with_a_bad_record_counts_as_on_a_cluster_if_its_points_have_jobs(scene: Scene) -> None:
    assert not sweep_record.is_on_cluster(scene.sweep)
    scene.sweep.sweep.write_text("{")
    assert not sweep_record.is_on_cluster(scene.sweep)
    sweep_record.tell(scene.sweep, "started", label="stage0", attempt=str(scene.first.root), slots=[], job="7")
    assert sweep_record.is_on_cluster(scene.sweep)
