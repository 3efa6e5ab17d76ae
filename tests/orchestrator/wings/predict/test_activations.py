"""The activation bytes that are predicted without running equal those counted in real steps, byte for byte."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
import torch
from harness.allocations import allocated_peak
from harness.ranks import run_alone, run_ranks
from harness.traced_steps import trace_of
from points import config_of_line, make_config

from orchestrator.config.schema import (
    Adapter,
    AdapterKind,
    Data,
    DataKind,
    Device,
    Loss,
    LossKind,
    Model,
    ResolvedBatch,
    RunConfig,
)
from orchestrator.config.state_groups import Precision
from orchestrator.wings.predict import activations
from orchestrator.wings.predict.activations import answers
from orchestrator.wings.predict.memory_cache import activations_key, units_key
from orchestrator.wings.predict.shapes import units_of
from orchestrator.wings.predict.step import Memories
from orchestrator.worker.setup import build_deferred
from orchestrator.workloads.models import token_losses
from zero_runtime.accounting import predicted_state_bytes
from zero_runtime.activations.recompute import Recomputation
from zero_runtime.activations.rule import ActivationDevice, RecomputeKind, RecomputeRule
from zero_runtime.census import ActivationCensus
from zero_runtime.offload.copy_streams import HELD_SOURCES
from zero_runtime.optim.configs import AdamWConfig
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.memory.activation_count import ActivationBytes, Trace
from zero_runtime.predict.timing.segments import SegmentTable
from zero_runtime.predict.timing.work import Work
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime

LLAMA = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2}  # grouped heads
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
SEQ = 24


def config_of(kind: str = "llama", **groups: Any) -> RunConfig:
    model = Model(kind, kind, LLAMA if kind == "llama" else GPT2)
    base = replace(make_config(Path("outputs"), stage=groups.pop("stage", 2)), model=model)
    settings = {"precision": fp32(), "batch": ResolvedBatch(micro=3, accumulation=1, global_size=3, seq=SEQ)}
    resources = replace(base.resources, ranks=1)
    return replace(base, **{"resources": resources, **settings, **groups})


def fp32() -> Precision:
    return Precision(MixedPrecision(), compute="fp32")


def bf16() -> Precision:
    return Precision(MixedPrecision("bf16"), compute="bf16")


def tiled(tile: int) -> Loss:
    return Loss(LossKind.tiled, tile)


KINDS = get_args(RecomputeKind)
CONFIGS = [config_of(recompute=RecomputeRule(kind)) for kind in KINDS]
CONFIGS += [config_of("gpt2", precision=bf16(), recompute=RecomputeRule(kind)) for kind in KINDS[:2]]
CONFIGS += [config_of(precision=bf16(), loss=tiled(16))]
CONFIGS += [config_of(precision=Precision(MixedPrecision("bf16"), compute="bf16", keep_dtype=["*norm*", "lm_head*"]))]
CONFIGS += [config_of(precision=Precision(MixedPrecision("bf16"), compute="fp32"), loss=tiled(1024))]
CONFIGS += [config_of("gpt2", stage=3, batch=ResolvedBatch(micro=1, accumulation=1, global_size=1, seq=7))]
CONFIGS += [config_of(adapter=Adapter(AdapterKind.lora, rank=4), recompute=RecomputeRule(kind)) for kind in KINDS[:2]]
SHORT_CONFIGS = [CONFIGS[3], CONFIGS[4], CONFIGS[6], CONFIGS[7]]  # by operation, GPT-2 in bf16, tiles, kept dtypes
OTHER_CONFIGS = [config for config in CONFIGS if config not in SHORT_CONFIGS]


class Counted(NamedTuple):
    kept: int
    allocated: int  # peak in a step's forward and backward, above parameters and optimizer states
    predicted: ActivationBytes
    peak: int  # the predicted peak, above parameters and optimizer states


def _step(config: RunConfig) -> Counted:
    model, initialise = build_deferred(config)
    recompute = config.recompute
    Recomputation(model, RecomputeRule(recompute.kind, recompute.every))
    keep = tuple(config.precision.keep_dtype)
    runtime = ZeroRuntime(
        model,
        ZeroPlan.from_stage(config.zero.stage),
        config.precision.mixed,
        AdamWConfig(),
        RuntimeSettings(initialise=initialise, keep_dtype=keep),
        torch.device("cpu"),
    )
    ids = torch.zeros((config.batch.micro, config.batch.seq), dtype=torch.int64)
    labels, tokens = ids.clone(), runtime.sum_over_ranks(ids.numel())

    def loss() -> torch.Tensor:
        return token_losses(runtime.model, ids, labels, config.loss.tile_tokens) / tokens

    def step() -> None:
        runtime.backward(loss())

    step()
    runtime.step(1e-3)
    with ActivationCensus(runtime) as census:
        kept = loss()
    runtime.backward(kept)
    del kept
    runtime.step(1e-3)
    allocated = allocated_peak(step)
    trace, states = trace_of(config), predicted_state_bytes(runtime)
    assert sum(trace.events) == 0, "something that came has not gone with the step, such as a parameter's gradient"
    found = trace.total()
    rests = states.params + states.optimizer
    memory = Memories(dict(answers([config])) | {units_key(config): units_of(config)}).of(config)
    assert memory is not None
    peak = memory.peak(config.batch.micro)
    assert peak is not None
    return Counted(census.bytes, allocated, found, peak.total - peak.inputs - peak.buffers - rests)


def _steps(configs: list[RunConfig]) -> list[Counted]:
    return [_step(config) for config in configs]


@pytest.fixture(
    scope="module", params=[SHORT_CONFIGS, pytest.param(OTHER_CONFIGS, marks=pytest.mark.full)], ids=["some", "others"]
)
def counted(request: pytest.FixtureRequest) -> list[tuple[RunConfig, Counted]]:
    found: list[Counted] = run_ranks(_steps, 1, request.param)[0]
    return list(zip(request.param, found, strict=True))


def test_the_bytes_that_a_forward_keeps_equal_the_prediction(counted: list[tuple[RunConfig, Counted]]) -> None:
    for config, one in counted:
        settings = (config.model.name, config.precision, config.recompute, config.loss, config.adapter, config.batch)
        assert one.kept == one.predicted.kept, settings
        assert 0 < one.predicted.kept_outside < one.kept


def test_the_allocators_peak_is_not_below_the_predicted_one(counted: list[tuple[RunConfig, Counted]]) -> None:
    """The predicted peak leaves out the kernels' own buffers and the random states of recomputing blocks."""
    for config, one in counted:
        assert one.peak <= one.allocated, (config.model.name, config.precision, config.recompute)


