"""The messages of tensor and of sequence parallelism by the formulas of docs/parallel.md."""

from __future__ import annotations

import json

import pytest

from orchestrator.config.schema import Batch
from orchestrator.wings.predict.tensor_messages import TensorMessages, TensorSent
from zero_runtime.activations.rule import RecomputeRule

BLOCKS, WIDTH, TOKENS, BF16_BYTES = 4, 16, 10, 2
ONE = Batch(micro=1, seq=TOKENS)
# Two row layers and two shared inputs of column layers in a block, the embedding and the head's input.
MESSAGES = TensorMessages((WIDTH,) * (4 * BLOCKS + 2), ((WIDTH,),) * BLOCKS, loss_numbers=3)


def test_one_rank_sends_nothing() -> None:
    assert MESSAGES.sent(1, ONE, RecomputeRule(), BF16_BYTES, tiled=False) == TensorSent()


@pytest.mark.parametrize(
    ("recompute", "of_a_block", "also"),
    [("none", 4, 0), ("full", 5, 0), ("by_operation", 5, 0), ("every_nth", 4, BLOCKS // 2)],
)
@pytest.mark.parametrize("degree", [2, 4])
def test_a_block_costs_four_sums_of_the_hidden_states_and_one_more_if_it_recomputes(
    degree: int, recompute: str, of_a_block: int, also: int
) -> None:
    sums = of_a_block * BLOCKS + also + 2
    rule = RecomputeRule(recompute)  # type: ignore[arg-type]
    sent = MESSAGES.sent(degree, ONE, rule, BF16_BYTES, tiled=False)
    elements, numbers = sums * 2 * (degree - 1) * TOKENS * WIDTH // degree, (degree - 1) * 3 * TOKENS
    assert sent == TensorSent(elements + numbers, BF16_BYTES * elements + 4 * numbers, sums + 1)


def test_gradients_of_replicated_parameters_in_divided_layers_are_summed_once_a_micro_batch() -> None:
    sent = TensorMessages(parameters=(8, 8)).sent(2, ONE, RecomputeRule(), BF16_BYTES, tiled=False)
    assert sent == TensorSent(16, 32, 2)


@pytest.mark.parametrize(
    ("recompute", "forwards"), [("none", BLOCKS), ("full", 2 * BLOCKS), ("every_nth", BLOCKS + BLOCKS // 2)]
)
@pytest.mark.parametrize("degree", [2, 5])
def test_a_block_trades_parts_before_and_after_its_attention(degree: int, recompute: str, forwards: int) -> None:
    """Forwards, recomputed ones too, and one backward of a block; a rank keeps its own part of what it trades."""
    rule = RecomputeRule(recompute)  # type: ignore[arg-type]
    sent = TensorMessages(traded=((3 * WIDTH, WIDTH),) * BLOCKS).traded_parts(degree, TOKENS, rule, BF16_BYTES)
    elements = (forwards + BLOCKS) * 4 * WIDTH * (TOKENS // degree) * (degree - 1) // degree
    assert abs(sent.elements - elements) < sent.calls  # of each message, a fraction is dropped
    assert (sent.nbytes, sent.calls) == (BF16_BYTES * sent.elements, 2 * (forwards + BLOCKS))


def test_counts_survive_json() -> None:
    traded = TensorMessages(traded=((3, 1), (3, 1)))
    assert TensorMessages.of_plain(json.loads(json.dumps(traded.plain()))) == traded
    assert TensorMessages.of_plain(json.loads(json.dumps(MESSAGES.plain()))) == MESSAGES
