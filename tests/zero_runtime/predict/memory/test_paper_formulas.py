"""The estimates of DeepSpeed are the numbers that it prints."""

from __future__ import annotations

import pytest

from zero_runtime.predict.memory.paper_formulas import (
    EstimatedBytes,
    deepspeed_zero2_estimate,
    deepspeed_zero3_estimate,
)

GIB = 1 << 30


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
