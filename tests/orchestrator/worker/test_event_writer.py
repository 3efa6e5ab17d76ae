"""Events are written in order; on a CPU before the call returns, on a GPU without holding up the rank."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from harness.patience import HANG_S

from orchestrator.worker import event_writer
from orchestrator.worker.event_writer import EventWriter


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_on_a_cpu_an_event_is_in_the_file_when_the_call_returns(tmp_path: Path) -> None:
    events = EventWriter(tmp_path / "events.jsonl", in_background=False)
    for step in (1, 2):
        events.write("step", step=step)
        assert steps_in(tmp_path / "events.jsonl") == list(range(1, step + 1))
    events.flush()
    events.end()


def test_a_slow_disk_holds_up_no_step_and_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, disk = tmp_path / "events.jsonl", threading.Event()
    append = event_writer.append_event

    def slowly(path: Path, event: Mapping[str, object]) -> None:
        assert disk.wait(HANG_S)
        append(path, event)

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
