"""Segments are found again by the marks that end them: in a table, in a longer model, and in a step that was timed."""

from __future__ import annotations

import pytest
import torch
from harness.traced_steps import trace_of
from points import config_of_line

from orchestrator.wings.predict.calibrate_rank import timer_of
from zero_runtime.predict.memory.activation_count import Mark
from zero_runtime.predict.memory.repeated_blocks import BlockUnits
from zero_runtime.predict.timing.segment_timer import typical
from zero_runtime.predict.timing.segments import END, SegmentTable

F, B = Mark.BEFORE_FORWARD, Mark.AFTER_BACKWARD


def test_values_of_a_mark_that_comes_twice_are_found_in_their_order() -> None:
    marks = [(F, 0), (F, 1), (F, 0), (B, 0)]
    table = SegmentTable.of(marks, [1.0, 2.0, 3.0, 4.0, 5.0])
    assert table.in_order(marks) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert SegmentTable.of_plain(table.plain()).in_order(marks) == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_step_with_another_mark_has_no_values() -> None:
    table = SegmentTable.of([(F, 0)], [1.0, 2.0])
    assert table.in_order([(F, 1)]) is None
    assert table.in_order([(F, 0), (F, 0)]) is None


def test_the_third_of_five_blocks_stands_for_all_between() -> None:
    """One unit before the blocks, two units in each of them, one behind: 12 units, and 16 with seven blocks."""
    table = SegmentTable({(F, unit): [float(unit)] for unit in range(12)} | {END: [99.0]})
    long = table.with_blocks(BlockUnits(first=1, count=2), blocks=7)
    found = long.in_order([(F, unit) for unit in range(16)])
    assert found == [0, 1, 2, 3, 4, 5, 6, 5, 6, 5, 6, 7, 8, 9, 10, 11, 99]


def test_tables_are_combined_by_segment_and_others_are_not() -> None:
    first, second = SegmentTable({(F, 0): [1.0, 2.0]}), SegmentTable({(F, 0): [3.0, 5.0]})
    both = first.combined(second, lambda a, b: a + b)
    assert both is not None
    assert both.values == {(F, 0): [4.0, 7.0]}
    assert first.combined(SegmentTable({(F, 1): [3.0, 5.0]}), max) is None
    assert first.combined(SegmentTable({(F, 0): [3.0]}), max) is None


LINES = [
    "model=llama_tiny",
    "model=llama_tiny recompute=full",
    "model=llama_tiny recompute=by_operation loss=tiled",
    "model=gpt2 model.config.n_layer=2 model.config.n_embd=64 model.config.n_head=2 model.config.vocab_size=256",
    "model=llama_tiny adapter=lora",
    "model=llama_tiny model.config.num_hidden_layers=7",
    "model=llama_tiny zero.unit_numel=20000",
]


@pytest.mark.parametrize(
    "line", [*LINES[1:4], *(pytest.param(line, marks=pytest.mark.full) for line in (LINES[0], *LINES[4:]))]
)
def test_a_timed_step_reports_the_marks_of_the_traced_one(line: str) -> None:
    config = config_of_line(f"{line} batch.micro=2 batch.seq=16 resources.ranks=1 resources.device=cpu")
    timer, short = timer_of(config, torch.device("cpu"))
    steps = [timer.step(), timer.step()]
    table = typical(steps)
    if short is not None:
        table = table.with_blocks(short.units, short.blocks)
    traced = trace_of(config).marks
    segments = table.in_order([(kind, unit) for _, kind, unit in traced])
    assert segments is not None
    assert len(segments) == len(traced) + 1
    assert all(seconds >= 0 for seconds in segments)
    assert sum(segments) > 0
