"""Families of activations that forks of the child process count have the answers of one process, byte for byte."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.ranks import run_alone
from points import config_of_line

from orchestrator.config.schema import to_dict
from orchestrator.plan.memory_cache import activations_key
from orchestrator.worker import shapes

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


def _lines(asked: list[Family], path: Path, processes: int, killed: str | None) -> list[str]:
    """The lines that are written for the families; the fork that takes the family of this key is killed."""
    answer = shapes._answer_family

    def dies(family: Family, to: shapes._Answers) -> None:
        if killed in family:
            to._out.write('["torn')  # in the middle of a line
            to._out.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        answer(family, to)

    with pytest.MonkeyPatch.context() as patch, path.open("w", encoding="utf-8") as file:
        patch.setattr(shapes, "_answer_family", dies)
        shapes._answer_families(asked, shapes._Answers(file), processes)
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line]


def _counted(path: Path, processes: int, killed: int | None) -> list[str]:
    asked = families()
    return _lines(asked, path, processes, None if killed is None else next(iter(asked[killed])))


Count = Callable[[int, int | None], list[str]]


@pytest.fixture
def count(tmp_path: Path) -> Count:
    def counted(processes: int, killed: int | None) -> list[str]:
        found: list[str] = run_alone(_counted, tmp_path / "answers", processes, killed)
        return found

    return counted


@pytest.mark.full
def test_forked_answers_equal_those_of_one_process_byte_for_byte(count: Count) -> None:
    alone, forked = count(1, None), count(3, None)
    assert len(alone) == len(forked) >= 4 * 5
    assert sorted(alone) == sorted(forked)


@pytest.mark.full
def test_a_fork_that_dies_is_told_and_the_other_families_are_answered(count: Count) -> None:
    alone = dict(json.loads(line) for line in count(1, None))
    found = dict(json.loads(line) for line in count(2, 1) if not line.startswith('["torn'))
    lost = families()[1]
    for key in lost:
        assert found.pop(key) == {"unknown": "a process that counted ended with SIGKILL", "passing": True}
    whole = {key: answer for key, answer in alone.items() if key not in lost}
    assert found.items() <= alone.items()
    assert {key for key in whole if not key.startswith(("trace-", "work-"))} <= found.keys()
