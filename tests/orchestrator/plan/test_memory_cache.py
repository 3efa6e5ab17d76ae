"""Cached answers about memory are an optimization: nothing fails because they cannot be read or written."""

from __future__ import annotations

import pytest

from orchestrator.plan import memory_cache


def test_code_that_cannot_be_read_means_that_no_answer_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    def vanished() -> str:
        raise FileNotFoundError("setup.py")

    monkeypatch.setattr(memory_cache, "folder", vanished)
    memory_cache.store("activations-0", {"kept": 1})
    assert memory_cache.stored("activations-0") is None
