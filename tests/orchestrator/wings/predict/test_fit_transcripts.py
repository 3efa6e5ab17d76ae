"""The transcripts of docs/fit.md that are cheap to make again are what the command prints."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from harness.warm_shapes import WarmShapes

from orchestrator import cli
from orchestrator.text.paths import program
from orchestrator.wings.predict import counting_child

PAGE = (Path(__file__).resolve().parents[4] / "docs" / "fit.md").read_text(encoding="utf-8")
PROMPT = "$ python run.py "


def transcripts(text: str) -> dict[str, str]:
    """What the page says that each command prints."""
    blocks = [block for block in PAGE.split("```\n") if block.startswith(PROMPT) and text in block]
    return dict(block.removeprefix(PROMPT).split("\n", 1) for block in blocks)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def counted(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(counting_child, "start_process", WarmShapes)


def printed(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(shlex.split(line)) == 0
    return capsys.readouterr().out.replace(program(), "python run.py")


@pytest.mark.parametrize("line", [*transcripts("--estimator"), *transcripts("model=qwen2_5_0_5b")])
def test_a_transcript_is_what_the_command_prints(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = transcripts(line)[line]
    assert [one.rstrip() for one in printed(line, capsys).splitlines()] == page.splitlines()
