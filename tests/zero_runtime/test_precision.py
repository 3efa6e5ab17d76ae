"""MixedPrecision accepts known and compatible dtypes only, and stores gradients in the documented dtype."""

from __future__ import annotations

from itertools import product

import pytest

from zero_runtime.dtypes import TORCH_DTYPE
from zero_runtime.errors import PlanError
from zero_runtime.optim.configs import STATE_ITEMSIZE_BYTES
from zero_runtime.precision import ITEMSIZE_BYTES, MixedPrecision

FIELDS = ("param", "reduce", "accumulate", "master")


def test_the_default_is_fp32_throughout() -> None:
    assert set(vars(MixedPrecision()).values()) == {"fp32", None}
    assert MixedPrecision().computes_as_param


@pytest.mark.parametrize("field", FIELDS)
def test_an_unknown_dtype_is_refused_with_the_name_of_its_key(field: str) -> None:
    with pytest.raises(PlanError, match=rf"precision\.{field} must be one of fp32, bf16, fp16, found fp8"):
        MixedPrecision(**{field: "fp8"})


@pytest.mark.parametrize("values", list(product(ITEMSIZE_BYTES, repeat=4)), ids="-".join)
def test_the_only_refused_combinations_are_masters_that_would_lose_updates(values: tuple[str, ...]) -> None:
    settings = dict(zip(FIELDS, values, strict=True))
    if settings["master"] == "fp16" or (settings["param"], settings["master"]) == ("fp32", "bf16"):
        with pytest.raises(PlanError, match=r"fix: precision\.master=fp32"):
            MixedPrecision(**settings)
    else:
        assert vars(MixedPrecision(**settings)) == {**settings, "compute": None, "weights": None}


def test_computes_as_param_is_false_if_the_compute_dtype_differs_from_the_parameters() -> None:
    assert not MixedPrecision("bf16", compute="fp32").computes_as_param
    assert MixedPrecision("bf16", compute="bf16").computes_as_param
    with pytest.raises(PlanError, match=r"precision\.compute"):
        MixedPrecision(compute="fp8")


@pytest.mark.parametrize(("reduce", "accumulate"), list(product(ITEMSIZE_BYTES, repeat=2)))
def test_gradients_are_kept_in_the_reduce_dtype_and_accumulated_in_the_accumulate_dtype(
    reduce: str, accumulate: str
) -> None:
    precision = MixedPrecision("bf16", reduce=reduce, accumulate=accumulate)
    assert precision.grad(1) == reduce
    assert precision.grad(2) == precision.grad(9) == accumulate


def test_every_dtype_has_the_size_of_its_torch_dtype() -> None:
    assert {name: dtype.itemsize for name, dtype in TORCH_DTYPE.items()} == ITEMSIZE_BYTES | STATE_ITEMSIZE_BYTES
