"""Settings check themselves: every broken limit is reported, with its key and a fix, and None only where it may be."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from zero_runtime.activations.rule import RecomputeRule
from zero_runtime.errors import PlanError
from zero_runtime.limits import ConfigError
from zero_runtime.offload_plan import ScratchSettings
from zero_runtime.optim.configs import AdamWConfig
from zero_runtime.optim.loss_scaler import LossScaleRule
from zero_runtime.optim.lr_settings import OneCycleSettings
from zero_runtime.precision import MixedPrecision


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MixedPrecision(param=None), "precision.param must be one of fp32, bf16, fp16, found None"),  # type: ignore[arg-type]
        (lambda: MixedPrecision(reduce=None), "precision.reduce must be one of fp32, bf16, fp16, found None"),  # type: ignore[arg-type]
        (lambda: RecomputeRule(kind=None), "recompute.kind must be one of none"),  # type: ignore[arg-type]
        (lambda: RecomputeRule(every=None), "recompute.every must be at least 1, found None"),  # type: ignore[arg-type]
        (lambda: LossScaleRule(window=None), "precision.loss_scale_window must be at least 1, found None"),  # type: ignore[arg-type]
        (lambda: AdamWConfig(beta1=None), "optimizer.beta1 must be from 0 to below 1, found None"),  # type: ignore[arg-type]
    ],
)
def test_none_is_refused_where_a_value_is_needed(make: Callable[[], object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()


def test_none_is_accepted_where_it_means_something() -> None:
    assert MixedPrecision(compute=None).computes_as_param
    assert LossScaleRule(static=None).static is None
    assert not OneCycleSettings(momentum_max=None).cycles_momentum


def test_all_broken_limits_of_a_class_are_in_one_error(tmp_path: object) -> None:
    with pytest.raises(ConfigError) as caught:
        ScratchSettings(tmp_path, block_bytes=5000, requests=0, ahead=-1)  # type: ignore[arg-type]
    assert [broken.fix for broken in caught.value.broken] == [
        ("offload.block_bytes=8192",),
        ("offload.requests=4",),
        ("offload.ahead=1",),
    ]
