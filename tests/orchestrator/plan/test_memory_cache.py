"""Cached answers about memory are an optimization: nothing fails because they cannot be read or written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from points import config_of_line

from orchestrator.plan import memory_cache


def test_code_that_cannot_be_read_means_that_no_answer_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    def vanished() -> str:
        raise FileNotFoundError("setup.py")

    monkeypatch.setattr(memory_cache, "folder", vanished)
    memory_cache.store("activations-0", {"kept": 1})
    assert memory_cache.stored("activations-0") is None


def test_micro_batches_that_were_counted_one_by_one_are_counted_again_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Else `fit` would know each of them and none between: two traces of one micro-batch each are no line."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[list[int]] = []

    def child(request: dict[str, Any], *_: Any) -> Iterator[tuple[str, Any]]:
        for family in request["activations"]:
            asked.append(sorted(config["batch"]["micro"] for config in family.values()))
            yield from ((key, {"bytes": {}}) for key in family)

    monkeypatch.setattr(memory_cache, "_ask_child", child)
    two, eight = (config_of_line(f"batch.micro={micro} resources.device=cpu") for micro in (2, 8))
    for configs in ([two], [eight], [two, eight], [two, eight], [two]):
        memory_cache.answers([], configs)
    assert asked == [[2], [8], [2, 8]]
