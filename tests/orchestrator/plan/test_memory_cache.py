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


class Child:
    """What is used of a process that was started ahead."""

    def __init__(self, *, lean: bool) -> None:
        self.lean, self.killed = lean, False

    def kill(self) -> None:
        self.killed = True

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.killed


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Child]:
    found: list[Child] = []

    def start(*, lean: bool) -> Child:
        found.append(Child(lean=lean))
        return found[-1]

    monkeypatch.setattr(memory_cache, "_start_child", start)
    return found


def test_a_child_that_was_started_ahead_is_the_one_that_is_asked(started: list[Child]) -> None:
    with memory_cache.started_ahead(needed=True):
        assert memory_cache._child(lean=True) is started[0]
        assert memory_cache._child(lean=True) is started[1]  # it answers one question
    assert not started[0].killed  # whoever has asked it ends it


def test_a_child_that_was_started_ahead_is_not_asked_about_adapters_and_is_killed(started: list[Child]) -> None:
    with memory_cache.started_ahead(needed=True):
        assert not memory_cache._child(lean=False).lean
    assert [child.killed for child in started] == [True, False]
    with memory_cache.started_ahead(needed=False):
        assert len(started) == 2


def test_adapters_are_found_in_all_that_is_asked() -> None:
    plain, lora = {"adapter": {"kind": "none"}}, {"adapter": {"kind": "lora"}}
    assert not memory_cache._has_adapter({"units": {"a": plain}, "activations": [{"b": plain}]})
    assert memory_cache._has_adapter({"units": {"a": lora}, "activations": []})
    assert memory_cache._has_adapter({"units": {}, "activations": [{"a": plain, "b": lora}]})


ANSWERED = {"problem": "ValueError: no"}


@pytest.mark.parametrize("first", [{"unknown": "ImportError: no"}, {"unknown": "AttributeError: no"}])
def test_what_a_lean_child_could_not_import_is_asked_of_a_complete_one(
    monkeypatch: pytest.MonkeyPatch, first: dict[str, str]
) -> None:
    plain = {"adapter": {"kind": "none"}}
    asked = {"units": {"a": plain, "b": plain}, "activations": [{"c": plain}, {"d": plain}]}
    found: list[tuple[list[str], bool]] = []

    def child(request: dict[str, Any], *more: Any) -> Iterator[tuple[str, Any]]:
        keys = [*request["units"], *(key for family in request["activations"] for key in family)]
        found.append((keys, more[-1]))
        yield from ((key, first if len(found) == 1 and key in "ac" else ANSWERED) for key in keys)

    monkeypatch.setattr(memory_cache, "_ask_child", child)
    answers = list(memory_cache._asked(asked, 4, None, 10.0))
    assert sorted(answers) == [(key, ANSWERED) for key in "abcd"]
    assert found == [(["a", "b", "c", "d"], True), (["a", "c"], False)]
