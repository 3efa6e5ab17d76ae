"""Parts of sequences and heads, without ranks: what each rank gets, and the models and lengths that are refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from harness.divided import model_of
from torch import nn

from zero_runtime.errors import PlanError
from zero_runtime.parallel.sequence.attention import divides_heads, traded_widths
from zero_runtime.parallel.sequence.axis import AloneInSequence, SequenceAxis
from zero_runtime.parallel.sequence.division import DividedSequences, SequenceParallel

BATCH, TOKENS, SIZE = 2, 8, 3


class Rank:
    """The collectives of one of several ranks, simulated one after the other: `sent` has what each one sends."""

    def __init__(self, rank: int, sent: list[torch.Tensor]) -> None:
        self.sequence_degree, self.sequence_rank, self._sent = len(sent), rank, sent

    def trade_parts(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        self._sent[self.sequence_rank] = sent
        if all(one is not None and one.shape == sent.shape for one in self._sent):
            received.copy_(torch.stack([one[self.sequence_rank] for one in self._sent]))


def on_each(ranks: int, act: Any) -> list[Any]:
    """What `act(axis)` returns on each rank, in the second of two rounds, when all have sent their parts."""
    sent: list[Any] = [torch.empty(0)] * ranks
    for _ in range(2):
        found = [act(SequenceAxis(Rank(rank, sent))) for rank in range(ranks)]
    return found


@pytest.mark.parametrize(("ranks", "heads", "grouped"), [(2, 4, 2), (4, 4, 4), (4, 8, 2), (2, 2, 1)])
def test_a_rank_gets_all_tokens_of_its_heads_and_gives_them_back(ranks: int, heads: int, grouped: int) -> None:
    query, key = (torch.rand(BATCH, count, TOKENS, SIZE) for count in (heads, grouped))
    own = on_each(ranks, lambda axis: axis.heads(axis_part(query, axis), axis_part(key, axis)))
    each = heads // ranks
    for rank, (some, few) in enumerate(own):
        assert torch.equal(some, query[:, rank * each : (rank + 1) * each])
        first = rank * each * grouped // heads  # of the key heads that these queries belong to
        assert torch.equal(few, key[:, first : first + max(grouped // ranks, 1)])
    results = on_each(ranks, lambda axis: axis.tokens(own[axis.rank][0].transpose(1, 2)))
    for part, result in zip(query.transpose(1, 2).chunk(ranks, dim=1), results, strict=True):
        assert torch.equal(result, part)


def axis_part(states: torch.Tensor, axis: SequenceAxis) -> torch.Tensor:
    return states.chunk(axis.degree, dim=2)[axis.rank]


def test_parts_and_positions_follow_each_other_and_a_part_of_one_is_the_whole() -> None:
    ids = torch.arange(BATCH * TOKENS).view(BATCH, TOKENS)
    axes = [SequenceAxis(Rank(rank, [torch.empty(0)] * 4)) for rank in range(4)]
    parts = [axis.part(ids) for axis in axes]
    assert torch.equal(torch.cat(parts, dim=1), ids)
    assert torch.cat([axis.positions(part) for axis, part in zip(axes, parts, strict=True)], 1).tolist() == [
        [*range(8)]
    ]
    assert SequenceAxis(AloneInSequence(1)).part(ids) is ids
    with pytest.raises(PlanError, match=r"whose length 4 divides, found 7 tokens; use 4 or 8, or parallel\.sp=1"):
        axes[0].part(ids[:, :7])


@pytest.mark.parametrize(
    ("degree", "heads", "grouped", "divides"),
    [(2, 14, 2, True), (7, 14, 2, False), (14, 14, 2, True), (8, 64, 8, True), (16, 64, 8, True), (3, 64, 8, False)],
)
def test_heads_are_divided_or_copied_evenly(degree: int, heads: int, grouped: int, divides: bool) -> None:
    assert divides_heads(degree, heads, grouped) == divides


def test_widths_count_copied_heads() -> None:
    model = model_of("llama")  # 4 heads of 6, 2 key and value heads
    assert traded_widths(model, 2) == ((8 * 6, 4 * 6),) * 2
    assert traded_widths(model, 4) == ((12 * 6, 4 * 6),) * 2


# ---- refusals --------------------------------------------------------------------------------------------------------

ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("make", "degree", "found"),
    [
        (partial(model_of, "t5"), 2, "mix tokens in its attention alone"),
        (partial(nn.Linear, 2, 2), 2, "found Linear; use one of them"),
        (partial(model_of, "mistral", sliding_window=8), 2, "found sliding_window=8; set"),
        (partial(model_of, "qwen2", use_sliding_window=True, max_window_layers=0), 2, "found sliding_attention; set"),
        (partial(model_of, "llama", rope_parameters=ROPE), 2, "found rope_type=dynamic"),
        (
            partial(model_of, "llama"),
            3,
            "divisor of the 4 attention heads, and one that divides or is divided by the 2",
        ),
        (partial(model_of, "gpt2"), 3, "divisor of the 4 attention heads, found 3; use parallel.sp=2 or parallel.sp=4"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(make: Any, degree: int, found: str) -> None:
    with pytest.raises(PlanError) as error:
        SequenceParallel(degree).check(make(), ranks=6 * degree)
    assert str(error.value).startswith(f"parallel.sp={degree}: expected")
    assert found in str(error.value)


def test_other_attentions_ranks_and_divided_layers_are_refused() -> None:
    model, parts = model_of("llama"), SequenceParallel(2)
    model.set_attn_implementation("eager")
    with pytest.raises(PlanError, match="expected the attention sdpa, found eager"):
        parts.check(model, ranks=2)
    with pytest.raises(PlanError, match=r"parallel\.sp=2: expected a divisor of the 3 ranks"):
        parts.check(model, ranks=3)
    with pytest.raises(PlanError, match=r"parallel\.sp=2: expected parallel\.tp=1, found 2"):
        parts.check(model, ranks=2, tensor_degree=2)
    with pytest.raises(PlanError, match=r"parallel\.sp: expected at least 1, found 0"):
        SequenceParallel(0)
    SequenceParallel().check(nn.Linear(2, 2), ranks=3)


@pytest.mark.parametrize("name", ["labels", "attention_mask", "position_ids", "inputs_embeds"])
def test_arguments_that_need_whole_sequences_are_refused(name: str) -> None:
    model, ids = model_of("llama"), torch.zeros((1, 4), dtype=torch.int64)
    sequences = DividedSequences(model, SequenceAxis(AloneInSequence(2)))
    with pytest.raises(PlanError, match=rf"parallel\.sp=2: expected a forward without {name}, found one"):
        model(ids, **{name: ids})
    sequences.remove()


@pytest.mark.parametrize("cached", [True, False])
def test_generating_is_refused_while_sequences_are_divided_with_and_without_a_cache(cached: bool) -> None:
    model, ids = model_of("llama"), torch.zeros((1, 4), dtype=torch.int64)
    sequences = DividedSequences(model, SequenceAxis(AloneInSequence(2)))
    with pytest.raises(PlanError, match=r"parallel\.sp=2: `generate` needs whole sequences"):
        model.generate(ids, max_new_tokens=1, use_cache=cached)
    sequences.remove()
    assert "generate" not in vars(model)
    assert model.generate(ids, max_new_tokens=1, use_cache=cached).shape == (1, 5)


def test_a_model_is_as_it_was_after_its_removal() -> None:
    model, ids = model_of("qwen2"), torch.arange(8).view(1, 8)
    wanted = model(ids).logits
    sequences = DividedSequences(model, SequenceAxis(AloneInSequence(2)))
    assert model(ids).logits.shape[1] == 4
    for _ in range(2):
        sequences.remove()
    assert torch.equal(model(ids).logits, wanted)
    assert vars(model).get("forward") is None
    assert model.config._attn_implementation == "sdpa"
