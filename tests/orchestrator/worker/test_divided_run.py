"""A run with tensor or sequence parallelism learns what a run on its data ranks learns, and counts tokens once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from points import LLAMA, config_of
from rank_runs import run

from orchestrator.config.parallel import Parallel
from orchestrator.config.schema import RunConfig
from orchestrator.report import summary

STEPS, DATA_RANKS = 5, 2  # an odd number of steps is measured, so that medians are of one step
# Both forwards compute the same sums of at most TERMS terms in another order, each with a relative rounding error of
# TERMS x 2^-24 at most; SUMS of them follow one another in two blocks, and their values are below 4 here, as the loss.
TERMS, SUMS, LARGEST = max(LLAMA["vocab_size"], LLAMA["intermediate_size"]), 14, 4.5
ROUNDING = 2 * TERMS * 2**-24 * SUMS * LARGEST
RATE = 1e-9  # so low that a gradient of another rounding changes no later loss: by STEPS x RATE x its L1 norm at most


def config_with(parallel: Parallel) -> RunConfig:
    config = config_of(STEPS, every=None, stage=1, ranks=DATA_RANKS * parallel.group)
    batch, optimizer = replace(config.batch, global_size=DATA_RANKS), replace(config.optimizer, lr=RATE)
    return replace(config, parallel=parallel, batch=batch, optimizer=optimizer)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The run with all of the model and of the sequences on each rank."""
    return run(tmp_path_factory.mktemp("alone"), config_with(Parallel()))


@pytest.mark.parametrize(
    ("parallel", "messages", "kinds"),
    [
        (Parallel(tp=2), "messages of parallel.tp", {"tensor_part_gather", "tensor_reduce_scatter"}),
        (Parallel(sp=2), "8 exchanges of parallel.sp", {"sequence_all_to_all"}),
    ],
    ids=["tp2", "sp2"],
)
def test_a_divided_run_has_the_losses_tokens_and_parameters_of_its_data_ranks(
    tmp_path: Path, alone: dict[str, Any], parallel: Parallel, messages: str, kinds: set[str]
) -> None:
    divided = run(tmp_path, config_with(parallel))
    losses = [(run["loss"]["validation"], *run["curve"]) for run in (alone, divided)]
    assert all(abs(one - other) <= ROUNDING for one, other in zip(*losses, strict=True)), losses
    assert alone["data"] == divided["data"]
    assert alone["batch"] == divided["batch"]
    assert alone["model"] == divided["model"]
    assert divided["world"] == 4
    speed = divided["throughput"]
    step_s = speed["step_ms"]["median"] / 1e3
    assert abs(speed["tokens_per_second"]["median"] * step_s - DATA_RANKS * 16) <= DATA_RANKS * 16 * 2**-40
    (theory,) = (row for row in summary.communication_rows(divided) if row.name == "  and in theory")
    assert theory.text.endswith(": equal")
    assert messages in theory.text
    assert kinds <= divided["communication"]["data"].keys()
    assert divided["dtypes"]
    assert divided["memory"]["peak_predicted_bytes"] > 0
    for state in divided["memory"]["states"]:
        assert state["measured_bytes"] == state["predicted_bytes"], state
