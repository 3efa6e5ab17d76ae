"""The predicted memory of points that other engines train, and their largest micro-batch."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from points import config_of_line

from orchestrator import wings
from orchestrator.wings.engines.contract import Task
from orchestrator.wings.engines.foreign_runtime import ForeignAccounts, ForeignRuntime
from orchestrator.wings.predict import shapes
from orchestrator.wings.predict.peer_fit import rules_for
from orchestrator.worker.setup import build_deferred
from tests.harness.ranks import run_ranks
from zero_runtime.census import take_census
from zero_runtime.initial_values import InitialValues
from zero_runtime.optim.lr_schedule import Rates

# Odd sizes, so that parts are padded: 2 blocks with 61 columns between them, and 131 rows of embeddings.
MODEL = (
    "model=llama_tiny model.config.num_hidden_layers=2 model.config.hidden_size=32 model.config.intermediate_size=61 "
    "model.config.vocab_size=131 model.config.num_attention_heads=2 model.config.num_key_value_heads=2 "
    "batch.seq=8 batch.micro=1 optimizer=adamw resources.device=cpu data=synthetic"
)
LORA = "adapter=lora adapter.rank=3"
SMALL_KEPT = "engine.deepspeed.zero_optimization.stage3_param_persistence_threshold=1000"
CASES = [
    *(("ddp", f"zero=stage0 precision={precision}") for precision in ("fp32", "bf16")),
    ("ddp", f"zero=stage0 precision=fp32 {LORA}"),
    ("ddp", "zero=stage0 precision=fp32 engine.ddp.gradient_as_bucket_view=false"),
    ("ddp", "zero=stage0 precision=fp32 optimizer=sgd optimizer.momentum=0.9"),
    *(("fsdp2", f"zero=stage{stage} precision={precision}") for stage in (1, 2, 3) for precision in ("fp32", "bf16")),
    *(("fsdp2", f"zero=stage{stage} precision=bf16 {LORA}") for stage in (2, 3)),
    ("fsdp2", "zero=stage1 precision=fp32 batch.accumulation=2"),
    *(
        ("deepspeed", f"zero=stage{stage} precision={precision}")
        for stage in (0, 1, 2, 3)
        for precision in ("fp32", "bf16")
    ),
    *(("deepspeed", f"zero=stage{stage} precision=bf16 {LORA}") for stage in (2, 3)),
    ("deepspeed", f"zero=stage3 precision=bf16 {SMALL_KEPT}"),
]
ALONE = [("plain", f"zero=stage0 precision={precision}") for precision in ("fp32", "bf16", f"bf16 {LORA}")]
STATES = ("params", "grads", "optimizer")


def counted(kind: str, line: str) -> dict[str, int]:
    """The bytes of a rank's model states by component, between the backward of a second step and its update."""
    config, device = config_of_line(line), torch.device("cpu")
    module = wings.load(wings.ENGINES[kind])
    model, initialise = build_deferred(config)
    values = InitialValues(model, seed=config.seed, initialise=initialise)
    values.fill_buffers()
    engine = module.build(Task(config, model, values.draw, device))
    ids = torch.arange(8).unsqueeze(0)
    for step in range(2):
        for micro in range(config.batch.accumulation):
            engine.before_micro_batch(last=micro == config.batch.accumulation - 1)
            engine.backward(engine.module(input_ids=ids, labels=ids).loss)
        if step == 0:
            engine.step(Rates(1e-3))
    runtime = cast(ForeignRuntime, SimpleNamespace(engine=engine, device=device))
    found = take_census(ForeignAccounts(config, runtime, module, 0).held())
    engine.close()
    return {name: getattr(found, name) for name in STATES}


def counted_or_why(kind: str, line: str) -> dict[str, int] | str:
    try:
        return counted(kind, line)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def all_counted(cases: list[tuple[str, str]]) -> list[dict[str, int] | str]:
    """Of each case, or how it failed; one after the other, so that the ranks import each engine once."""
    return [counted_or_why(*case) for case in cases]


def line_of(kind: str, words: str, ranks: int) -> str:
    return f"{MODEL} engine={kind} resources.ranks={ranks} {words}"


def predicted(kind: str, line: str) -> dict[str, int]:
    config = config_of_line(line)
    rules = rules_for(kind, config, shapes.units_of(config))
    assert rules is not None
    return rules.states


def left_over(kind: str, line: str) -> dict[str, int]:
    """What may be counted besides: of DeepSpeed's gradients that are not converted to fp32, the rest of a parameter
    that two ranks share, for each of the optimizer's two groups: at most the largest parameter."""
    shares = kind == "deepspeed" and "precision=fp32" in line and ("stage1" in line or "stage2" in line)
    return {"params": 0, "grads": 2 * 4 * 131 * 32 if shares else 0, "optimizer": 0}


@pytest.mark.parametrize(
    ("kinds", "cases", "ranks"), [("ddp fsdp2", CASES, 2), ("deepspeed", CASES, 2), ("plain", ALONE, 1)]
)
def test_predicted_states_are_the_counted_ones(kinds: str, cases: list[Any], ranks: int) -> None:
    if kinds == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed: pip install zero-lab[deepspeed]")
    asked = [(kind, line_of(kind, words, ranks)) for kind, words in cases if kind in kinds.split()]
    by_rank = run_ranks(all_counted, ranks, asked)
    wrong = []
    for (kind, line), *found in zip(asked, *by_rank, strict=True):
        failed = [one for one in found if isinstance(one, str)]
        worst = None if failed else {name: max(one[name] for one in found) for name in STATES}
        expected = predicted(kind, line)
        if worst is None or any(
            not 0 <= worst[name] - expected[name] <= left_over(kind, line)[name] for name in STATES
        ):
            wrong.append((kind, line.removeprefix(MODEL), failed or worst, expected))
    assert not wrong, "\n".join(map(str, wrong))
