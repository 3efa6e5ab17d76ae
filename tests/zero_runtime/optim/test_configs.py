"""Optimizer configurations give their states and bytes, and refuse invalid constants and unsupported optimizers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from zero_runtime.errors import PlanError
from zero_runtime.kernels.block_formats import BLOCK_NUMEL
from zero_runtime.optim.configs import (
    TORCH_NAMES,
    TORCH_REFUSED,
    AdamConfig,
    AdamW8bitConfig,
    AdamWConfig,
    LambConfig,
    LionConfig,
    SgdConfig,
    TorchConfig,
    refuse_host_reads,
    torch_problem,
)


@pytest.mark.parametrize("name", TORCH_REFUSED)
def test_an_optimizer_that_is_not_element_wise_is_refused_by_name_with_the_reason(name: str) -> None:
    with pytest.raises(
        PlanError, match=rf"torch\.optim\.{name} cannot run on shards of parameters: {TORCH_REFUSED[name]}"
    ):
        TorchConfig(name)


def test_every_torch_optimizer_is_supported_or_refused_with_a_reason() -> None:
    kinds = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    assert kinds <= {*TORCH_NAMES, *TORCH_REFUSED}
    assert "is not known to be element-wise" in torch_problem("Adamm")


def test_arguments_that_the_runtime_sets_and_unsupported_weight_decay_are_refused() -> None:
    with pytest.raises(PlanError, match="found params"):
        TorchConfig("SGD", {"params": [1]})
    with pytest.raises(PlanError, match=r"torch\.optim\.Adagrad but params, lr, .*, found lr, foreach"):
        TorchConfig("Adagrad", {"lr": 1.0, "eps": 1e-8, "foreach": True})
    with pytest.raises(PlanError, match=r"torch\.optim\.Rprop has no weight decay, found 0\.1"):
        TorchConfig("Rprop", weight_decay=0.1)


def test_limits_of_lambs_ratio_and_the_place_of_its_correction_are_checked() -> None:
    with pytest.raises(PlanError, match=r"max_coeff must be finite and at least min_coeff=2\.0, found 1\.0"):
        LambConfig(min_coeff=2.0, max_coeff=1.0)
    with pytest.raises(PlanError, match=r"min_coeff must be at least 0, found -1"):
        LambConfig(min_coeff=-1.0)
    with pytest.raises(PlanError, match=r"correction must be moments, rate or none, found update"):
        LambConfig(correction="update")  # type: ignore[arg-type]


def test_an_optimizer_that_reads_on_the_host_is_refused_by_name_in_a_dry_run() -> None:
    refuse_host_reads(AdamWConfig())
    for name in TORCH_NAMES:
        config = TorchConfig(name)
        if config.reads_on_host:
            with pytest.raises(PlanError, match=rf"torch\.optim\.{name}: a dry run has no values"):
                refuse_host_reads(config)
    assert [name for name in TORCH_NAMES if TorchConfig(name).reads_on_host] == ["ASGD"]


@pytest.mark.parametrize(
    ("build_config", "told"),
    [
        (lambda: AdamWConfig(beta1=1.0), "optimizer.beta1"),
        (lambda: AdamWConfig(eps=0.0), "optimizer.eps"),
        (lambda: LionConfig(weight_decay=-1.0), "optimizer.weight_decay"),
        (lambda: SgdConfig(momentum=-0.1), "optimizer.momentum"),
        (lambda: SgdConfig(nesterov=True), "optimizer.nesterov"),
        (lambda: replace(LambConfig(), beta2=2.0), "optimizer.beta2"),
    ],
)
def test_constants_out_of_range_are_refused_with_their_key(build_config, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        build_config()


def test_an_8_bit_state_costs_one_byte_per_element_and_its_share_of_a_scale() -> None:
    assert AdamW8bitConfig().state_bytes == 2 * (1 + 4 / 256)
    assert [config.state_bytes for config in (SgdConfig(), LionConfig(), AdamWConfig())] == [0, 4, 8]
    assert (AdamW8bitConfig().block_numel, AdamWConfig().block_numel, SgdConfig().block_numel) == (BLOCK_NUMEL, 1, 1)
    assert AdamW8bitConfig().saved_as == AdamWConfig().saved_as != AdamConfig().saved_as


def test_each_optimizer_has_its_own_number_of_states() -> None:
    configs = (SgdConfig(), SgdConfig(momentum=0.9), LionConfig(), AdamWConfig(), LambConfig())
    assert [len(config.state_names) for config in configs] == [0, 1, 1, 2, 2]
