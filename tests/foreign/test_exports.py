"""An exported point comes back as the same point, and the stacks that are installed accept its files."""

from __future__ import annotations

import json
import math
import os
import runpy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.ranks import run_ranks
from harness.trainer_runs import as_launched
from torch import nn

from orchestrator import cli
from orchestrator.compose import arguments
from orchestrator.compose.line import composed
from orchestrator.config.schema import RunConfig
from orchestrator.config.strict import Refusal
from orchestrator.planning.point import Point
from orchestrator.planning.points import judged
from orchestrator.planning.rules.scene import here
from orchestrator.wings.foreign.export_config import WRITERS
from orchestrator.wings.foreign.importing import Line, imported
from orchestrator.wings.foreign.point_words import words_of_point
from orchestrator.wings.foreign.sources import source_of

GROUPS = "zero=stage3 zero.shard_ranks=2"
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
    "zero=stage2 parallel.tp=2 resources.ranks=4 resources.device=cpu precision=bf16",
    "zero=stage3 parallel.sp=2 resources.ranks=4 resources.device=cpu batch.accumulation=2",
    "zero=stage3 zero.gather_dtype=int8 zero.reduce_dtype=int4 precision=bf16",
    "zero=stage0 optimizer=onebitadam optimizer.warmup_updates=7 optimizer.beta2=0.99 scheduler=warmup",
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
    words = imported(source_of(path, None)[0], Line(None, {}, config.resources.ranks or 1, None)).words
    typed = [f"{key}={value}" for key, value in sorted(words.items(), key=lambda item: "." in item[0])]
    assert words_of_point(point(typed)) == words_of_point(config)


def test_deepspeed_accepts_the_exported_sections() -> None:
    pytest.importorskip("deepspeed.runtime.config", reason="deepspeed is not installed (extra deepspeed)")
    from deepspeed.runtime.config import DeepSpeedConfig

    for line in (*LINES[:7], LINES[-2]):
        content = json.loads(WRITERS["deepspeed"](point(line.split()), "").files["ds_config.json"])
        content["train_batch_size"] = content["train_micro_batch_size_per_gpu"] * content["gradient_accumulation_steps"]
        assert DeepSpeedConfig(content).zero_optimization_stage == content["zero_optimization"]["stage"]


def test_compressed_messages_are_written_as_deepspeeds_keys() -> None:
    quantised, one_bit = (
        json.loads(WRITERS["deepspeed"](point(line.split()), "").files["ds_config.json"]) for line in LINES[-2:]
    )
    names = ("zero_quantized_weights", "zero_quantized_gradients")
    assert [quantised["zero_optimization"].get(name) for name in names] == [True, True]
    assert [one_bit["zero_optimization"].get(name) for name in names] == [None, None]
    assert (one_bit["optimizer"]["type"], one_bit["optimizer"]["params"]["freeze_step"]) == ("OneBitAdam", 7)
    words = [word for content in (quantised, one_bit) for word in content["_zero_lab"]["words"]]
    keys = ("zero.gather_dtype", "zero.reduce_dtype", "optimizer", "optimizer.warmup_updates", "optimizer.beta2")
    assert [word for word in words if word.partition("=")[0] in keys] == []


@pytest.mark.parametrize(
    ("line", "stack", "told"),
    [
        ("zero=stage2 zero.gather_dtype=int8", "deepspeed", "zero.gather_dtype: DeepSpeed quantises messages at stage"),
        ("zero=stage3 zero.reduce_dtype=int8", "deepspeed", "DeepSpeed quantises gradients to int4"),
        ("zero=stage3 zero.reduce_dtype=int4 zero.error_feedback=true", "deepspeed", "DeepSpeed's LoCo"),
        ("zero=stage1 optimizer=onebitadam", "deepspeed", "DeepSpeed has 1-bit Adam up to 0.19.6, at stage 0 alone"),
        ("zero=stage1 optimizer=onebitadam", "fsdp2", "has torch.optim's optimizers, found onebitadam"),
        ("zero=stage3 optimizer=muon", "deepspeed", "optimizer=muon: DeepSpeed's has matrices and rates of other"),
        ("zero=stage3 optimizer=muon", "fsdp2", "has torch.optim's optimizers, found muon"),
        ("zero=stage0 precision=fp16", "ddp", "the written loop has no loss scale, found precision=fp16"),
        ("zero=stage0 offload=optimizer_cpu", "ddp", "DDP offloads nothing"),
        (
            "zero=stage3 parallel.tp=2 resources.ranks=2",
            "deepspeed",
            "parallel.tp: DeepSpeed divides layers up to stage",
        ),
        ("zero=stage2 parallel.sp=2 resources.ranks=2", "fsdp2", "has no tensor or sequence parallelism"),
        ("zero=stage3 zero.gather_dtype=int8", "fsdp2", "sends exact messages, found quantised ones"),
        (f"{GROUPS} zero.outer_sharding=optim", "deepspeed", "DeepSpeed exchanges parameters in each forward"),
        (f"{GROUPS} zero.outer_sharding=optim", "fsdp2", "has no outer sharding, found optim"),
    ],
)
def test_a_stack_that_lacks_compression_or_the_optimizer_is_refused(line: str, stack: str, told: str) -> None:
    with pytest.raises(Refusal) as caught:
        WRITERS[stack](point(line.split()), "")
    assert [problem for problem in caught.value.problems if told in problem and "fix: " in problem]


