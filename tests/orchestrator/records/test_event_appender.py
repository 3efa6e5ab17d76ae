"""A file of events stays open between events, and outlives what happens to it meanwhile."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from orchestrator.records import record_file
from orchestrator.records.record_file import EventAppender, append_event


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_file_that_stays_open_takes_what_was_appended_beside_it_and_is_made_again_if_it_is_removed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "events.jsonl"
    events = EventAppender(path)
    events.append({"step": 1})
    append_event(path, {"step": 2})
    events.append({"step": 3})
    assert steps_in(path) == [1, 2, 3]
    path.unlink()
    events.append({"step": 4})
    assert steps_in(path) == [4]
    events.close()
    events.append({"step": 5})
    assert steps_in(path) == [4, 5]


def test_a_file_is_closed_after_a_second_so_that_other_machines_see_its_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    opened: list[float] = []
    monkeypatch.setattr(record_file.time, "monotonic", lambda: now[0])
    open_file = os.open
    monkeypatch.setattr(os, "open", lambda *words: (opened.append(now[0]), open_file(*words))[1])
    events = EventAppender(tmp_path / "events.jsonl")
    for now[0] in (100.0, 100.5, 101.0, 101.5, 103.0):
        events.append({"step": 1})
    assert opened == [100.0, 101.0, 103.0]


def test_half_a_line_that_a_full_disk_left_is_ended_before_the_next_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write, sizes = tmp_path / "events.jsonl", os.write, iter([10])

    def full(descriptor: int, line: bytes) -> int:
        if (size := next(sizes, None)) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, line[:size])

    events = EventAppender(path)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        events.append({"step": 1})
    monkeypatch.setattr(os, "write", write)
    events.append({"step": 2})
    half, line, end = path.read_bytes().split(b"\n")
    assert (len(half), end) == (10, b"")
    assert json.loads(line)["step"] == 2