def test_a_model_that_takes_packed_rows_is_not_the_one_before_it() -> None:
    before = activations.built(config_of())
    packed = activations.built(config_of(data=Data(DataKind.pairs, path="a.jsonl", packing=True)))
    assert type(packed) is not type(before)
    assert type(activations.built(config_of())) is type(before)


def _stage_3(config: RunConfig) -> tuple[int, int]:
    one = _step(config)
    return one.kept, one.predicted.kept


@pytest.mark.full
def test_two_ranks_at_stage_3_keep_the_predicted_bytes() -> None:
    for kept, predicted in run_ranks(_stage_3, 2, config_of(stage=3, recompute=RecomputeRule("every_nth"))):
        assert kept == predicted


Pairs = list[tuple[ActivationBytes, ActivationBytes]]


def _family(other: dict[str, Any]) -> Pairs:
    """For each micro-batch size, the answer (interpolated between two counted sizes) and the counted bytes."""
    configs = [
        config_of(batch=ResolvedBatch(micro=micro, accumulation=1, global_size=micro, seq=SEQ), **other)
        for micro in (1, 2, 3, 4, 7)
    ]
    found = dict(answers(configs))
    return [
        (ActivationBytes(**found[activations_key(config)]["bytes"]), trace_of(config).total()) for config in configs
    ]


@pytest.mark.full
@pytest.mark.parametrize(
    "other",
    [
        pytest.param({}, marks=pytest.mark.full),
        pytest.param({"recompute": RecomputeRule("by_operation")}, marks=pytest.mark.full),
        {"loss": tiled(2 * SEQ)},
    ],
    ids=["plain", "by_operation", "tiled"],
)
def test_bytes_interpolated_between_two_counted_micro_batches_equal_the_counted_bytes(other: dict[str, Any]) -> None:
    pairs = run_alone(_family, other)
    assert len(pairs) == 5
    assert all(told == counted for told, counted in pairs)


def _beside_a_gpu(kind: RecomputeKind, place: ActivationDevice, precision: Precision) -> ActivationBytes:
    config = config_of(precision=precision, recompute=RecomputeRule(kind, offload=place))
    return trace_of(replace(config, resources=replace(config.resources, device=Device.cuda))).total()


def _gpu_counts(
    kinds: list[RecomputeKind],
) -> tuple[list[tuple[ActivationBytes, ActivationBytes]], list[tuple[int, int]]]:
    """For each kind, the counts without offload and with offload to the CPU; for bf16 and fp32, the bytes kept on a GPU
    and on a CPU."""
    none, cpu = get_args(ActivationDevice)
    pairs = [(_beside_a_gpu(kind, none, bf16()), _beside_a_gpu(kind, cpu, bf16())) for kind in kinds]
    both = [
        (_beside_a_gpu(KINDS[0], none, one).kept, trace_of(config_of(precision=one)).total().kept)
        for one in (bf16(), fp32())
    ]
    return pairs, both


@pytest.mark.full
def test_gpu_attention_keeps_what_its_kernels_keep_and_offload_leaves_the_sources_of_the_last_copies() -> None:
    pairs, (sixteen, thirty_two) = run_alone(_gpu_counts, KINDS)
    # No storage that a block keeps is larger than its widest activation, of the MLP, in fp32.
    held = HELD_SOURCES * 3 * SEQ * LLAMA["intermediate_size"] * 4
    for here, there in pairs:
        assert here.host == 0
        assert there.host > 0
        assert there.kept_outside < there.kept <= there.kept_outside + held
        assert there.kept < here.kept
    # Flash attention and the CPU kernel keep the same tensors: inputs, output and one logarithm per row. Flash
    # attention also keeps a seed of 16 bytes. In fp32 with grouped heads the scores are kept too: 3 sequences x 4 heads
    # x 24 x 24 numbers in each of 4 blocks.
    assert sixteen[0] - sixteen[1] == 4 * 16
    assert thirty_two[0] - thirty_two[1] > 4 * 3 * 4 * SEQ * SEQ * 4


def test_a_step_in_which_a_module_was_imported_is_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, calls = activations._counted, []

    def importing(*args: object) -> tuple[Trace, SegmentTable[Work]]:
        calls.append(args)
        if len(calls) == 1:
            monkeypatch.setitem(sys.modules, "made_by_an_import", None)
        return counted(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(activations, "_counted", importing)
    trace_of(config_of_line("model=llama_tiny resources.device=cpu batch.micro=1 batch.seq=16"))
    assert len(calls) == 2
