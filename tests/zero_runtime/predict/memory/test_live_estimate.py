"""The estimates for a live model lie between the states of a runtime of that model and its upper bound of a step."""

from __future__ import annotations

import pytest
import torch
from harness.copies import LateCopies
from harness.models import TinySpec, TinyTransformer
from harness.ranks import run_ranks
from zero_runtime.zero import estimate_zero2_model_states_mem_needs_all_live as estimate

from zero_runtime.accounting import predicted_offload_bytes, predicted_state_bytes
from zero_runtime.initial_values import parameters_on_meta
from zero_runtime.offload_plan import OffloadPlan, Tier
from zero_runtime.optim.configs import AdamWConfig
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.memory.live_estimate import NeededBytes, needed_bytes
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime

CASES = [(2, False, False), (2, False, True), (3, False, False), (3, False, True), (3, True, True)]


def both() -> list[tuple[NeededBytes, int, int]]:
    """For each case on this rank of two: the estimate, and of a runtime on a device with separate memory the states on
    the device and the host memory."""
    found = []
    for number, params, optimizer in CASES:
        with parameters_on_meta():
            on_meta = TinyTransformer(TinySpec())
        plan = ZeroPlan.from_stage(number)
        estimated = needed_bytes(on_meta, plan, 2, params_on_host=params, optimizer_on_host=optimizer)
        tiers = [Tier.HOST if on_host else Tier.DEVICE for on_host in (params, optimizer)]
        settings = RuntimeSettings(offload=OffloadPlan(*tiers, copies=LateCopies))
        precision = MixedPrecision("bf16")
        model = TinyTransformer(TinySpec())
        runtime = ZeroRuntime(model, plan, precision, AdamWConfig(), settings, torch.device("cpu"))
        host = predicted_offload_bytes(runtime).host
        found.append((estimated, predicted_state_bytes(runtime).total, host))
        runtime.close()
    return found


def test_the_estimate_is_at_least_the_states_of_a_runtime() -> None:
    for estimated, states, host in run_ranks(both, 2)[0]:
        assert states <= estimated.gpu
        assert estimated.gpu > 0
        assert estimated.node == 2 * host


def test_offloaded_gradients_leave_the_device_as_they_are_reduced() -> None:
    """All parameters and states on the host: what is left is a few units, far below the gradients of all of them."""
    with parameters_on_meta():
        model = TinyTransformer(TinySpec(width=64, blocks=40))
    needed = needed_bytes(model, ZeroPlan.from_stage(3), 1, params_on_host=True, optimizer_on_host=True)
    gradients = 4 * sum(param.numel() for param in model.parameters())
    assert 0 < needed.gpu < gradients / 2


def test_the_table_has_a_row_for_each_offload(capsys: pytest.CaptureFixture[str]) -> None:
    estimate(TinyTransformer(TinySpec()), num_gpus_per_node=4, num_nodes=2)
    head, columns, *rows = capsys.readouterr().out.splitlines()
    assert head.endswith(" parameters, 8 ranks on 2 nodes; bf16, Adam; without activations")
    assert columns.split() == ["GPU", "of", "a", "rank", "host", "of", "a", "node", "offload"]
    assert [row.split("  ")[-1] for row in rows] == [
        "offload_param=none, offload_optimizer=cpu",
        "offload_param=none, offload_optimizer=none",
    ]
