"""The memory in a result is that of whole steps, whichever of them the tensors are counted in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from points import config_of
from rank_runs import run

from orchestrator.config.schema import Measure
from orchestrator.config.state_groups import Offload
from zero_runtime.offload_plan import Tier


@pytest.mark.parametrize("params", [Tier.DEVICE, Tier.NVME])
def test_slots_that_the_first_update_allocates_are_measured(tmp_path: Path, params: Tier) -> None:
    """Without steps of warm-up tensors are counted in the first step, before its update."""
    offload = Offload(optimizer=Tier.NVME, params=params, folder=str(tmp_path))
    config = replace(config_of(3, every=None, stage=3, ranks=1), measure=Measure(warmup_steps=0, steps=2))
    host = run(tmp_path / "run", replace(config, offload=offload))["memory"]["host"]
    assert host["measured_bytes"] == host["predicted_bytes"] > 0
