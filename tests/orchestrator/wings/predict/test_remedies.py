"""After an out-of-memory error, the message lists the settings that would free enough memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from points import config_of_line, make_config

from orchestrator.config.schema import LossKind, RunConfig
from orchestrator.config.state_groups import Offload
from orchestrator.wings.predict import remedies
from orchestrator.wings.predict.remedies import PredictedPeak
from zero_runtime.offload_plan import Tier

GIB = 1 << 30
HELD = {"params": 2 * GIB, "grads": 2 * GIB, "optimizer": 8 * GIB, "buffers": 0, "other": 6 * GIB}


def states(configs: Sequence[RunConfig]) -> list[PredictedPeak | None]:
    """12 GiB, of which each stage shards one more part over two ranks, less 4 GiB with the optimizer on the CPU.

    Activations are unknown.
    """
    shards = {0: 12, 1: 8, 2: 7, 3: 6}
    away = Offload(optimizer=Tier.HOST)
    return [
        PredictedPeak(shards[one.zero.stage] * GIB - 4 * GIB * (one.offload == away), complete=False) for one in configs
    ]


def everything(configs: Sequence[RunConfig]) -> list[PredictedPeak | None]:
    """4 GiB plus 1 GiB for each sequence of a micro-batch, or half of that with recomputation.

    A tiled loss cannot be counted.
    """
    return [
        PredictedPeak(4 * GIB + one.batch.micro * GIB // (1 if one.recompute.kind == "none" else 2), complete=True)
        if one.loss.kind is LossKind.full
        else None
        for one in configs
    ]


def listed(wanted: str | None, *, stage: int = 0, micro: int = 4) -> list[tuple[str, int]]:
    config = make_config(Path("outputs"), stage=stage)
    config = replace(config, batch=replace(config.batch, micro=micro))
    found = remedies.remedies(config, {"wanted": wanted, "held": HELD}, states)
    return [(one.overrides, one.freed_bytes // (GIB // 2)) for one in found]


def test_settings_that_free_enough_are_listed_with_the_smallest_change_first() -> None:
    assert listed("2.00 GiB") == [
        ("batch.micro=2 batch.accumulation=4", 6),
        ("batch.micro=1 batch.accumulation=8", 9),
        ("zero=stage1", 8),
        ("zero=stage2", 10),
        ("zero=stage3", 12),
    ]
    assert listed("5.50 GiB") == [("zero=stage3", 12)]


def test_settings_that_free_too_little_are_left_out() -> None:
    assert listed("100.00 GiB") == []
    assert listed(None) == []
    assert listed("1.00 GiB", stage=3, micro=1) == []


def test_if_activations_are_predicted_their_settings_are_listed_and_nothing_is_estimated() -> None:
    config = make_config(Path("outputs"), stage=3)
    found = remedies.remedies(config, {"wanted": "2.00 GiB", "held": HELD}, everything)
    assert [(one.overrides, one.freed_bytes // GIB, one.estimated) for one in found] == [
        ("batch.micro=2 batch.accumulation=4", 2, False),
        ("batch.micro=1 batch.accumulation=8", 3, False),
        ("recompute=by_operation", 2, False),
        ("recompute=full", 2, False),
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        # No gradients and optimizer states, and no accumulation.
        ("measure=eval zero=stage0 batch.micro=4", "batch.micro=2, batch.micro=1, zero=stage3"),
        ("measure=eval zero=stage3 batch.micro=1", ""),
        # 1-bit messages are made from each rank's full gradients.
        ("optimizer=onebitadam optimizer.clip_norm=null zero=stage0 batch.micro=1", "zero=stage1"),
        ("zero=stage1 zero.gather_dtype=int8 batch.micro=1", "zero=stage2, zero=stage3"),
        ("zero=stage3 batch.micro=6 resources.ranks=2", "batch.micro=3 batch.accumulation=2, "
         "batch.micro=1 batch.accumulation=6"),
        ("zero=stage3 batch.micro=5 resources.ranks=2", "batch.micro=2, batch.micro=1 batch.accumulation=5"),
    ],
)  # fmt: skip
def test_no_setting_is_proposed_that_a_rule_refuses(line: str, expected: str) -> None:
    fixed = "resources.device=cpu loss=tiled recompute=full"
    found = remedies.neighbours(config_of_line(f"{line} {fixed}"))
    assert ", ".join(one.overrides for one in found) == expected
    for one in found:
        config_of_line(f"{changed(line, one.overrides)} {fixed}")


def test_a_tensor_parallel_group_is_one_rank_of_the_global_batch_and_keeps_its_loss() -> None:
    config = config_of_line(
        "zero=stage3 parallel.tp=2 resources.ranks=4 resources.device=cpu batch.micro=2 recompute=full"
    )
    found = remedies.neighbours(config)
    assert [one.overrides for one in found] == ["batch.micro=1 batch.accumulation=2"]
    assert found[0].config.batch.global_size == config.batch.global_size == 4


def changed(line: str, overrides: str) -> str:
    """The line with the overrides in place of those of the same group or key."""
    groups = {word.partition("=")[0] for word in overrides.split()}
    return " ".join([*(word for word in line.split() if word.partition("=")[0] not in groups), overrides])


@pytest.mark.parametrize(
    ("text", "count"),
    [("2.00 GiB", 2 * GIB), ("1024 bytes", 1024), ("512 MiB", GIB // 2), ("much", None), (None, None)],
)
def test_sizes_in_an_allocators_message_are_parsed(text: str | None, count: int | None) -> None:
    assert remedies.bytes_of(text) == count


def test_the_message_lists_the_memory_held_and_the_settings_to_change() -> None:
    config = make_config(Path("outputs"), stage=0)
    text = remedies.described(config, {"wanted": "2.00 GiB", "held": HELD}, states)
    assert "held params 2.00 GiB, grads 2.00 GiB, optimizer 8.00 GiB, other 6.00 GiB" in text
    assert "would free enough: batch.micro=2 batch.accumulation=4 (about 3.00 GiB)" in text
    assert "no single setting frees 99 GiB" in remedies.described(config, {"wanted": "99 GiB", "held": HELD}, states)
