"""A record is read as it was written or reported as bad, and a bad record harms no other file in its output folder."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path

import pytest
from harness.corruptions import CORRUPTIONS
from points import make_config
from stub_worker import make_result, step_event

from orchestrator.records.cache import cache_file, read_cached, write_cached
from orchestrator.records.record_file import (
    END_BYTES,
    BadRecord,
    EventTail,
    append_event,
    explained,
    make_room,
    read_json,
    require_json,
    write_json_atomic,
)
from orchestrator.records.record_shapes import RESULT

UNSEEN = {"missing", "other digits", "one bit"}  # the rest is no JSON or has another shape
RECORD = {"text": "Ψ", "numbers": [1, 2.5e-9, math.inf], "inner": {"a": None, "b": {"c": True}}}


# ---- one file -------------------------------------------------------------------------------------------------------


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    assert read_json(path) is None
    write_json_atomic(path, RECORD)
    assert read_json(path) == RECORD
    assert [one.name for one in tmp_path.iterdir()] == ["state.json"]


def test_a_bad_record_is_set_aside_and_not_deleted(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text("torn")
    make_room(path)
    write_json_atomic(path, RECORD)
    make_room(path)
    assert read_json(path) == RECORD
    (aside,) = tmp_path.glob("*.bad")
    assert aside.read_text() == "torn"


def test_text_that_is_not_valid_unicode_is_written_and_read(tmp_path: Path) -> None:
    name = os.fsdecode(b"data-\xff.txt")
    write_json_atomic(tmp_path / "a.json", {"path": name})
    append_event(tmp_path / "a.jsonl", {"event": "passed_over", "path": name, "why": ""})
    assert read_json(tmp_path / "a.json") == {"path": name}
    assert EventTail(tmp_path / "a.jsonl").read_new()[0]["path"] == name


@pytest.mark.parametrize("name", sorted(CORRUPTIONS.keys() - UNSEEN))
def test_a_bad_result_is_reported_with_its_path_and_its_defect(name: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json_atomic(path, make_result(make_config(tmp_path)))
    assert require_json(path, RESULT)
    CORRUPTIONS[name](path)
    with pytest.raises(BadRecord) as caught:
        read_json(path, RESULT)
    assert str(caught.value).startswith(f"{path}: expected a record as it was written, found ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_write_that_fails_names_the_record_and_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "state.json"
    write_json_atomic(path, {"a": 1})
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_json_atomic(path, {"a": 2})
    assert caught.value.filename == str(path)
    assert explained(caught.value).startswith(f"{path}: No space left on device; free space there")
    assert read_json(path) == {"a": 1}
    with pytest.raises(TypeError):
        write_json_atomic(path, {"a": object()})
    assert [one.name for one in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_bad_cache_file_counts_as_missing_and_is_rewritten(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_cached("folder", "key", {"bytes": {"kept": 12345}})
    assert read_cached("folder", "key") == {"bytes": {"kept": 12345}}
    path = cache_file("folder", "key")
    path.rename(cache_file("folder", "another"))
    assert read_cached("folder", "another") is None
    cache_file("folder", "another").rename(path)
    CORRUPTIONS[name](path)
    assert read_cached("folder", "key") is None
    write_cached("folder", "key", {"bytes": {"kept": 12345}})
    assert read_cached("folder", "key") == {"bytes": {"kept": 12345}}


# ---- lines ----------------------------------------------------------------------------------------------------------


def test_a_tail_returns_every_event_once_and_never_a_partial_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = EventTail(path)
    assert tail.read_new() == []
    append_event(path, {"event": "ready"})
    with path.open("a") as file:
        file.write('{"event": "sa')
    assert tail.read_new() == [{"event": "ready"}]
    with path.open("a") as file:
        file.write('ved", "step": 1, "why": "Ψ"}\n')
    assert tail.read_new() == [{"event": "saved", "step": 1, "why": "Ψ"}]
    assert tail.read_new() == []


def test_a_bad_line_is_skipped_and_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = EventTail(path)
    append_event(path, step_event(1, 2))
    tail.read_new()
    bad = (b"garbage\n", b'{"event": "step", "step": "x"}\n', b"[]\n", b'{"a": 1}\n', b"\xff\n")
    for line in bad:
        with path.open("ab") as file:
            file.write(line)
        assert tail.read_new() == []
    append_event(path, step_event(2, 2))
    for _ in range(2):  # each reader skips them, and each warning is printed once
        assert [one["step"] for one in EventTail(path).read_new()] == [1, 2]
    told = [one.getMessage() for one in caplog.records]
    assert len(told) == len(bad)
    for number, text in enumerate(told, start=2):
        assert text.startswith(f"warning: {path}: line {number} is left out: expected an event, found ")


def test_the_end_of_a_large_file_is_read_without_its_beginning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    append_event(path, step_event(0, 2))
    assert EventTail.of_the_end(path).read_new() == [step_event(0, 2)]
    path.write_bytes(b"garbage\n" * END_BYTES)
    for step in range(3):
        append_event(path, step_event(step, 2))
    tail = EventTail.of_the_end(path)
    assert tail.read_new() == [step_event(step, 2) for step in range(3)]
    (told,) = (one.getMessage() for one in caplog.records)
    assert "a line near its end is left out" in told
    append_event(path, step_event(3, 2))
    assert tail.read_new() == [step_event(3, 2)]


def test_the_line_after_one_that_a_full_disk_cut_off_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"do": "dra')
    append_event(path, {"event": "ready"})
    assert EventTail(path).read_new() == [{"event": "ready"}]


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corrupted_event_file_can_still_be_read_and_appended_to(name: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in range(1, 5):
        append_event(path, step_event(step, 2))
    tail = EventTail(path)
    CORRUPTIONS[name](path)
    EventTail(path).read_new()
    tail.read_new()
    append_event(path, step_event(5, 2))
    assert EventTail(path).read_new()[-1] == step_event(5, 2)
