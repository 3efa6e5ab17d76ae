"""Families of activations that forks of the child process count have the answers of one process, byte for byte."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from harness.patience import HANG_S
from points import config_of_line

from orchestrator.config.schema import RunConfig, to_dict
from orchestrator.wings.predict import shapes
from orchestrator.wings.predict.memory_cache import activations_key

Family = dict[str, Any]
ROOT = Path(__file__).resolve().parents[4]
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


def main(path: Path, processes: int, killed: int, times: int) -> None:
    """Prints the lines that are told of the families; the fork that takes the family `killed` is killed, so often."""
    asked, answers = families(), shapes.answers
    key = next(iter(asked[killed]))

    def dies(configs: Sequence[RunConfig]) -> Iterator[tuple[str, Any]]:
        before = len(path.read_bytes()) if path.exists() else 0
        if key in map(activations_key, configs) and before < times:
            path.write_bytes(b"x" * (before + 1))
            os.kill(os.getpid(), signal.SIGKILL)
        return answers(configs)

    shapes.answers = dies  # type: ignore[assignment]  # before it is forked
    shapes.answer_families(asked, print, processes)


Count = Callable[..., list[str]]


@pytest.fixture
def count(tmp_path: Path) -> Count:
    def counted(processes: int, killed: int = 0, times: int = 0) -> list[str]:
        words = [__file__, str(tmp_path / "killed"), *map(str, (processes, killed, times))]
        folders = ROOT, ROOT / "tests", ROOT / "tests/orchestrator"
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environ, timeout=HANG_S)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return counted


@pytest.mark.full
@pytest.mark.parametrize("times", [0, 1], ids=["all live", "one dies"])
def test_forked_answers_equal_those_of_one_process_byte_for_byte(count: Count, times: int) -> None:
    """Also if one process dies: what it had taken is counted again."""
    alone = sorted(count(1))
    forked = sorted(count(2, 1, times))
    assert len(alone) >= 4 * 5
    assert forked == alone


@pytest.mark.full
def test_what_fails_twice_is_told_and_the_other_families_are_answered(count: Count) -> None:
    alone = dict(json.loads(line) for line in count(1))
    found = dict(json.loads(line) for line in count(2, 1, 2))
    lost = families()[1]
    for key in lost:
        assert found.pop(key) == {"unknown": "the process that counted them died twice", "passing": True}
    assert found.items() <= alone.items()
    assert {key for key in alone if key not in lost and not key.startswith("trace-")} <= found.keys()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
