"""The predicted memory of points that other engines train, and their largest micro-batch."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from harness.warm_shapes import WarmShapes
from points import config_of_line

from orchestrator import wings
from orchestrator.compose import arguments, compose
from orchestrator.machine.hardware import Hardware
from orchestrator.planning.point import Point
from orchestrator.planning.points import checked_points
from orchestrator.planning.rules.scene import Scene
from orchestrator.report.entry import Entry
from orchestrator.report.ranking import Ranked
from orchestrator.wings.engines import choose
from orchestrator.wings.engines.choose import EnginePoint
from orchestrator.wings.engines.contract import Task
from orchestrator.wings.engines.foreign_runtime import ForeignAccounts, ForeignRuntime
from orchestrator.wings.predict import counting_child, shapes
from orchestrator.wings.predict.peer_fit import rules_for
from orchestrator.wings.predict.point_prediction import PointPrediction
from orchestrator.wings.predict.prediction import Predictions
from orchestrator.wings.predict.step import with_share
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
LORA = "adapter=lora adapter.rank=3 adapter.targets=all-linear"
BUCKET = "engine.deepspeed.zero_optimization.reduce_bucket_size=20000"  # a rank keeps it, of whatever size it is
SMALL_KEPT = "engine.deepspeed.zero_optimization.stage3_param_persistence_threshold=1000"
OFFLOADED = "offload.optimizer=cpu"
SHORT = [
    ("ddp", "zero=stage0 precision=bf16"),
    ("ddp", f"zero=stage0 precision=fp32 {LORA}"),
    ("ddp", "zero=stage0 precision=fp32 optimizer=sgd optimizer.momentum=0.9"),
    *(("fsdp2", f"zero=stage{stage} precision=bf16") for stage in (1, 3)),
    ("fsdp2", f"zero=stage2 precision=bf16 {LORA}"),
    *(("deepspeed", f"zero=stage{stage} precision=bf16") for stage in (0, 3)),
    ("deepspeed", "zero=stage1 precision=fp32"),
    ("deepspeed", f"zero=stage2 precision=bf16 {LORA}"),
    ("deepspeed", f"zero=stage1 precision=bf16 {BUCKET} {OFFLOADED}"),
    ("deepspeed", f"zero=stage2 precision=bf16 {OFFLOADED} batch.accumulation=2"),
]
LONG = [
    *(("ddp", f"zero=stage0 precision={precision}") for precision in ("fp32", "bf16")),
    *(("ddp", f"zero=stage0 precision={precision} {LORA}") for precision in ("fp32", "bf16")),
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
    *(("deepspeed", f"zero=stage{stage} precision=bf16 {LORA}") for stage in (0, 2, 3)),
    *(
        ("deepspeed", f"zero=stage{stage} precision={precision} {OFFLOADED}")
        for stage, precision in ((1, "fp32"), (1, f"bf16 {BUCKET}"), (2, "bf16"), (3, "fp32"), (3, "bf16"))
    ),
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
    rules = rules_for(config, shapes.units_of(config))
    assert rules is not None
    return rules.states


def left_over(kind: str, line: str) -> dict[str, int]:
    """What may be counted besides: of DeepSpeed's gradients that are not converted to fp32, the rest of a parameter
    that two ranks share, for each of the optimizer's two groups: at most the largest parameter."""
    shares = kind == "deepspeed" and "precision=fp32" in line and ("stage1" in line or "stage2" in line)
    return {"params": 0, "grads": 2 * 4 * 131 * 32 if shares else 0, "optimizer": 0}


@pytest.mark.parametrize(
    ("kinds", "cases", "ranks"),
    [
        *(("ddp fsdp2", SHORT, 2), ("deepspeed", SHORT, 2), ("plain", ALONE, 1)),
        *(pytest.param(kinds, LONG, 2, marks=pytest.mark.full) for kinds in ("ddp fsdp2", "deepspeed")),
    ],
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


LIMIT = "precision=fp32 batch.global_size=48 batch.at_limit=true batch.seq=64"


@pytest.fixture
def _counts_in_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting_child, "start_process", WarmShapes)