def test_other_content_is_not_overwritten_and_missing_things_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", "zero=stage2", "--to", "fsdp2", "--out", "out"]) == 0
    assert cli.main(["export", "zero=stage2", "--to", "fsdp2", "--out", "out"]) == 0
    assert cli.main(["export", "zero=stage3", "--to", "fsdp2", "--out", "out"]) == 2
    assert cli.main(["export", "zero=stage0", "--to", "fsdp2"]) == 2
    assert cli.main(["export", "--to", "fsdp2"]) == 2
    assert cli.main(["export", "no-such-label", "--to", "fsdp2"]) == 2
    assert cli.main(["import", "missing.json"]) == 2
    assert cli.main(["import", "torchrun train.py --bf16"]) == 2
    told = capsys.readouterr().err
    assert "is there, with another content      fix: --out FOLDER" in told
    assert "FSDP2 shards, found zero=stage0      fix: engine=ddp" in told
    assert "expected RUN" in told
    assert "found no file 'missing.json'" in told
    assert "found a command line; its place is: --args 'torchrun train.py --bf16'" in told


# A shard of a vector fills whole vectors of the processor: torch's fused optimizers round a rest otherwise.
WIDTH = 64
ROWS = 4
LABELS = 4 * ROWS * WIDTH  # of two micro-batches on two ranks


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = rows + torch.tanh(layer(rows))
        return rows


def loss_of(model: Any, rows: torch.Tensor, _labels: torch.Tensor | None = None) -> torch.Tensor:
    loss: torch.Tensor = model(rows).square().sum()
    return loss


