"""What is told to somebody whose memory was not enough."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from points import make_config

from orchestrator import remedies
from orchestrator.schema import RunConfig
from orchestrator.state_groups import Offload, Place

GIB = 1 << 30
HELD = {"params": 2 * GIB, "grads": 2 * GIB, "optimizer": 8 * GIB, "buffers": 0, "other": 6 * GIB}


def states(config: RunConfig) -> int:
    """12 GiB, of which each stage shards one part more over two ranks."""
    shards = {0: 12, 1: 8, 2: 7, 3: 6}
    return shards[config.zero.stage] * GIB - (4 * GIB if config.offload == Offload(optimizer=Place.cpu) else 0)


def listed(wanted: str | None, *, stage: int = 0, micro: int = 4) -> list[tuple[str, int]]:
    config = make_config(Path("outputs"), stage=stage)
    config = replace(config, batch=replace(config.batch, micro=micro))
    found = remedies.remedies(config, {"wanted": wanted, "held": HELD}, states)
    return [(one.overrides, one.freed_bytes // (GIB // 2)) for one in found]


def test_what_frees_enough_is_listed_the_smallest_change_first() -> None:
    assert listed("2.00 GiB") == [
        ("batch.micro=2 batch.accumulation=4", 6),
        ("batch.micro=1 batch.accumulation=8", 9),
        ("zero=stage1", 8),
        ("zero=stage2", 10),
        ("zero=stage3", 12),
    ]
    assert listed("5.50 GiB") == [("zero=stage3", 12)]


def test_what_frees_too_little_is_left_out() -> None:
    assert listed("100.00 GiB") == []
    assert listed(None) == []
    assert listed("1.00 GiB", stage=3, micro=1) == []


@pytest.mark.parametrize(
    ("text", "count"),
    [("2.00 GiB", 2 * GIB), ("1024 bytes", 1024), ("512 MiB", GIB // 2), ("much", None), (None, None)],
)
def test_an_allocators_words_are_read(text: str | None, count: int | None) -> None:
    assert remedies.bytes_of(text) == count


def test_the_sentence_tells_what_was_held_and_what_to_set() -> None:
    config = make_config(Path("outputs"), stage=0)
    text = remedies.told(config, {"wanted": "2.00 GiB", "held": HELD}, states)
    assert "held params 2.00 GiB, grads 2.00 GiB, optimizer 8.00 GiB, other 6.00 GiB" in text
    assert "would free enough: batch.micro=2 batch.accumulation=4 (about 3.00 GiB)" in text
    assert "no single setting frees 99 GiB" in remedies.told(config, {"wanted": "99 GiB", "held": HELD}, states)
