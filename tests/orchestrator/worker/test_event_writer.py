"""Events are written in order; on a CPU those of short steps together, on a GPU without holding up the rank."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from harness.patience import HANG_S, wait_until

from orchestrator.records.record_file import append_event
from orchestrator.worker import event_writer
from orchestrator.worker.event_writer import EventWriter


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


class Steps:
    """An EventWriter of a CPU with a clock that the test sets."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.now = path, 100.0
        monkeypatch.setattr(event_writer.time, "monotonic", lambda: self.now)
        self.events = EventWriter(path, in_background=False)

    def at(self, now: float, step: int, event: str = "step") -> list[int]:
        """The steps in the file after an event at this time."""
        self.now = now
        self.events.write(event, step=step)
        return steps_in(self.path)


def test_on_a_cpu_the_events_of_short_steps_are_written_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_writer, "LATE_S", HANG_S)
    steps = Steps(tmp_path / "events.jsonl", monkeypatch)
    assert steps.at(100.0, 1) == [1]
    assert steps.at(100.05, 2) == steps.at(100.09, 3) == [1]
    assert steps.at(100.11, 4) == [1, 2, 3, 4]
    assert steps.at(100.25, 5) == [1, 2, 3, 4, 5]  # a longer step: at once
    assert steps.at(100.26, 6) == [1, 2, 3, 4, 5]
    assert steps.at(100.27, 6, "saved") == [1, 2, 3, 4, 5, 6, 6]  # any other event: at once, and in order
    steps.at(100.28, 7)
    steps.events.flush()
    assert steps_in(steps.path)[-1] == 7
    steps.at(100.29, 8)
    steps.events.end()
    assert steps_in(steps.path)[-1] == 8


def test_a_run_that_hangs_shows_all_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_writer, "LATE_S", 0.01)
    monkeypatch.setattr(event_writer, "KEEP_S", HANG_S)
    events = EventWriter(tmp_path / "events.jsonl", in_background=False)
    for step in (1, 2, 3):
        events.write("step", step=step)
    wait_until(lambda: steps_in(tmp_path / "events.jsonl") == [1, 2, 3])
    events.end()


def test_on_a_cpu_the_next_call_raises_that_kept_steps_cannot_be_written_and_none_is_lost_if_they_can_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_writer, "LATE_S", HANG_S)
    folder = tmp_path / "folder"
    steps = Steps(folder / "events.jsonl", monkeypatch)
    for call in (lambda: steps.at(100.0, 1), lambda: steps.at(100.01, 2), lambda: steps.events.flush()):
        with pytest.raises(OSError, match="No such file or directory"):
            call()
    folder.mkdir()
    steps.events.end()
    assert steps_in(steps.path) == [1, 2]


def test_a_slow_disk_holds_up_no_step_and_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, disk = tmp_path / "events.jsonl", threading.Event()

    def slowly(path: Path, event: Mapping[str, object]) -> None:
        assert disk.wait(HANG_S)
        append_event(path, event)

    monkeypatch.setattr(event_writer, "append_event", slowly)
    events = EventWriter(path, in_background=True)
    for step in range(5):
        events.write("step", step=step)
    assert not path.exists()
    disk.set()
    events.flush()
    assert steps_in(path) == [0, 1, 2, 3, 4]
    events.write("step", step=5)
    events.end()
    assert steps_in(path)[-1] == 5


def test_a_write_that_fails_ends_the_run(tmp_path: Path) -> None:
    for call in ("flush", "write"):
        events = EventWriter(tmp_path / "no folder" / "events.jsonl", in_background=True)
        events.write("step", step=1)
        events.end()  # of a rank that failed for another reason: no further error
        with pytest.raises(OSError, match="No such file or directory"):
            events.flush() if call == "flush" else events.write("step", step=2)


def test_half_a_line_that_a_full_disk_left_is_ended_before_the_next_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write, sizes = tmp_path / "events.jsonl", os.write, iter([10])

    def full(descriptor: int, line: bytes) -> int:
        if (size := next(sizes, None)) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, line[:size])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        append_event(path, {"step": 1})
    monkeypatch.setattr(os, "write", write)
    append_event(path, {"step": 2})
    half, line, end = path.read_bytes().split(b"\n")
    assert (len(half), end) == (10, b"")
    assert json.loads(line)["step"] == 2
