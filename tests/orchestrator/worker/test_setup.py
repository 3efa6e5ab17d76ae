"""Building the offload settings of the runtime creates the scratch folder only inside the output."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from orchestrator.config.state_groups import Offload
from orchestrator.records.run_record import scratch_path
from orchestrator.worker.setup import offload_plan
from zero_runtime.offload_plan import Tier


def test_only_the_scratch_folder_in_the_output_is_created(tmp_path: Path) -> None:
    own = scratch_path(tmp_path / "out")
    offload = Offload(optimizer=Tier.NVME, folder=str(own))
    offload_plan(offload, str(tmp_path / "out"))
    assert own.is_dir()
    offload_plan(replace(offload, folder=str(tmp_path / "fasst")), str(tmp_path / "out"))
    assert not (tmp_path / "fasst").exists()
