"""The words of verbs that take no settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator import cli
from orchestrator.commands import verbs


def test_the_output_folder_of_a_verb_is_given_as_a_flag_or_as_a_run_takes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["--output", str(tmp_path)], [f"--output={tmp_path}"], [f"output={tmp_path}"]):
        assert verbs.main(["list", *words]) == 0
        assert capsys.readouterr().out.startswith(f"no sweeps in '{tmp_path}'")
        assert cli.main(["ui", *words]) == 2  # there is no store to show
        assert f"there is no {tmp_path}/mlflow.db" in capsys.readouterr().err


def test_another_setting_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "zero=stage1", "output=a", "seed=1", "batch.seq=2"]) == 2
    assert "unrecognized arguments: seed=1 batch.seq=2" in capsys.readouterr().err