def micro_batch(rank: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows, and a label for each of their numbers."""
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * rank + micro))
    return rows, torch.zeros(ROWS, WIDTH, dtype=torch.int64)


@dataclass(frozen=True)
class Trained:
    """Losses of all ranks and the final parameters, by the exported file and by one process of plain torch."""

    losses: list[float]
    expected_losses: list[float]
    params: list[torch.Tensor]
    expected_params: list[torch.Tensor]


def trained_by_fsdp2(path: str, updates: int, *, by_rank: bool) -> Trained:
    """by_rank: a rank's micro-batches are added first, then the ranks, as where gradients are reduced once a step; else
    the ranks of each micro-batch first. With two of each, both orders are complete, because additions commute."""
    parts = runpy.run_path(path)
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = [[micro_batch(one, micro) for micro in range(2)] for one in range(world)]
    sharded, plain = parts["shard"](Blocks()), Blocks()
    optimizers = parts["optimizer"](sharded), parts["optimizer"](plain)
    schedules = [parts["schedule"](one) for one in optimizers]
    found, expected = [], []
    for _ in range(updates):
        found.append(parts["train_step"](sharded, optimizers[0], rows[rank], loss_of))
        losses = [[loss_of(plain, *micro) / LABELS for micro in own] for own in rows]
        expected.append(sum(one.item() for own in losses for one in own))
        grads = [[torch.autograd.grad(one, list(plain.parameters())) for one in own] for own in losses]
        pairs = grads if by_rank else list(zip(*grads, strict=True))
        for index, param in enumerate(plain.parameters()):
            sums = [first[index] + second[index] for first, second in pairs]
            param.grad = sums[0] + sums[1]
        if parts["CLIP_NORM"] is not None:
            nn.utils.clip_grad_norm_(plain.parameters(), parts["CLIP_NORM"])
        optimizers[1].step()
        for schedule in schedules:
            schedule.step()
    full = [param.full_tensor().detach() for param in sharded.parameters()]
    return Trained(found, expected, full, [param.detach() for param in plain.parameters()])


def exported_for_fsdp2(*words: str) -> str:
    config = point([*words, "precision=fp32", "batch.accumulation=2"])
    Path("fsdp2_parts.py").write_text(WRITERS["fsdp2"](config, "a point").files["fsdp2_parts.py"])
    return str(Path("fsdp2_parts.py").absolute())


@pytest.mark.parametrize("level", [1, 2, 3])
def test_the_exported_file_for_fsdp2_trains_as_plain_torch_bit_for_bit(level: int) -> None:
    path = exported_for_fsdp2(f"zero=stage{level}", "optimizer.clip_norm=null")
    for one in run_ranks(partial(trained_by_fsdp2, by_rank=level == 1), 2, path, 4):
        assert one.losses == one.expected_losses
        assert one.losses[-1] < one.losses[0]
        assert all(torch.equal(*pair) for pair in zip(one.params, one.expected_params, strict=True))


CLIP, LR = 0.01, 0.5
CLIPPED = (
    "optimizer=sgd", "optimizer.momentum=0.0", "optimizer.weight_decay=0.0", "scheduler=constant",
    f"optimizer.lr={LR}", f"optimizer.clip_norm={CLIP}",
)  # fmt: skip


def check_clipped_update(params: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """One update of CLIPPED is that of plain torch, up to the roundings of fp32.

    The norms sum the same squares in different orders: each is off by a relative numel x u at most, because all terms
    are positive, and its root by half of that; root, quotient, product and update round a few times more. An update is
    at most LR x CLIP, and parameters round once.
    """
    unit, before = 2.0**-24, [param.detach() for param in Blocks().parameters()]
    numel = sum(param.numel() for param in before)
    moved = sum(float((new - old).square().sum()) for new, old in zip(params, before, strict=True))
    assert math.sqrt(moved) == pytest.approx(LR * CLIP, rel=1e-3), "the gradients were clipped"
    for one, other in zip(params, expected, strict=True):
        bound = LR * CLIP * (numel + 8) * unit + 2 * unit * other.abs()
        assert bool(((one - other).abs() <= bound).all())


def test_the_exported_file_for_fsdp2_clips_as_plain_torch() -> None:
    path = exported_for_fsdp2("zero=stage3", *CLIPPED)
    for one in run_ranks(partial(trained_by_fsdp2, by_rank=False), 2, path, 1):
        check_clipped_update(one.params, one.expected_params)


Updated = tuple[tuple[Any, ...], list[torch.Tensor]]


def all_trained_by_deepspeed(paths: dict[int, str]) -> dict[int, Updated]:
    """By stage; one after the other, so that the ranks import DeepSpeed once."""
    as_launched()
    os.environ["DS_ACCELERATOR"] = "cpu"
    return {stage: trained_by_deepspeed(path, stage) for stage, path in paths.items()}


def trained_by_deepspeed(path: str, stage: int) -> Updated:
    """What DeepSpeed's engine says of the exported file, and the parameters after one update of two micro-batches."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    model, rank = Blocks(), dist.get_rank()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=path)
    for micro in range(2):
        engine.backward(loss_of(engine, *micro_batch(rank, micro)) / (ROWS * WIDTH))  # DeepSpeed takes means
        engine.step()
    said = (
        engine.zero_optimization_stage(), engine.gradient_clipping(), engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps(), engine.get_lr(), engine.global_steps,
    )  # fmt: skip
    params = [safe_get_full_fp32_param(param) if stage else param.detach() for param in model.parameters()]
    engine.destroy()
    return said, params


@pytest.mark.full
def test_deepspeed_trains_with_the_exported_file_as_plain_torch_at_every_stage(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed.runtime.config", reason="deepspeed is not installed (extra deepspeed)")
    two = ("precision=fp32", "batch.accumulation=2", "resources.ranks=2", "resources.device=cpu")
    configs = {stage: point([f"zero=stage{stage}", *two, *CLIPPED]) for stage in range(4)}
    paths = {stage: tmp_path / f"stage{stage}.json" for stage in configs}
    for stage, config in configs.items():
        paths[stage].write_text(WRITERS["deepspeed"](config, "").files["ds_config.json"])
    plain = Blocks()
    for rank in range(2):
        for micro in range(2):
            (loss_of(plain, *micro_batch(rank, micro)) / LABELS).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
    torch.optim.SGD(plain.parameters(), lr=LR).step()
    for by_stage in run_ranks(all_trained_by_deepspeed, 2, {stage: str(path) for stage, path in paths.items()}):
        for stage, (said, params) in by_stage.items():
            assert said == (stage, CLIP, configs[stage].batch.micro, 2, [LR], 1)
            check_clipped_update(params, [param.detach() for param in plain.parameters()])
