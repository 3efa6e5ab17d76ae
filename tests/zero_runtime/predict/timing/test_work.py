"""The work that is counted in a traced step has the operations of the closed forms, exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.traced_steps import counted_step
from points import make_config
from torch._subclasses import FakeTensorMode

from orchestrator.config.schema import Device, Model, ResolvedBatch, RunConfig
from orchestrator.config.state_groups import Precision
from zero_runtime.activations.rule import RecomputeRule
from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.timing.segments import SegmentTable
from zero_runtime.predict.timing.work import LinearWork, Work
from zero_runtime.predict.timing.work_counter import WorkCounter

HIDDEN, VOCABULARY, SEQ, MICRO, INNER = 32, 64, 24, 3, 48
LLAMA = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 2}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_head": 4, "n_positions": 64}
HEAD = VOCABULARY * HIDDEN
# Elements of the matrices of a block, and of the last of them.
MATRICES = {"llama": 3 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER, "gpt2": 12 * HIDDEN * HIDDEN}
LAST = {"llama": HIDDEN * INNER, "gpt2": 4 * HIDDEN * HIDDEN}


def config_of(kind: str, layers: int, recompute: str = "none", device: Device = Device.cuda) -> RunConfig:
    sizes = LLAMA | {"num_hidden_layers": layers} if kind == "llama" else GPT2 | {"n_layer": layers}
    base = make_config(Path("outputs"), stage=2)
    return replace(
        base,
        model=Model(kind, kind, sizes),
        precision=Precision(MixedPrecision("bf16"), compute="bf16"),
        batch=ResolvedBatch(micro=MICRO, accumulation=1, global_size=MICRO, seq=SEQ),
        recompute=RecomputeRule(recompute),  # type: ignore[arg-type]  # a word
        resources=replace(base.resources, device=device),
    )


def total(table: SegmentTable[Work]) -> Work:
    every = [work for of_key in table.values.values() for work in of_key]
    return Work(*map(sum, zip(*every, strict=True)))


@pytest.mark.parametrize("device", Device)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_step_has_six_operations_per_parameter_and_token_and_those_of_attention(kind: str, device: Device) -> None:
    """Attention: two products of 2 x seq^2 x hidden in forward, five in backward, which computes the scores again; half
    of each, as it is causal."""
    layers, tokens = 2, MICRO * SEQ
    found = total(counted_step(config_of(kind, layers, device=device)).work)
    assert found.product_flops == 6 * (layers * MATRICES[kind] + HEAD) * tokens
    assert found.attention_flops == layers * (2 + 5) * 2 * tokens * SEQ * HIDDEN // 2


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_recomputed_blocks_have_eight_without_the_result_that_no_gradient_needs(kind: str) -> None:
    """The recomputation of a block ends before its last product: the backward needs only what that product saves."""
    layers, tokens = 2, MICRO * SEQ
    found = total(counted_step(config_of(kind, layers, "full")).work)
    blocks = layers * (8 * MATRICES[kind] - 2 * LAST[kind])
    assert found.product_flops == (blocks + 6 * HEAD) * tokens
    assert found.attention_flops == layers * (2 + 2 + 5) * 2 * tokens * SEQ * HIDDEN // 2


@pytest.mark.parametrize("recompute", [pytest.param("none", marks=pytest.mark.full), "full"])
def test_five_blocks_stand_for_many(recompute: str) -> None:
    config = config_of("llama", 8, recompute)
    short, whole = counted_step(config).work, counted_step(config, whole=True).work
    assert short == whole


def test_two_traces_determine_the_work_of_the_sizes_between() -> None:
    config = config_of("llama", 2, "by_operation")
    traced = {
        micro: counted_step(replace(config, batch=replace(config.batch, micro=micro))).work for micro in (2, 5, 9)
    }
    linear = LinearWork(2, 9, traced[2], traced[9])
    assert linear.at(5) == traced[5]
    assert LinearWork.of_plain(linear.plain()) == linear
    with pytest.raises(ValueError, match="micro-batch 10: expected 2 to 9"):
        linear.at(10)


def counted(action: Any, *args: Any, **kwargs: Mapping[str, Any]) -> Work:
    counter = WorkCounter()
    counter(0, action, args, kwargs, action(*args, **kwargs))
    return Work(*counter._segments.get(0, Work()))


def test_the_bytes_of_an_operation_are_those_that_it_reads_and_writes() -> None:
    aten, ones, ids = torch.ops.aten, torch.ones(4, 8), torch.zeros(3, dtype=torch.int64)
    nbytes = 4 * 8 * 4
    assert counted(aten.add.Tensor, ones, ones).other_bytes == 3 * nbytes
    assert counted(aten.add_.Tensor, ones.clone(), ones).other_bytes == 3 * nbytes
    assert counted(aten.add.Tensor, ones, torch.ones(1).expand(4, 8)).other_bytes == 2 * nbytes + 4
    assert counted(aten.copy_.default, ones.clone(), ones).other_bytes == 2 * nbytes
    assert counted(aten.zeros_like.default, ones).other_bytes == nbytes
    assert counted(aten.embedding.default, ones, ids).other_bytes == 2 * (3 * 8 * 4) + ids.nbytes
    assert counted(aten.cat.default, [ones, ones]).other_bytes == 4 * nbytes
    for view in (aten.t.default, aten.detach.default, aten.empty_like.default):
        assert counted(view, ones) == Work()
    product = counted(aten.mm.default, ones, ones.t())
    assert product == Work(2 * 4 * 8 * 4, 0, 2 * nbytes + 4 * 4 * 4, 0, kernels=1)


def test_a_question_for_the_device_of_a_fake_tensor_moves_nothing() -> None:
    """A module that asks for the device of a tensor does so through the dispatcher while it is traced."""
    with FakeTensorMode():
        fake = torch.ones(4, 8)
    assert counted(torch.ops.prim.device.default, fake) == Work()
