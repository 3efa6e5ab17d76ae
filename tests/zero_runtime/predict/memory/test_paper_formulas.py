"""The published closed forms have the values that their sources print."""

from __future__ import annotations

import pytest

from zero_runtime.plan import ZeroPlan
from zero_runtime.predict.memory.paper_formulas import (
    EstimatedBytes,
    InfinityModel,
    deepspeed_zero2_estimate,
    deepspeed_zero3_estimate,
    largest_numel,
    paper_bytes_per_param,
)

GIB = 1 << 30
PLANS = [ZeroPlan.from_stage(stage) for stage in range(4)]


def test_figure_1_of_the_zero_paper() -> None:
    # 7.5e9 parameters on 64 GPUs: 120, 31.4, 16.6 and 1.9 GB.
    exact = [paper_bytes_per_param(plan, 64) * 7.5e9 / 1e9 for plan in PLANS]
    assert exact == [120, 31.40625, 16.640625, 1.875]


@pytest.mark.parametrize(
    ("world", "exact"),
    [
        (1, [16, 16, 16]),
        (4, [7, 5.5, 4]),
        (1024, [4 + 12 / 1024, 2 + 14 / 1024, 16 / 1024]),
    ],
)
def test_bytes_per_parameter_of_the_zero_paper(world: int, exact: list[float]) -> None:
    assert [paper_bytes_per_param(plan, world) for plan in PLANS[1:]] == exact


def test_largest_models_of_the_zero_paper() -> None:
    exact = [largest_numel(plan, 64, 32e9) / 1e9 for plan in PLANS]
    assert exact == [32e9 / per_param / 1e9 for per_param in (16, 4.1875, 2.21875, 0.25)]
    assert largest_numel(PLANS[3], 64, 32e9, model_parallel=16) / 1e9 == 2048


def test_model_states_of_zero_infinity() -> None:
    model = InfinityModel(128, 25 * 1024, 256)  # the row of 1.01T parameters
    assert model.numel == 12 * 128 * 25600**2
    assert model.state_bytes == 240 * 128 * 25600**2
    assert f"{model.state_bytes / 2**40:.2f}" == "18.31"
    assert f"{model.checkpoint_bytes(32, 1024) / 2**40:.2f}" == "0.20"
    assert f"{model.state_working_bytes / GIB:.2f}" == "9.77"
    assert f"{model.activation_working_bytes(4, 1024) / GIB:.2f}" == "3.56"


def zero3(**options: bool) -> EstimatedBytes:
    return deepspeed_zero3_estimate(2_783_959_040, 65_798_144, 1, **options)


@pytest.mark.parametrize(
    ("params", "optimizer", "built_sharded", "printed"),
    [
        (True, True, True, "70.00 0.25"),
        (True, True, False, "70.00 0.25"),
        (False, True, True, "62.23 5.43"),
        (False, True, False, "62.23 5.43"),
        (False, False, True, "0.37 46.91"),
        (False, False, False, "15.56 46.91"),
    ],
)
def test_the_zero3_estimate_of_t0_3b(params: bool, optimizer: bool, built_sharded: bool, printed: str) -> None:
    value = zero3(params_on_host=params, optimizer_on_host=optimizer, built_sharded=built_sharded)
    assert f"{value.host / GIB:.2f} {value.gpu / GIB:.2f}" == printed


def test_the_zero3_estimate_on_several_nodes() -> None:
    options = {"params_on_host": False, "optimizer_on_host": True}
    sharded = deepspeed_zero3_estimate(1000, 10, 8, 2, built_sharded=True, **options)
    full = deepspeed_zero3_estimate(1000, 10, 8, 2, built_sharded=False, **options)
    assert sharded == EstimatedBytes(16 * 1000 * 3 // 4, 40 + 2 * 1000 // 16)
    assert full == EstimatedBytes(32 * 1000 * 3 // 2, 40 + 2 * 1000 // 16)


def test_the_zero2_estimate_counts_the_gpus_of_all_nodes_with_offload() -> None:
    assert deepspeed_zero2_estimate(1000, 8, 2, optimizer_on_host=True) == EstimatedBytes(64 * 1000 * 3 // 2, 2000)
    assert deepspeed_zero2_estimate(1000, 8, 2, optimizer_on_host=False) == EstimatedBytes(
        32 * 1000 * 3 // 2, 2000 + 18 * 1000 // 16
    )
    t5 = deepspeed_zero2_estimate(2_851_000_000, 8, optimizer_on_host=False)
    assert f"{t5.host / GIB:.2f} {t5.gpu / GIB:.2f}" == "127.45 11.28"
