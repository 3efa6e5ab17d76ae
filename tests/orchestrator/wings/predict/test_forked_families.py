"""Families of activations that forks of the child process count have the answers of one process, byte for byte."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.ranks import run_alone
from points import config_of_line

from orchestrator.config.schema import to_dict
from orchestrator.wings.predict import shapes
from orchestrator.wings.predict.memory_cache import activations_key

Family = dict[str, Any]
LINES = [
    f"model=llama_tiny resources.device=cpu batch.seq=32 recompute={kind} loss={loss}"
    for kind in ("none", "full")
    for loss in ("full", "tiled")
]


def families() -> list[Family]:
    found = []
    for line in LINES:
        configs = [config_of_line(f"{line} batch.micro={micro}") for micro in (1, 2, 4)]
        found.append({activations_key(config): to_dict(config) for config in configs})
    return found


def _lines(asked: list[Family], path: Path, processes: int, killed: str | None, times: int) -> list[str]:
    """The lines that are written for the families; the fork that takes the family of this key is killed, so often."""
    answer, counter = shapes._answer_family, path.with_name("killed")

    def dies(family: Family, to: shapes._Answers) -> None:
        before = len(counter.read_bytes()) if counter.exists() else 0
        if killed in family and before < times:
            counter.write_bytes(b"x" * (before + 1))
            print("what():  no room", "frame #0", sep="\n", file=sys.stderr, flush=True)
            to._out.write('["torn')  # in the middle of a line
            to._out.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        answer(family, to)

    with pytest.MonkeyPatch.context() as patch, path.open("w", encoding="utf-8") as file:
        patch.setattr(shapes, "_answer_family", dies)
        shapes._answer_families(asked, shapes._Answers(file), processes)
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line]


def _counted(path: Path, processes: int, killed: int | None, times: int) -> list[str]:
    asked = families()
    return _lines(asked, path, processes, None if killed is None else next(iter(asked[killed])), times)


Count = Callable[..., list[str]]


@pytest.fixture
def count(tmp_path: Path) -> Count:
    def counted(processes: int, killed: int | None = None, times: int = 0) -> list[str]:
        found: list[str] = run_alone(_counted, tmp_path / "answers", processes, killed, times)
        return found

    return counted


@pytest.mark.full
@pytest.mark.parametrize("times", [0, 1], ids=["all live", "one dies"])
def test_forked_answers_equal_those_of_one_process_byte_for_byte(count: Count, times: int) -> None:
    """Also if one process dies: what it had taken is counted again."""
    alone = sorted(count(1))
    forked = sorted(line for line in count(2, 1, times) if not line.startswith('["torn'))
    assert len(alone) >= 4 * 5
    assert forked == alone


@pytest.mark.full
def test_what_fails_twice_is_told_with_its_last_words_and_the_other_families_are_answered(count: Count) -> None:
    alone = dict(json.loads(line) for line in count(1))
    found = dict(json.loads(line) for line in count(2, 1, 2) if not line.startswith('["torn'))
    lost = families()[1]
    for key in lost:
        why = "the process that counted them ended with SIGKILL: what():  no room"
        assert found.pop(key) == {"unknown": why, "passing": True}
    assert found.items() <= alone.items()
    assert {key for key in alone if key not in lost and not key.startswith("trace-")} <= found.keys()
