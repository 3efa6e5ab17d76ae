"""The command that predicts published step times: its configurations, its ranking and its cut of the cases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.published_cases import LeftOut
from benchmarks.published_peak import config_of, peer_model
from benchmarks.published_speed import Predicted, config_of_row, kendall_tau, predictions, runs
from orchestrator.wings.predict.speed import Speed
from zero_runtime.predict.timing.step_time import StepSeconds

ROWS = runs()
CUT = [f"MPT-125m {gpus} GPUs seq 2048 micro 26 x 1 A100 40 GB" for gpus in (16, 128)]


def test_cases_have_distinct_names_and_models_that_are_described() -> None:
    assert len({row["case"] for row in ROWS}) == len(ROWS)
    assert {config_of(row["model"])[0] for row in ROWS} == {"gpt2", "llama", "qwen3"}


def test_the_models_of_llm_foundry_have_the_printed_number_of_parameters() -> None:
    """6,658,859,008 with 2,048 positions: the modelled one has 1,024."""
    assert peer_model("mpt_7b").numel + 1024 * 4096 == 6_658_859_008


def test_a_row_becomes_the_configuration_of_the_published_run() -> None:
    row = next(row for row in ROWS if row["case"].startswith("MPT-70b 512 GPUs"))
    config = config_of_row(row)
    assert (config.resources.ranks, config.resources.nodes, config.zero.stage) == (512, 64, 3)
    assert (config.batch.micro, config.batch.global_size, config.recompute.kind) == (8, 4096, "full")
    assert config.hardware.name == "h100_80gb"


def test_a_row_with_tensor_parallelism_has_whole_tokens_where_its_source_had() -> None:
    rows = {row["tokens"]: row for row in ROWS if row.get("tensor_parallel") == "2"}
    whole, parts = (config_of_row(rows[name]) for name in ("whole", "parts"))
    assert (whole.parallel.patterns != [], parts.parallel.patterns) == (True, [])
    assert whole.parallel.tp == 2
    assert whole.batch.global_size == 2 * whole.batch.micro * whole.batch.accumulation * whole.ranks // 4


def test_more_nodes_make_the_same_model_slower_per_gpu_as_published() -> None:
    """A cut of the report: the smallest model on 16 and on 128 GPUs."""
    one, many = predictions([row for row in ROWS if row["case"] in CUT])
    assert isinstance(one, Predicted)
    assert isinstance(many, Predicted)
    assert one.speed.rough
    assert kendall_tau([one, many]) == (1.0, 1)


def test_tau_counts_pairs_within_a_group_only() -> None:
    row = next(row for row in ROWS if row["case"] == CUT[0])
    config = config_of_row(row)
    first = Predicted(row, config, _speed(1.0), published_s=1.0)
    slower = replace(first, speed=_speed(2.0), published_s=3.0)
    wrong = replace(first, speed=_speed(0.5), published_s=4.0)
    other = replace(wrong, row=row | {"device": "b200"})
    assert kendall_tau([first, slower]) == (1.0, 1)
    assert kendall_tau([first, slower, wrong]) == pytest.approx((-1 / 3, 3))
    assert kendall_tau([first, slower, other]) == (1.0, 1)


def _speed(seconds: float) -> Speed:
    return Speed(StepSeconds(seconds, 0, 0, 0, 0, 0, 0), 0.0, rough=True, mfu=0.0)


def test_rows_that_are_not_predicted_have_a_reason() -> None:
    left = [one for one in predictions([row for row in ROWS if row["left_out"]]) if isinstance(one, LeftOut)]
    assert len(left) == sum(bool(row["left_out"]) for row in ROWS) > 0
    assert all(one.reason for one in left)
