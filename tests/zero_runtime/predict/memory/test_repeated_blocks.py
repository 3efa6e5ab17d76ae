"""The trace of a model whose blocks repeat, made from that of few, is the trace of the model itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness.traced_steps import trace_of
from points import make_config

from orchestrator.config.schema import Device, Loss, LossKind, Model, ResolvedBatch, RunConfig
from orchestrator.config.state_groups import Precision
from orchestrator.wings.predict.activations import Tracing
from orchestrator.worker.setup import build_deferred
from zero_runtime.activations.rule import RecomputeKind, RecomputeRule
from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.memory.activation_count import LinearTrace, Mark, Trace
from zero_runtime.predict.memory.repeated_blocks import BlockUnits, ShortLayout, equal_units, linear_with_blocks
from zero_runtime.predict.memory.short_model import short_copy
from zero_runtime.unit_planner import UnitRules

WIDE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
MODELS = {
    "llama": {**WIDE, "num_hidden_layers": 7, "num_key_value_heads": 2},
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 8, "n_head": 4, "n_positions": 64},
    "qwen2": {**WIDE, "num_hidden_layers": 6, "num_key_value_heads": 2},
    "gpt_neox": {**WIDE, "num_hidden_layers": 9},
    # Five blocks with a window and one without, twice between the first two and the last four.
    "gemma3_text": {
        **WIDE,
        **{"num_hidden_layers": 18, "num_key_value_heads": 4, "head_dim": 8, "sliding_window": 8},
    },
    # Two lists of blocks: the encoder's, and the decoder's, of which each reads the encoder's output.
    "t5": {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 7},
    "bart": {
        **{"vocab_size": 64, "d_model": 32, "encoder_layers": 6, "decoder_layers": 8, "encoder_ffn_dim": 48},
        **{"decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
        **{"max_position_embeddings": 64},
    },
    "olmo3": {**WIDE, "num_hidden_layers": 17, "num_key_value_heads": 4, "sliding_window": 8},
}
LARGER_THAN_A_BLOCK = 20_000  # a block of llama has 7,744 parameters here


def config_of(
    model: str, tmp_path: object, recompute: RecomputeKind = "none", *, on_cuda: bool = False, tile: int | None = None
) -> RunConfig:
    base = make_config(tmp_path, stage=3)  # type: ignore[arg-type]
    return replace(
        base,
        model=Model(model, model, MODELS[model]),
        batch=ResolvedBatch(micro=2, accumulation=1, global_size=4, seq=16),
        precision=Precision(MixedPrecision("bf16"), compute="bf16"),
        recompute=RecomputeRule(recompute),
        loss=Loss() if tile is None else Loss(LossKind.tiled, tile),
        resources=replace(base.resources, device=Device.cuda if on_cuda else Device.cpu),
    )


def with_blocks(short: Trace, units: BlockUnits, blocks: int) -> Trace | None:
    """The trace of the model with `blocks` equal blocks; None if that of the short one does not determine it."""
    found = linear_with_blocks(LinearTrace.of_one(1, short), units, blocks)
    return None if found is None else found.trace


def is_shortened(config: RunConfig) -> bool:
    """Whether few blocks are traced, and determine the trace of all: otherwise all are traced in the end."""
    model, _ = build_deferred(config)
    rules = UnitRules(config.precision.mixed, config.zero.unit_numel, tuple(config.precision.keep_dtype))
    tracing = Tracing(config)
    tracing.one(config.batch.micro)
    return short_copy(model, rules, config.recompute) is not None and not tracing._whole


@pytest.mark.parametrize(
    ("model", "recompute", "on_cuda"),
    [
        ("gpt2", "full", True),
        ("gemma3_text", "none", True),
        ("t5", "full", False),
        *(
            pytest.param(model, recompute, on_cuda, marks=pytest.mark.full)
            for model in MODELS
            for recompute in ("none", "full", "by_operation")
            for on_cuda in (False, True)
        ),
    ],
)
def test_the_trace_made_from_five_blocks_is_that_of_all(
    model: str, recompute: RecomputeKind, on_cuda: bool, tmp_path: object
) -> None:
    config = config_of(
        model, tmp_path, recompute, on_cuda=on_cuda, tile=12 if on_cuda and model not in ("t5", "bart") else None
    )
    assert is_shortened(config)
    assert_same(trace_of(config), trace_of(config, whole=True))


def assert_same(made: Trace, real: Trace) -> None:
    """Equal, but for reports of units whose forward has ended, which the hooks repeat at the end of the loss, and
    of units whose gradients have arrived, which T5's table of positions repeats: they release and gather nothing."""
    assert (made.events, made.sizes) == (real.events, real.sizes)
    assert (made.in_blocks, made.on_host) == (real.in_blocks, real.on_host)
    assert (made.forward_end, made.random_state_bytes) == (real.forward_end, real.random_state_bytes)
    assert without_repeats(made) == without_repeats(real)


def without_repeats(trace: Trace) -> list[tuple[int, Mark, int]]:
    """The marks, without an AFTER_FORWARD of a unit that has not been used since its last one, and without a
    BEFORE_BACKWARD of a unit that is complete."""
    last: dict[int, Mark] = {}
    left = []
    for mark in trace.marks:
        _, kind, unit = mark
        if kind == Mark.BEFORE_BACKWARD and last.get(unit) == Mark.AFTER_BACKWARD:
            continue
        if not kind == last.get(unit) == Mark.AFTER_FORWARD:
            left.append(mark)
        last[unit] = kind
    return left


