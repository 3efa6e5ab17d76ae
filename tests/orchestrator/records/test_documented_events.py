"""docs/terminal.md names every kind of line that the records of a running sweep may have, with its keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.records.record_shapes import METRICS, SWEEP_EVENTS, Events

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "terminal.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("events", [SWEEP_EVENTS, METRICS])
def test_every_kind_of_event_and_its_keys_are_documented(events: Events) -> None:
    missing = [kind for kind in events.shapes if f'"{kind}"' not in PAGE]
    missing += [f"{kind}: {key}" for kind, shape in events.shapes.items() for key in shape if f"`{key}`" not in PAGE]
    assert missing == []
