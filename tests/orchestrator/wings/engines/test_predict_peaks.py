"""The predicted peak of a step of other engines is the one that torch's CPU allocator counts."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from points import config_of_line

from benchmarks.predicted_peaks import allocated
from benchmarks.published_peers import model_of_numels
from orchestrator import wings
from orchestrator.config.schema import Device
from orchestrator.planning.point import Point
from orchestrator.wings.engines.contract import Task, TrainingEngine
from orchestrator.wings.engines.optimizer_words import step_form
from orchestrator.wings.predict import activations, memory_cache, shapes
from orchestrator.wings.predict.fit_peers import as_engine
from orchestrator.wings.predict.peer_fit import peak_of, rules_for
from orchestrator.wings.predict.step import Memories
from orchestrator.worker.setup import build_deferred
from orchestrator.workloads.models import token_losses
from tests.harness.ranks import run_ranks
from zero_runtime.activations.recompute import Recomputation
from zero_runtime.initial_values import InitialValues
from zero_runtime.optim.lr_schedule import Rates
from zero_runtime.predict.memory.peers import FUSED, Moment, plain
from zero_runtime.state_bytes import ONE_NUMBER_BYTES

WIDTH, VOCABULARY, MICRO, SEQ = 64, 256, 8, 64
MODEL = (
    f"model=llama_tiny model.config.num_hidden_layers=4 model.config.hidden_size={WIDTH} "
    f"model.config.intermediate_size=176 model.config.vocab_size={VOCABULARY} model.config.num_attention_heads=4 "
    f"model.config.num_key_value_heads=4 batch.seq={SEQ} batch.micro={MICRO} optimizer=adamw resources.device=cpu "
    "data=synthetic resources.ranks=2"
)
STAGE = {"ddp": "zero=stage0", "deepspeed": "zero=stage0", "fsdp2": "zero=stage3"}
LORA = "adapter=lora adapter.rank=3"
SHORT = ("precision=bf16 batch.accumulation=2",)
FULL = (
    "precision=fp32 batch.accumulation=2",
    "precision=bf16",
    "precision=bf16 recompute=full",
    f"precision=bf16 {LORA}",
)
TRAINED_STEPS = 3  # the optimizer makes its states in the first, and DDP its buckets anew in the second


def measured(kind: str, lines: Sequence[str]) -> list[int]:
    """Of each line the most bytes that the allocator gave out, from the weights to the last step."""
    gc.disable()  # a collection frees cycles at times that depend on what else has run
    found = []
    for line in lines:
        engines: list[TrainingEngine] = []
        found.append(allocated(lambda line=line, engines=engines: engines.append(trained(kind, line)))[0])  # type: ignore[misc]
        engines[0].close()
    return found


def trained(kind: str, line: str) -> TrainingEngine:
    config, device = config_of_line(f"{line} engine={kind}"), torch.device("cpu")
    model, initialise = build_deferred(config)
    values = InitialValues(model, seed=config.seed, initialise=initialise)
    values.fill_buffers()
    Recomputation(model, config.recompute)
    engine: TrainingEngine = wings.load(wings.ENGINES[kind]).build(Task(config, model, values.draw, device))
    ids, labels = (torch.zeros((config.batch.accumulation, MICRO, SEQ), dtype=torch.int64) for _ in range(2))
    for _ in range(TRAINED_STEPS):
        for micro in range(config.batch.accumulation):
            engine.before_micro_batch(last=micro == config.batch.accumulation - 1)
            loss = token_losses(engine.module, ids[micro], labels[micro]) / ids.numel()
            engine.backward(loss)
            del loss
        engine.step(Rates(1e-3))
    return engine


def predicted(kind: str, line: str) -> tuple[int, int, int]:
    """The peak, the bytes of it that are a block's own, which need not exist while the most activations do, and the
    most bytes that it leaves out: storages of one number, of which an operation keeps at most as
    many as other storages, and Adam one for each parameter; the random state of each recomputing block; where the
    processor multiplies 16-bit matrices in fp32, copies of the operands and the result of the largest product, the
    head's; and where DeepSpeed has no bucket, the gradients that a backward has made so far, of which its rules have
    none beside the activations of the only micro-batch."""
    config = config_of_line(f"{line} engine={kind}")
    model, answers = shapes.units_of(config), dict(activations.answers([config]))
    rules, memory = rules_for(config, model), Memories(answers | {memory_cache.units_key(config): model})
    known = memory.of(config)
    assert rules is not None
    assert known is not None
    peak, trace = peak_of(rules, known, MICRO), known.parts[0].linear.at(MICRO)
    assert peak is not None
    tokens = MICRO * SEQ
    scratch = 4 * (tokens * WIDTH + WIDTH * VOCABULARY + tokens * VOCABULARY) if "bf16" in line else 0
    made = rules.at(Moment.GRADIENTS) if config.batch.accumulation == 1 and "recompute=full" in line else 0
    numbers = len(trace.sizes) + sum(len(unit["shapes"]) for unit in model["units"])
    of_a_block = sum(term.nbytes for term in rules.terms if term.each)
    return peak.total, of_a_block, ONE_NUMBER_BYTES * numbers + trace.random_state_bytes + scratch + made


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("ddp", SHORT),
        ("fsdp2", (f"precision=fp32 {LORA}",)),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (("ddp", FULL), ("fsdp2", FULL[1:]), ("deepspeed", (*SHORT, *FULL)))
        ),
    ],
)
def test_the_peak_of_another_engine_is_the_predicted_one(kind: str, words: Sequence[str]) -> None:
    """DDP, and DeepSpeed at stage 0, compute bf16 under autocast. FSDP2 gathers a block's frozen parameters too."""
    if importlib.util.find_spec("deepspeed") is None and kind == "deepspeed":
        pytest.skip("DeepSpeed is not installed: pip install zero-lab[deepspeed]")
    lines = [f"{MODEL} {STAGE[kind]} {one}" for one in words]
    by_rank = run_ranks(measured, 2, kind, lines)
    for line, *found in zip(lines, *by_rank, strict=True):
        peak, of_a_block, left_out = predicted(kind, line)
        assert -of_a_block <= max(found) - peak <= left_out, (line.removeprefix(MODEL), found, peak, left_out)