@pytest.mark.usefixtures("_counts_in_a_fork")
@pytest.mark.parametrize("engine", ["zero", "ddp"])
def test_the_micro_batch_at_the_limit_is_the_largest_divisor_that_fits(engine: str) -> None:
    words = f"engine={engine} resources.ranks=2 zero=stage0 {LIMIT}"
    line = f"{MODEL} {words}".replace("batch.seq=8 batch.micro=1 ", "")
    all_of_it = config_of_line(f"{line} resources.memory_mib=1000").batch
    assert (all_of_it.micro, all_of_it.accumulation, all_of_it.global_size) == (24, 1, 48)
    configs = {micro: with_share(config_of_line(line), micro) for micro in (1, 2, 3, 4, 6, 8, 12, 24)}
    predictions = Predictions(list(configs.values()), list(configs.values()))
    needs = {micro: predictions.of(config) for micro, config in configs.items()}
    most = {micro: one.ceiling_bytes for micro, one in needs.items() if isinstance(one, PointPrediction)}
    limit = -(-(most[8] or 0) >> 20) + 1  # MiB
    expected = max(micro for micro, nbytes in most.items() if (nbytes or 0) <= limit << 20)
    found = config_of_line(f"{line} resources.memory_mib={limit}").batch
    assert 8 <= expected < 24
    assert (found.micro, found.accumulation, found.global_size) == (expected, 24 // expected, 48)


@pytest.mark.usefixtures("_counts_in_a_fork")
def test_where_nothing_fits_the_point_is_predicted_not_to_fit() -> None:
    line = f"{MODEL} engine=ddp resources.ranks=2 zero=stage0 {LIMIT} resources.memory_mib=1"
    line = line.replace("vocab_size=131", "vocab_size=5000")  # 5 MB of states
    config = config_of_line(line)
    found = Predictions([config], [config]).of(config)
    assert config.batch.micro == 1
    assert isinstance(found, PointPrediction)
    assert found.cannot_fit


def test_the_limit_needs_a_global_batch() -> None:
    composition = compose.compose(arguments.split(f"{MODEL} batch.at_limit=true".split()))
    points, problems = checked_points(composition, Scene(Hardware(4, "cpu")))
    assert points == []
    assert "batch.global_size=32" in problems[0]


def found_point(kind: str, stage: int, *, micro: int = 4, needed: int = 1, sent: int = 1) -> EnginePoint:
    config = config_of_line(f"{MODEL} engine={kind} resources.ranks=2 zero=stage{stage}")
    config = replace(config, batch=replace(config.batch, micro=micro))
    return EnginePoint(Point(f"{kind}{stage}", config, ()), needed, sent)


def test_of_each_engine_the_stage_that_sends_the_least_is_confirmed_and_at_the_limit_the_largest() -> None:
    found = [
        found_point("zero", 1, needed=9, sent=2),
        found_point("zero", 2, needed=5, sent=2),
        found_point("zero", 3, needed=2, sent=3, micro=16),
        found_point("fsdp2", 3, needed=1, sent=3),
    ]
    assert [one.point.label for one in choose.best_of_each(found, choose.least)] == ["zero2", "fsdp23"]
    assert [one.point.label for one in choose.best_of_each(found, choose.largest)] == ["zero3", "fsdp23"]


def test_a_row_without_a_place_is_not_chosen_and_of_a_tie_the_smaller() -> None:
    tried = [found_point("zero", 1, needed=9), found_point("fsdp2", 2, needed=5), found_point("ddp", 0, needed=1)]
    places = {"zero1": 1, "fsdp22": 1, "ddp0": None}
    rows = [Ranked(Entry(label, "measured"), place) for label, place in places.items()]
    best = choose.best_of(tried, rows)
    assert best is not None
    assert best.point.label == "fsdp22"
    assert choose.best_of(tried[2:], rows) is None
