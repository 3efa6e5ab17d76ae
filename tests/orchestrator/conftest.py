"""Commands in the process of the tests look for news more often: how often is no promise, and waiting is idle."""

from __future__ import annotations

import pytest

from orchestrator.commands import run, watch_sweep

LOOK_S = 0.02


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (run, watch_sweep):
        monkeypatch.setattr(module, "LOOK_S", LOOK_S)