NUMELS = (3000, 4000, 5000)


@pytest.mark.parametrize(
    ("name", "words", "decay", "dtype"),
    [
        ("AdamW", {"foreach": True}, 0.1, torch.bfloat16),  # ten bytes an element
        ("AdamW", {"fused": True}, 0.1, torch.bfloat16),
        ("AdamW", {}, 0.1, torch.float32),
        ("Adam", {}, 0.1, torch.float32),
        *(("SGD", {"foreach": True, "momentum": 0.9}, decay, torch.float32) for decay in (0.0, 0.1)),
        *(
            (name, {"foreach": True}, 0.1, torch.float32)
            for name in ("Adam", "Adadelta", "Adagrad", "NAdam", "RMSprop")
        ),
    ],
)
def test_the_copies_of_torchs_step_are_the_counted_ones(
    name: str, words: dict[str, Any], decay: float, dtype: torch.dtype
) -> None:
    def trained_alone() -> torch.optim.Optimizer:
        params = [torch.nn.Parameter(torch.ones(numel, dtype=dtype)) for numel in NUMELS]
        optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(params, lr=1e-3, weight_decay=decay, **words)
        for _ in range(2):
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    found, _ = allocated(trained_alone)
    config = config_of_line(f"{MODEL} zero=stage0 optimizer=torch optimizer.name={name} optimizer.weight_decay={decay}")
    on = Device.cuda if "foreach" in words else Device.cpu
    form = step_form(replace(config, resources=replace(config.resources, device=on)), by_default=True)
    states = (1 if name in ("SGD", "Adagrad", "RMSprop") else 2) * dtype.itemsize
    model = replace(model_of_numels((), NUMELS), state_bytes=states)
    step = FUSED if "fused" in words else form
    peak = plain(model, weights=dtype.itemsize, has_masters=False, held=dtype.itemsize, step=step).peak()
    loop = dtype.itemsize * step.of_param * max(NUMELS)  # an upper bound
    assert -loop <= found - peak <= ONE_NUMBER_BYTES * 3 * len(NUMELS), (found, peak)
    assert step.of_param == 0 or found > peak - loop


def test_micro_batches_of_a_model_with_biases_have_one_trace_under_autocast() -> None:
    """Autocast drops the copies of biases at the end of forward, in the order of their addresses."""
    words = "model=gpt2 model.config.n_layer=2 model.config.n_embd=32 model.config.n_head=2 model.config.vocab_size=64"
    line = f"{words} data=synthetic batch.seq=8 resources.device=cpu resources.ranks=2 precision=bf16 engine=ddp"
    answers = dict(activations.answers([config_of_line(f"{line} batch.micro={micro}") for micro in (2, 9)]))
    assert sum("linear" in one for one in answers.values()) == 1


def test_rows_as_an_engine_are_counted_under_its_autocast() -> None:
    ours, theirs = (config_of_line(f"{MODEL} precision=bf16 zero=stage0 engine={kind}") for kind in ("zero", "ddp"))
    asked = as_engine("ddp", Point("a", ours))
    key = memory_cache.activations_key
    assert key(asked.config) == key(theirs) != key(ours)
