"""What all ranks' profiles become: MFU by its formula, the rank with the highest peak, and a trace that has no room."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from points import config_of_line
from rank_runs import run

from orchestrator.compose.known_gpus import data_sheet
from orchestrator.config.schema import RunConfig
from orchestrator.launch.rank import RankInfo
from orchestrator.records.record_file import read_json
from orchestrator.records.record_shapes import PROFILE, misfit
from orchestrator.records.record_shapes import RESULT as RESULT_SHAPE
from orchestrator.records.run_record import AttemptPaths
from orchestrator.wings.predict.rough_time import dense_peak
from orchestrator.wings.profile import profile_rank as profile

H100 = "NVIDIA H100 80GB HBM3"
RESULT = {"throughput": {"step_ms": {"median": 500.0}}, "environment": {"gpu": None}}
ROOM = 1024  # bytes that the prediction leaves out: storages of a few numbers, as of the norm's sum
HOLDER = {"component": "activations", "name": "mlp", "bytes": 5, "tensors": 1, "largest_bytes": 5}


def own_profile(peak: int) -> dict[str, Any]:
    found = {"ms": 1.0, "bytes": peak, "phase": "backward", "module": "mlp", "holders": [HOLDER]}
    return {"step_ms": 700.0, "model_flops": 4 * 10**14, "executed_flops": 5 * 10**14, "peak": found}


class Ranks:
    """The collectives of rank 0 next to other ranks, whose values are given for each call in turn."""

    def __init__(self, *others: Any) -> None:
        self._others = list(others)

    def gather_objects(self, value: Any) -> list[Any]:
        return [value, *(self._others.pop(0) if self._others else [])]


def config_on_gpu(dtype: str = "bf16", **changes: Any) -> RunConfig:
    """A configuration that computes in this dtype, as one for GPUs does."""
    config = config_of_line(f"precision={dtype} resources.ranks=1")
    return replace(config, precision=replace(config.precision, compute=dtype), **changes)


def profiled(folder: Path, config: RunConfig, ranks: Ranks, gpu: str | None = None) -> dict[str, Any]:
    runtime: Any = SimpleNamespace(collectives=ranks, device=torch.device("cpu"))
    info = RankInfo(0, 2, 0, "nowhere")
    return profile.profiled(
        config, runtime, AttemptPaths(folder), info, lambda: None, {**RESULT, "environment": {"gpu": gpu}}
    )


def test_mfu_is_the_models_operations_per_second_by_the_dense_peak_of_all_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "profile_step", lambda *_: own_profile(10))
    other = {"rank": 1, "trouble": "", "peak_bytes": 30, "model_flops": 2 * 10**14, "executed_flops": 2 * 10**14}
    node = data_sheet(H100)
    config = config_on_gpu(hardware=node)
    found = profiled(tmp_path, config, Ranks([other], [own_profile(30)]), H100)["profile"]
    assert found["model_flops_per_step"] == 6 * 10**14
    assert found["model_flops_per_s"] == 12 * 10**14  # a step of 0.5 s, the measured one
    assert found["mfu"] == pytest.approx(12 / (2 * 9.895))
    assert found["hfu"] == pytest.approx(14 / (2 * 9.895))
    assert found["peak_source"] == "hardware=h100_80gb"
    assert (found["peak_rank"], found["peak_bytes"], found["peak_holder"]) == (1, 30, "activations mlp")
    written = json.loads(AttemptPaths(tmp_path).profile.read_text())
    assert (written["rank"], written["peak"]["bytes"]) == (1, 30)


def test_a_gpu_is_found_among_the_data_sheets_by_its_name() -> None:
    node = data_sheet(H100)
    assert node is not None
    assert node.name == "h100_80gb"
    assert data_sheet("NVIDIA Unheard Of") is None
    config = config_on_gpu()
    assert dense_peak(config, H100) == (989.5e12, "hardware=h100_80gb")
    assert dense_peak(config_on_gpu("fp32"), H100) == (67e12, "hardware=h100_80gb")
    assert dense_peak(config, "NVIDIA Unheard Of") == (None, None)
    assert dense_peak(config, None) == (None, None)


def test_cpu_ranks_have_no_mfu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "profile_step", lambda *_: own_profile(10))
    found = profiled(tmp_path, config_of_line("resources.ranks=1 precision=bf16"), Ranks())["profile"]
    assert found["mfu"] is found["hfu"] is found["peak_flops_per_s"] is None


def test_a_trace_that_cannot_be_written_leaves_out_the_profile_and_names_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: Any) -> dict[str, Any]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(profile, "profile_step", full_disk)
    found = profiled(tmp_path, config_of_line("resources.ranks=1"), Ranks())
    assert list(found) == ["profile_failed"]
    assert found["profile_failed"].startswith("rank 0: the trace could not be written: [Errno 28]")
    assert not AttemptPaths(tmp_path).profile.exists()


def test_a_profile_that_cannot_be_written_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "profile_step", lambda *_: own_profile(10))
    found = profiled(tmp_path / "missing", config_of_line("resources.ranks=1"), Ranks())
    assert list(found) == ["profile_failed"]


@pytest.mark.full
def test_a_profiled_run_has_the_losses_and_bytes_of_one_without_and_the_files_of_a_profile(tmp_path: Path) -> None:
    line = "model.config.num_hidden_layers=2 measure.warmup_steps=1 measure.steps=2 measure.validation_batches=1 "
    line += "data=synthetic tracking=none zero=stage3 precision=bf16 resources.ranks=2 resources.threads=1"
    plain = run(tmp_path / "plain", config_of_line(line))
    found = run(tmp_path / "profiled", config_of_line(f"{line} measure.profile=true"))
    assert found["curve"] == plain["curve"]
    assert found["loss"] == plain["loss"]
    assert found["communication"] == plain["communication"]
    assert found["memory"]["states"] == plain["memory"]["states"]
    assert found["memory"]["activations_bytes"] == plain["memory"]["activations_bytes"]
    assert found["throughput"]["steps_counted"] == plain["throughput"]["steps_counted"] == 2
    assert "profile" not in plain
    assert misfit(found, RESULT_SHAPE) is None
    attempt = AttemptPaths(tmp_path / "profiled" / "attempts" / "01")
    assert sorted(path.name for path in attempt.traces.iterdir()) == ["rank0.json.gz", "rank1.json.gz"]
    shown = read_json(attempt.profile, PROFILE)
    assert shown is not None
    assert shown["peak"]["bytes"] == found["profile"]["peak_bytes"]
    # The predicted peak has the batch too, which numpy owns: ids and labels, 8 bytes a token each.
    batch = 2 * 8 * found["batch"]["tokens_per_step"] // found["world"]
    assert abs(found["memory"]["peak_predicted_bytes"] - batch - shown["peak"]["bytes"]) <= ROOM
    steps = found["profile"]["model_flops_per_s"] * found["throughput"]["step_ms"]["median"] / 1e3
    assert found["profile"]["model_flops_per_step"] == pytest.approx(steps)
