"""An exported point comes back as the same point, and the stacks that are installed accept its files."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.ranks import run_ranks
from torch import nn

from orchestrator import cli
from orchestrator.commands.export_config import WRITERS
from orchestrator.commands.import_config import source_of
from orchestrator.compose import arguments
from orchestrator.compose.line import composed
from orchestrator.config.schema import RunConfig
from orchestrator.foreign.importing import Line, imported
from orchestrator.foreign.point_words import same_point
from orchestrator.plan.point import Point
from orchestrator.plan.points import judged
from orchestrator.plan.rules.scene import here

LINES = (
    "zero=stage0 precision=fp32",
    "zero=stage1 precision=bf16_pure scheduler=constant",
    "zero=stage2 precision=bf16 batch.accumulation=3 optimizer=adam optimizer.clip_norm=null",
    "zero=stage3 precision=fp16 precision.hysteresis=4 precision.reduce=fp16 scheduler=warmup_decay recompute=full",
    "zero=stage3 offload=optimizer_param_cpu offload.ratio=0.5 scheduler=warmup_cosine optimizer=sgd",
    "zero=stage3 zero.prefetch=2 offload=optimizer_nvme offload.requests=8 offload.block_mib=1 seed=7",
    "optimizer=lion scheduler=one_cycle model=gpt2 batch.seq=64 loss=tiled measure.steps=9",
    "optimizer=torch optimizer.name=Adagrad scheduler=lr_range_test optimizer.no_decay=false zero.shard_ranks=null",
    "optimizer=lamb scheduler=warmup scheduler.start_lr_ratio=0.1 model.config.num_hidden_layers=2",
)


def point(line: list[str]) -> RunConfig:
    points, problems = judged(composed(arguments.split(line)), here())
    assert problems == []
    (found,) = points
    assert isinstance(found, Point)
    return found.config


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("line", LINES)
def test_an_exported_configuration_comes_back_as_the_same_point(line: str) -> None:
    config = point(line.split())
    path = Path("ds_config.json")
    path.write_text(WRITERS["deepspeed"](config, "").files["ds_config.json"])
    words = imported(source_of(path, None, []), Line(None, {}, config.resources.ranks or 1, None)).words
    typed = [f"{key}={value}" for key, value in sorted(words.items(), key=lambda item: "." in item[0])]
    assert same_point(point(typed), config)


def test_deepspeed_accepts_the_exported_sections() -> None:
    pytest.importorskip("deepspeed.runtime.config", reason="deepspeed is not installed (extra bench)")
    from deepspeed.runtime.config import DeepSpeedConfig

    for line in LINES[:7]:
        content = json.loads(WRITERS["deepspeed"](point(line.split()), "").files["ds_config.json"])
        content["train_batch_size"] = content["train_micro_batch_size_per_gpu"] * content["gradient_accumulation_steps"]
        assert DeepSpeedConfig(content).zero_optimization_stage == content["zero_optimization"]["stage"]


def test_accelerate_reads_the_exported_file_and_import_reads_it_back() -> None:
    commands = pytest.importorskip("accelerate.commands.config.config_args", reason="accelerate is not installed")
    config = point(LINES[3].split())
    for name, text in WRITERS["accelerate"](config, "").files.items():
        Path(name).write_text(text)
    read = commands.ClusterConfig.from_yaml_file("accelerate.yaml")
    assert (read.distributed_type.value, read.num_processes) == ("DEEPSPEED", 2)
    words = imported(source_of(Path("accelerate.yaml"), None, []), Line(None, {}, 1, None)).words
    assert (words["zero"], words["resources.ranks"]) == ("stage3", "2")


def test_the_trainers_arguments_come_back_too() -> None:
    assert cli.main(["export", "zero=stage2", "precision=bf16", "--to", "trainer", "--out", "out"]) == 0
    line = Path("out/trainer_arguments.txt").read_text()
    assert cli.main(["import", "--args", line.replace("ds_config.json", "out/ds_config.json")]) == 0


def test_other_content_is_not_overwritten_and_missing_things_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", "zero=stage2", "--to", "fsdp2", "--out", "out"]) == 0
    assert cli.main(["export", "zero=stage2", "--to", "fsdp2", "--out", "out"]) == 0
    assert cli.main(["export", "zero=stage3", "--to", "fsdp2", "--out", "out"]) == 2
    assert cli.main(["export", "zero=stage0", "--to", "fsdp2"]) == 2
    assert cli.main(["export", "--to", "fsdp2"]) == 2
    assert cli.main(["export", "no-such-label", "--to", "fsdp2"]) == 2
    assert cli.main(["import", "missing.json"]) == 2
    told = capsys.readouterr().err
    assert "is there, with another content      fix: --out FOLDER" in told
    assert "FSDP2 shards" in told
    assert "expected RUN" in told
    assert "found no file 'missing.json'" in told


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = rows + torch.tanh(layer(rows))
        return rows


def loss_of(model: Any, rows: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(rows).square().mean()
    return loss


def fsdp2_losses(path: str) -> tuple[list[float], list[float]]:
    """Losses of the exported file on this rank, and of one process of plain torch."""
    parts = runpy.run_path(path)
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = [
        [torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * r + m)) for m in range(2)] for r in range(world)
    ]
    sharded, plain = parts["shard"](Blocks()), Blocks()
    optimizers = parts["optimizer"](sharded), parts["optimizer"](plain)
    schedules = [parts["schedule"](one) for one in optimizers]
    found, expected = [], []
    for _ in range(4):
        found.append(parts["train_step"](sharded, optimizers[0], rows[rank], loss_of))
        own = 0.0
        for other in range(world):
            for micro in rows[other]:
                loss = loss_of(plain, micro) / 2 / world
                loss.backward()
                own += loss.item() * world if other == rank else 0.0
        expected.append(own)
        if parts["CLIP_NORM"] is not None:
            nn.utils.clip_grad_norm_(plain.parameters(), parts["CLIP_NORM"])
        optimizers[1].step()
        optimizers[1].zero_grad()
        for schedule in schedules:
            schedule.step()
    return found, expected


@pytest.mark.parametrize("level", [1, 3])
def test_the_exported_file_for_fsdp2_trains_as_plain_torch(level: int) -> None:
    config = point([f"zero=stage{level}", "precision=fp32", "batch.accumulation=2"])
    Path("fsdp2_parts.py").write_text(WRITERS["fsdp2"](config, "a point").files["fsdp2_parts.py"])
    for found, expected in run_ranks(fsdp2_losses, 2, str(Path("fsdp2_parts.py").absolute())):
        # Sums of four fp32 gradients in another order; Adam's quotient of moments keeps their relative error.
        assert found == pytest.approx(expected, rel=1e-5)
        assert found[-1] < found[0]
