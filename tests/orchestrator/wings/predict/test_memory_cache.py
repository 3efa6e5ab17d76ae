"""Cached answers about memory are an optimization: nothing fails because they cannot be read or written."""

from __future__ import annotations

import io
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from points import config_of_line

from orchestrator.config.schema import from_dict
from orchestrator.machine import provenance
from orchestrator.wings.predict import counting_child, memory_cache


def test_code_that_cannot_be_read_means_that_no_answer_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    def vanished() -> str:
        raise FileNotFoundError("setup.py")

    monkeypatch.setattr(memory_cache, "folder", vanished)
    memory_cache.store("activations-0", {"kept": 1})
    assert memory_cache.stored("activations-0") is None


def test_answers_of_other_versions_or_code_are_not_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "kernels" / "cpu").mkdir(parents=True)
    (tmp_path / "kernels" / "cpu" / "adamw.cpp").write_text("one")
    monkeypatch.setattr(provenance, "CODE", tmp_path)
    monkeypatch.setattr(provenance, "code_digest", provenance.code_digest.__wrapped__)
    versions = dict.fromkeys(memory_cache.LIBRARIES, "1.0")
    monkeypatch.setattr(provenance, "version_of", versions.get)

    def folder() -> str:
        return memory_cache.folder.__wrapped__()

    found = {folder()}
    for library in versions:
        versions[library] = "1.0+cu130"
        found.add(folder())
    (tmp_path / "kernels" / "cpu" / "adamw.cpp").write_text("two")
    found.add(folder())
    monkeypatch.setattr(platform, "python_version", lambda: "3.99.0")
    found.add(folder())
    assert len(found) == len(versions) + 3


def child_of(answers: Callable[[dict[str, Any]], Iterator[tuple[str, Any]]]) -> Callable[..., Any]:
    """In place of `Counting.answers`."""

    def ask(counting: counting_child.Counting) -> Iterator[tuple[str, Any]]:
        return answers(counting._asked)  # type: ignore[arg-type]

    return ask


def test_only_the_same_question_has_a_stored_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Traces of single micro-batches do not determine those between, and what was asked before changes no answer."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[list[int]] = []

    def answers(request: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        for family in request["activations"]:
            asked.append(sorted(config["batch"]["micro"] for config in family.values()))
            place = memory_cache.trace_key([from_dict(config) for config in family.values()], 2, 8)
            yield place, {"linear": len(asked)}
            yield from ((key, {"bytes": {}}) for key in family)

    monkeypatch.setattr(counting_child.Counting, "answers", child_of(answers))
    two, eight = (config_of_line(f"batch.micro={micro} resources.device=cpu") for micro in (2, 8))
    found = []
    for configs, together in (([two], False), ([two, eight], True), ([two, eight], True), ([two, eight], False)):
        known = memory_cache.answers([], configs, together=together)
        found.append([known[key]["linear"] for key in known if key.startswith(memory_cache.TRACE)])
    assert asked == [[2], [2, 8], [8]]
    assert found == [[1], [2], [2], [1, 3]]


def test_half_an_answer_is_not_stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A child that dies in the middle of a question leaves nothing of it, and its answers of other questions."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kinds = [(kind, micro) for kind in ("none", "full") for micro in (2, 4)]
    configs = [config_of_line(f"recompute={kind} batch.micro={micro} resources.device=cpu") for kind, micro in kinds]
    asked: list[int] = []

    def answers(request: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        asked.append(len(request["activations"]))
        keys = [key for family in request["activations"] for key in family]
        yield from ((key, {"bytes": {}}) for key in (keys[:3] if len(asked) == 1 else keys))

    monkeypatch.setattr(counting_child.Counting, "answers", child_of(answers))
    first = memory_cache.answers([], configs, together=True)
    assert sum("unknown" in answer for answer in first.values()) == 1
    second = memory_cache.answers([], configs, together=True)
    assert not any("unknown" in answer for answer in second.values())
    assert memory_cache.answers([], configs, together=True) == second
    assert asked == [2, 1]


class Child:
    """In place of a process that was started, and answers nothing."""

    def __init__(self) -> None:
        self.killed = False
        self.process = SimpleNamespace(stdin=io.StringIO(), stdout=())

    def ended(self) -> str:
        return "ended"

    def kill(self) -> None:
        self.killed = True


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Child]:
    found: list[Child] = []

    def start() -> Child:
        found.append(Child())
        return found[-1]

    monkeypatch.setattr(counting_child, "Child", start)
    return found


def ask() -> None:
    assert list(counting_child.Counting({"units": {"a": {}}, "activations": []}).answers()) == []


def test_a_child_that_was_started_ahead_is_the_one_that_is_asked(started: list[Child]) -> None:
    with counting_child.started_ahead(needed=True):
        ask()
        assert [child.killed for child in started] == [True]  # it answers one question
        ask()
    assert [child.killed for child in started] == [True, True]


def test_a_child_that_was_started_ahead_and_not_asked_is_killed(started: list[Child]) -> None:
    with counting_child.started_ahead(needed=True):
        assert [child.killed for child in started] == [False]
    assert [child.killed for child in started] == [True]
    with counting_child.started_ahead(needed=False):
        assert len(started) == 1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("zero.unit_numel=null", "zero.unit_numel=1000"),
        ("precision.keep_dtype=[]", "precision.keep_dtype=['*norm*']"),
        ("optimizer=adamw", "optimizer=muon"),
        ("precision.weights=null", "precision.weights=int4"),
        ("precision.weights=int8", "precision.weights=int4"),
    ],
)
def test_what_changes_the_units_of_a_model_changes_the_key_of_its_traces(before: str, after: str) -> None:
    """A trace has marks by the number of a unit."""
    line = "model=llama_tiny adapter=lora resources.device=cpu precision=fp32"
    keys = {memory_cache.activations_key(config_of_line(f"{line} {one}")) for one in (before, after)}
    assert len(keys) == 2