@pytest.mark.parametrize(
    ("model", "recompute", "unit_numel"),
    [
        pytest.param("llama", "every_nth", None, marks=pytest.mark.full),
        ("gpt2", "none", LARGER_THAN_A_BLOCK),
    ],
)
def test_models_whose_blocks_differ_are_traced_themselves(
    model: str, recompute: RecomputeKind, unit_numel: int | None, tmp_path: object
) -> None:
    config = config_of(model, tmp_path, recompute)
    config = replace(config, zero=replace(config.zero, unit_numel=unit_numel))
    assert not is_shortened(config)
    assert trace_of(config) == trace_of(config, whole=True)


# ---- traces written by hand ------------------------------------------------------------------------------------------

UNITS = BlockUnits(first=1, count=1)  # between the unit of the embedding and that of the head


def written(
    blocks: int, *, odd_size: int | None = None, reaches: int = 1, in_order: bool = True, period: int = 1
) -> Trace:
    """Each block keeps one storage of 100 bytes, and frees that of the block `reaches` before it (of what passes from
    block to block). odd_size: the block whose kept storage is larger. period: the last of so many blocks keeps 4 bytes
    less, and reads a table until its backward."""
    trace = Trace()
    table = trace.came(16, in_block=False) if period > 1 else None
    passed = [trace.came(8, in_block=False)]
    kept = []
    for block in range(blocks):
        trace.mark(Mark.BEFORE_FORWARD, block + 1)
        size = 100 if period == 1 or block % period < period - 1 else 96
        kept.append(trace.came(104 if block == odd_size else size, in_block=True))
        passed.append(trace.came(50, in_block=True))
        if len(passed) > reaches:
            trace.went(passed[-reaches - 1])
        trace.mark(Mark.AFTER_FORWARD, block + 1)
    trace.forward_end = len(trace.events)
    gradient = trace.came(60, in_block=False)
    for block in reversed(range(blocks)) if in_order else range(blocks):
        trace.mark(Mark.BEFORE_BACKWARD, block + 1)
        coming = trace.came(60, in_block=False)
        trace.went(kept[block])
        if table is not None and block == period - 1:
            trace.went(table)
        trace.mark(Mark.GRADIENT, block + 1)
        trace.went(gradient)
        gradient = coming
    trace.went(gradient)
    for number in passed[-reaches:]:
        trace.went(number)
    return trace


def test_a_trace_is_repeated_for_any_number_of_blocks() -> None:
    for blocks in (6, 7, 20):
        assert with_blocks(written(5), UNITS, blocks) == written(blocks)


@pytest.mark.parametrize(("short", "long"), [(7, 10), (7, 13), (8, 20)])
def test_blocks_that_repeat_in_groups_are_copied_together(short: int, long: int) -> None:
    layout = ShortLayout(short, period=3)
    made = with_blocks(written(short, period=3), BlockUnits(1, 1, layout), long)
    assert made == written(long, period=3)
    assert layout.kept(long) == [*range(5), *range(long - short + 5, long)]


def test_five_blocks_or_fewer_are_not_repeated() -> None:
    assert with_blocks(written(5), UNITS, 5) is None
    assert with_blocks(written(5), UNITS, 4) is None


@pytest.mark.parametrize("odd", [1, 2, 3])
def test_a_middle_block_with_other_storages_is_refused(odd: int) -> None:
    assert with_blocks(written(5, odd_size=odd), UNITS, 8) is None


@pytest.mark.parametrize("odd", [0, 4])
def test_the_first_and_the_last_block_may_differ(odd: int) -> None:
    assert with_blocks(written(5, odd_size=odd), UNITS, 8) == written(8, odd_size=7 if odd else 0)


def test_a_block_that_frees_what_is_two_blocks_away_is_refused() -> None:
    assert with_blocks(written(5, reaches=2), UNITS, 8) is None


def test_a_backward_in_the_order_of_the_forward_is_refused() -> None:
    assert with_blocks(written(5, in_order=False), UNITS, 8) is None


def test_marks_of_other_units_than_the_blocks_are_refused() -> None:
    assert with_blocks(written(5), BlockUnits(first=6, count=1), 8) is None


def test_a_storage_that_is_never_freed_is_refused() -> None:
    trace = written(5)
    trace.came(7, in_block=False)
    assert with_blocks(trace, UNITS, 8) is None


def test_the_random_states_are_those_of_all_blocks() -> None:
    trace = written(5)
    trace.random_state_bytes = 5 * 5056
    long = with_blocks(trace, UNITS, 8)
    assert long is not None
    assert long.random_state_bytes == 8 * 5056


def test_units_of_blocks_are_equal_only_in_number_and_order() -> None:
    assert equal_units([None, 0, 1, 2, 3, 4, None]) == BlockUnits(1, 1)
    assert equal_units([0, 0, 1, 1, 2, 2, 3, 3, 4, 4]) == BlockUnits(0, 2)
    assert equal_units([None, None]) is None
    assert equal_units([0, 1, 2, 3, 4, 4]) is None  # one has more
    assert equal_units([0, 0, 1, 1, 2, 2, 3, 4, 3, 4]) is None
    assert equal_units([0, 1, None, 2, 3, 4]) is None
