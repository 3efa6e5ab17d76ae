"""The contents of a point's files are part of its identity, and only files that changed are read again."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from points import make_config, make_point
from stub_worker import make_result

from orchestrator.config.schema import Data, DataKind, Model, RunConfig, Tokenizer, to_dict
from orchestrator.planning import decision
from orchestrator.planning.point import Wishes
from orchestrator.records import contents
from orchestrator.records.record_file import read_json, write_json_atomic
from orchestrator.records.run_record import Attempt, new_attempt
from orchestrator.records.run_state import RunState
from orchestrator.records.sweep_record import Planned

LONG_AGO_NS = 10**18


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(contents, "SETTLED_NS", -(10**12))  # as if no file had changed recently
    return tmp_path / "cache"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list to which the name of each file is added when it is read."""
    found: list[str] = []
    read = contents._read_digest

    def noted(path: Path, *, skips: bool) -> Any:
        found.append(path.name)
        return read(path, skips=skips)

    monkeypatch.setattr(contents, "_read_digest", noted)
    return found


def of_text(tmp_path: Path, path: Path) -> RunConfig:
    return replace(make_config(tmp_path / "out"), data=Data(DataKind.text, str(path)))


def held(config: RunConfig) -> dict[str, str]:
    return contents.of(to_dict(config))


def decided(config: RunConfig, wishes: Wishes | None = None) -> Planned:
    (planned,) = decision.decide([make_point(config)], Path(config.output), lambda _: "cpu", wishes or Wishes(), {})
    return planned


def measure(config: RunConfig) -> Attempt:
    attempt = new_attempt(config.output, to_dict(config), "a", "cpu")
    for state in (RunState.starting, RunState.running):
        attempt.move(state)
    write_json_atomic(attempt.paths.result, make_result(config))
    attempt.move(RunState.ok)
    return attempt


def test_a_text_that_was_overwritten_is_measured_again_and_the_plan_says_why(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one")
    config = of_text(tmp_path, text)
    first = measure(config)
    assert decided(config).decision is RunState.cached
    stat = text.stat()
    text.write_text("two")
    os.utime(text, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # size and modification time stay the same
    again = decided(config)
    assert again.decision is RunState.queued
    day = decision._day(read_json(first.paths.state) or {})
    assert again.reason == f"the data at {text} changed since it was measured on {day}"
    assert decided(config, Wishes(fresh=True)).reason == ""
    text.write_text("one")
    assert decided(config).attempt == str(first.paths.root), "what was measured with these bytes is an answer again"


def test_attempts_with_different_contents_share_the_configurations_folder_and_checkpoints(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one")
    first = measure(of_text(tmp_path, text))
    text.write_text("two")
    second = measure(of_text(tmp_path, text))
    assert first.point != second.point
    assert first.paths.checkpoints == second.paths.checkpoints
    assert first.paths.root.name == "01"
    assert second.paths.root.name == "02"


def test_a_point_that_reads_no_files_has_an_identity_without_a_hash_of_contents(tmp_path: Path) -> None:
    config = make_config(tmp_path / "out")
    assert held(config) == {}
    assert "-" not in measure(config).point
    assert decided(config).decision is RunState.cached


def test_weights_and_tokenizer_are_hashed_separately_and_other_files_do_not_count(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("model.safetensors", "tokenizer.json", "README.md"):
        (folder / name).write_text(name)
    model = Model("m", "llama", {}, str(folder))
    config = replace(make_config(tmp_path / "out"), model=model, data=Data(tokenizer=Tokenizer.model))
    before = held(config)
    assert set(before) == {"model", "tokenizer"}
    (folder / "README.md").write_text("other")
    os.mkfifo(folder / "pipe.safetensors")  # reading it would block
    assert held(config) == before
    measure(config)
    (folder / "model.safetensors").write_text("halved")
    assert held(config)["tokenizer"] == before["tokenizer"]
    assert decided(config).reason.startswith(f"the weights at {folder} changed since")
    (folder / "tokenizer.json").write_text("other")
    assert decided(config).reason.startswith(f"the weights at {folder} and the tokenizer at {folder} changed since")
    for place in ("chat_template.jinja", "additional_chat_templates/default.jinja"):
        before = held(config)
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).write_text("{{ messages }}")
        assert {name for name, digest in held(config).items() if digest != before[name]} == {"tokenizer"}
    by_bytes = replace(config, data=Data(tokenizer=Tokenizer.bytes))
    assert set(held(by_bytes)) == {"model"}


def test_only_the_files_that_are_read_count_in_a_folder_of_texts(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("a")
    (folder / "sub" / "b.txt").write_text("b")
    config = of_text(tmp_path, folder)
    before = held(config)
    (folder / ".hidden").write_text("x")
    (folder / "picture").write_bytes(b"\0x")
    assert held(config) == before
    (folder / "sub" / "b.txt").write_text("c")
    assert held(config) != before


def test_only_a_file_that_changed_is_read_again(tmp_path: Path, reads: list[str]) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("a", "b", "picture"):
        (folder / name).write_bytes(b"\0" if name == "picture" else name.encode())
    config = of_text(tmp_path, folder)
    assert held(config) == held(config)
    assert sorted(reads) == ["a", "b", "picture"]
    (folder / "b").write_text("c")
    held(config)
    assert reads[3:] == ["b"]


def test_a_file_that_changed_a_moment_ago_is_read_again_whatever_its_timestamps(
    tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "SETTLED_NS", LONG_AGO_NS)
    (tmp_path / "a").write_text("a")
    config = of_text(tmp_path, tmp_path / "a")
    assert held(config) == held(config)
    assert reads == ["a", "a"]


def test_all_points_of_a_plan_together_hash_a_path_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("a")
    looked: list[str] = []
    found = contents._hash_of
    monkeypatch.setattr(contents, "_hash_of", lambda name, path: looked.append(name) or found(name, path))
    points = [make_point(replace(of_text(tmp_path, tmp_path / "a"), seed=seed)) for seed in range(5)]
    decision.decide(points, tmp_path / "out", lambda _: "cpu", Wishes(), {})
    assert looked == ["data"]


@pytest.mark.parametrize("broken", ["a folder", "nonsense", "a list"])
def test_an_unusable_cache_does_not_change_the_hashes(broken: str, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a").write_text("a")
    config = of_text(tmp_path, tmp_path / "a")
    before = held(config)
    (file,) = (cache / "zero-lab" / "contents").iterdir()
    file.unlink()
    if broken == "a folder":
        file.mkdir()
    else:
        file.write_text({"nonsense": "{", "a list": "[1]"}[broken])
    assert held(config) == before


def test_an_unreadable_file_raises_no_error_and_is_marked_as_unreadable(tmp_path: Path) -> None:
    assert held(of_text(tmp_path, tmp_path / "gone")) == {"data": "unreadable: No such file or directory"}


def test_without_a_cache_folder_files_are_read_every_time(
    tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    text = tmp_path / "a.txt"
    text.write_text("some words\n", encoding="utf-8")
    assert held(of_text(tmp_path, text)) == held(of_text(tmp_path, text))
    assert reads == ["a.txt", "a.txt"]
