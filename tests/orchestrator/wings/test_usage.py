"""What a run shows of its memory and samples beside the speed: events, progress lines, and columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from points import make_config
from stub_worker import make_result, step_event

from orchestrator.config.schema import to_dict
from orchestrator.report.entry import Entry
from orchestrator.report.progress import step_numbers
from orchestrator.report.summary import ready_text
from orchestrator.tracking import names
from orchestrator.wings.profile import extras
from orchestrator.wings.usage import memory_now

MIB = 2**20
CONFIG = make_config(Path("outputs"))


def bytes_(mib: int) -> Callable[..., int]:
    return lambda *_: mib * MIB


def test_a_gpu_tells_what_is_allocated_and_what_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, mib in (("max_memory_allocated", 30), ("memory_allocated", 20), ("memory_reserved", 40)):
        monkeypatch.setattr(torch.cuda, name, bytes_(mib))
    gpu = torch.device("cuda")
    loaded, after_step = memory_now(gpu, peak=False), memory_now(gpu)
    assert step_numbers(step_event(1, 0) | after_step).endswith("allocated 30.0 MiB, reserved 40.0 MiB")
    assert "loaded: allocated 20.0 MiB, reserved 40.0 MiB," in ready_text({"event": "ready", "parameters": 1, **loaded})
    assert names.step_metrics({"event": "ready", **loaded}) == {
        "memory/loaded_allocated_mib": 20.0,
        "memory/loaded_reserved_mib": 40.0,
    }
    assert names.step_metrics(step_event(1, 0) | after_step)["memory/reserved_mib"] == 40.0
    assert memory_now(torch.device("cpu")).keys() == {"memory_kind", "memory_mib"}


def entry(label: str, seq: int, samples: float) -> Entry:
    config = replace(CONFIG, batch=replace(CONFIG.batch, seq=seq))
    result: dict[str, Any] = make_result(config)
    result["throughput"]["samples_per_second"] = samples
    return Entry(label, "ok", result, config=to_dict(config))


@pytest.mark.parametrize(("lengths", "shown"), [((64, 64), False), ((64, 128), True)])
def test_samples_are_a_column_on_the_screen_where_their_lengths_differ(lengths: tuple[int, int], shown: bool) -> None:
    entries = [entry(str(place), seq, 10.0 + place) for place, seq in enumerate(lengths)]
    (column,) = [one for one in extras.columns(entries) if one.title == "samples/s"]
    assert (column.values, column.on_screen) == ([10.0, 11.0], shown)
    assert extras.cells(entries[1], entries)["samples_per_second_median"] == 11.0
