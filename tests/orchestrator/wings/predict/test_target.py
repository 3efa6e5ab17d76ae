"""A plan for hardware that is described: its GPUs count in place of those of this machine, and nothing can start."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from orchestrator import cli
from orchestrator.compose import arguments, compose
from orchestrator.config.schema import RunConfig, to_dict
from orchestrator.machine import hardware
from orchestrator.machine.hardware import Hardware
from orchestrator.planning.points import checked_points
from orchestrator.planning.predictor import NOT_ASKED
from orchestrator.planning.rules.scene import Scene
from orchestrator.records.run_record import point_id
from orchestrator.wings.predict import memory_cache, prediction
from orchestrator.wings.predict.memory_cache import units_key
from orchestrator.wings.predict.step import Memories
from orchestrator.wings.predict.target import target_of
from orchestrator.wings.predict.tensor_messages import TensorMessages
from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.memory.device_overhead import DeviceOverhead

GIB = 1 << 30
LAPTOP = Hardware(cores=4, cpu="cpu")
A100_BYTES, H100_BYTES = 81049 << 20, 81008 << 20


def configs(line: str, machine: Hardware = LAPTOP, *, plan_only: bool = True) -> list[RunConfig]:
    composition = compose.compose(arguments.split(line.split()))
    found, problems = checked_points(composition, Scene(machine, plan_only=plan_only))
    assert problems == []
    return [point.config for point in found]


def config(line: str, machine: Hardware = LAPTOP, *, plan_only: bool = True) -> RunConfig:
    (found,) = configs(line, machine, plan_only=plan_only)
    return found


def test_the_target_of_described_hardware_is_its_description() -> None:
    found = target_of(config("hardware=a100_80gb resources.nodes=2"), gpu_bytes=1, host_bytes=2)
    assert (found.device, found.device_bytes, found.ranks_share) == ("cuda", A100_BYTES, 1)
    assert (found.host_bytes, found.ranks_per_node) == (2048 * GIB, 8)
    unknown = target_of(config("hardware=a100_80gb hardware.memory_mib=null"), gpu_bytes=1, host_bytes=2)
    assert unknown.device_bytes is None


def test_the_target_of_this_machine_is_what_was_read_here() -> None:
    found = target_of(config("resources.device=cpu resources.ranks=3"), gpu_bytes=1, host_bytes=2)
    assert (found.device_bytes, found.host_bytes, found.ranks_share, found.ranks_per_node) == (2, 2, 3, 3)
    server = Hardware(cores=16, cpu="cpu", gpus=4, gpu="H100")
    found = target_of(config("zero=stage2", server), gpu_bytes=1, host_bytes=2)
    assert (found.device_bytes, found.host_bytes, found.ranks_share) == (1, 2, 1)


def test_the_memory_of_a_clusters_nodes_is_known_only_if_it_is_described() -> None:
    login = Hardware(cores=4, cpu="cpu", slurm=True)
    line = "cluster=slurm resources.device=cuda resources.ranks=8"
    found = target_of(config(line, login), gpu_bytes=1, host_bytes=2)
    assert (found.device_bytes, found.host_bytes, found.ranks_share) == (None, None, 1)
    found = target_of(config(f"{line} hardware=h100_80gb", login, plan_only=False), gpu_bytes=1, host_bytes=2)
    assert (found.device_bytes, found.host_bytes) == (H100_BYTES, 2048 * GIB)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("hardware=a100_80gb", ("cuda", 8)),
        ("hardware=a100_80gb resources.device=cuda resources.ranks=8", ("cuda", 8)),
        ("hardware=a100_80gb hardware.gpus=4", ("cuda", 4)),
        ("hardware=a100_80gb resources.nodes=3", ("cuda", 24)),
        ("hardware=rtx_4090", ("cuda", 1)),
        ("hardware=rtx_4090 hardware.gpus=2 resources.ranks=1", ("cuda", 1)),
    ],
)
def test_the_device_is_cuda_and_ranks_are_the_gpus_of_all_nodes_unless_they_are_set(
    line: str, expected: tuple[str, int]
) -> None:
    found = config(line).resources
    assert (found.device, found.ranks) == expected


def test_the_limit_is_the_described_memory_of_which_a_rank_leaves_what_cuda_takes() -> None:
    found = config("model=llama_tiny zero=stage3 hardware=a100_80gb")
    unit = {"name": "h.0", "shapes": [["weight", [8, 8]]], "trainable": True, "is_root": True, "offloaded": False}
    unit |= {"numel": 64, "precision": asdict(MixedPrecision())}
    shapes = {"units": [unit], "state_bytes": 8, "block_numel": 1, "tensor": TensorMessages().plain()}
    answers = {units_key(found): shapes | {"buffer_bytes": 0}}
    predicted = prediction._prediction(found, answers, Memories(answers), 7)
    assert predicted is not None
    assert (predicted.limit_bytes, predicted.ranks_share) == (A100_BYTES, 1)
    least = DeviceOverhead.on_cuda(8, 8).least
    assert predicted.overhead == DeviceOverhead.on_cuda(8, 8)
    assert not replace(predicted, limit_bytes=predicted.states.total + least).cannot_fit
    assert replace(predicted, limit_bytes=predicted.states.total + least - 1).cannot_fit


def test_the_gpus_of_this_machine_are_not_read_for_described_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "visible_gpus", lambda: pytest.fail("nvidia-smi was asked"))
    monkeypatch.setattr(memory_cache, "answers", lambda *_, **__: {})
    assert prediction._predictions([config("hardware=h200")], None) == [NOT_ASKED]


def test_hardware_is_no_part_of_a_points_identity() -> None:
    here = to_dict(config("resources.device=cuda resources.ranks=8", Hardware(96, "cpu", 8, "A100-SXM4-80GB")))
    there = to_dict(config("hardware=a100_80gb", Hardware(96, "cpu", 8, "A100-SXM4-80GB"), plan_only=False))
    assert here["hardware"] != there["hardware"]
    assert point_id(here, 8, "A100-SXM4-80GB") == point_id(there, 8, "A100-SXM4-80GB")


def test_a_plan_of_a_sweep_over_hardware_names_each_kind_and_no_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prediction, "predictions", lambda *_, **__: {})
    line = ["-m", "hardware=a100_80gb,rtx_4090", "model=llama_tiny", f"output={tmp_path}", "--plan"]
    assert cli.main(line) == 0
    told = capsys.readouterr().out
    assert "to run    2   a100_80gb, rtx_4090\n" in told
    assert "hardware  a100_80gb, as described: 8 ranks on 1 node of 8 GPUs, 79.1 GiB each (1 point)\n" in told
    assert "          rtx_4090, as described: 1 rank on 1 node of 1 GPU, 23.6 GiB each (1 point)\n" in told
    assert "slots" not in told
    assert "next      with these GPUs and a folder's weights, the same line without --plan runs it\n" in told
    assert cli.main([*line, "--json"]) == 0
    ids = [point["point"] for point in json.loads(capsys.readouterr().out)]
    assert len(set(ids)) == 2


@pytest.mark.parametrize("line", [["hardware=a100_80gb"], ["-m", "hardware=a100_80gb", "zero=stage1,stage2"]])
def test_without_plan_a_run_on_gpus_that_are_not_here_is_one_error_that_names_the_flag(
    line: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hardware, "gpu_models", list)
    typed = [*line, "resources.device=cuda", "resources.nodes=2", f"output={tmp_path / 'out'}"]
    assert cli.main(typed) == 2
    (first, last) = capsys.readouterr().err.splitlines()
    assert first.startswith(
        "error: hardware=a100_80gb needs 8 x A100-SXM4-80GB here to run; add --plan to predict without them, found no "
        "GPU      fix: hardware=auto resources.device=cpu resources.nodes=1"
    )
    assert last == "nothing was started (exit 2)"
    assert not (tmp_path / "out").exists()


def test_a_misspelt_option_or_key_of_hardware_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["hardware=h100_80", "--plan"]) == 2
    assert "hardware has no option 'h100_80'. Did you mean 'h100_80gb'?" in capsys.readouterr().err
    assert cli.main(["hardware=h200", "hardware.memory_gib=3", "--plan"]) == 2
    assert "'hardware.memory_gib' is not a setting. Did you mean 'hardware." in capsys.readouterr().err
