"""A script for DeepSpeed runs with only its import changed, alone and under torchrun, with plain torch's numbers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.models import TinySpec, TinyTransformer, batch
from harness.patience import HANG_S
from harness.plain_optimizers import AdamW
from harness.ranks import run_alone, run_ranks
from harness.seed_loop import initialize_quietly, run_script
from torch import nn
from torch.nn import functional as F

from zero_runtime.deepspeed import entry

ROOT = Path(__file__).resolve().parents[3]
SPEC = TinySpec()
STEPS = 5


def mean_loss(model: Any, step: int, rank: int, micro: int) -> torch.Tensor:
    ids, labels = batch(SPEC, step, rank, micro)
    return F.cross_entropy(model(ids).reshape(-1, SPEC.vocab), labels.clamp(min=0).reshape(-1))


# ---- the script ----------------------------------------------------------------------------------------------------


def scripts(folder: str) -> list[dict[str, Any]]:
    """Run the script in one process without a launcher: a refused file, then another one twice, as a notebook would."""
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} & set(os.environ)
    files = ("auto_tp.json", "zero3_without_offload.json", "zero3_without_offload.json")
    return [run_script(folder, file, 30) for file in files]


def test_a_script_for_deepspeed_runs_in_one_process_with_only_its_import_changed(tmp_path: Path) -> None:
    refused, first, second = run_alone(scripts, str(tmp_path))
    assert "tensor_parallel.tp_size: expected a divisor of the 1 ranks, found 4" in refused["refused"]
    assert refused["told"] == []
    assert first["told"] == second["told"]  # twice in one process, the same numbers
    losses = [float(match[1]) for line in first["told"] if (match := re.search(r"Loss: ([\d.]+)", line))]
    assert len(losses) == 30
    assert losses[-1] < losses[0] - 1  # it learns
    steps, skipped, updates = first["steps"]
    assert steps == 30 == skipped + updates
    assert first["dtype"] == {"torch.float16"}
    assert first["returned"] == (True, None, None)
    assert first["numbers"] == ("cpu", 0, 0, 1)
    (warned,) = first["warned"]
    assert "no optimizer is named: AdamW with lr=0.001" in warned
    assert "gradient_clipping is not given: gradients are clipped at a norm of 1.0" in warned
    assert "without effect here: zero_optimization.contiguous_gradients, " in warned
    assert "zero_optimization.reduce_bucket_size: each block is one unit" in warned


TORCHRUN_SCRIPT = """
import torch
import zero_runtime as deepspeed
deepspeed.init_distributed(dist_backend=BACKEND)
torch.manual_seed(0)
engine, *_ = deepspeed.initialize(model=torch.nn.Linear(10, 10), config={"train_batch_size": 4})
for _ in range(3):
    loss = engine(torch.full((2, 10), 1.0 + engine.global_rank, device=engine.device)).square().mean()
    engine.backward(loss)
    engine.step()
with engine.runtime.full_params() as whole:
    total = sum(value.sum() for value in whole.values()).item()
place = f"rank {engine.global_rank} of {engine.world_size}, local {engine.local_rank}"
told = f"{place}, {torch.distributed.get_backend()}: {total!r}"
open(f"{__file__}.{engine.global_rank}", "w").write(told)
engine.destroy()
"""


@pytest.mark.parametrize(("asked", "comm"), [(None, "auto"), ("gloo", "gloo"), ("shm", "shm"), ("ccl", "auto")])
def test_a_script_on_cpus_gets_the_backend_that_it_asks_for(
    asked: str | None, comm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = []
    monkeypatch.setattr(entry, "is_joined", lambda: False)
    monkeypatch.setattr(entry, "_join", lambda *args: joined.append(args[-1]))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        entry.init_distributed(asked, rank=0, world_size=2)
    assert [settings.comm for settings in joined] == [comm]
    assert [str(one.message) for one in told] == (
        ["init_distributed: dist_backend='ccl' has no effect: gloo or shm on cpu"] if asked == "ccl" else []
    )


@pytest.mark.full
@pytest.mark.parametrize(("asked", "used"), [("None", "shm"), ("'gloo'", "gloo")])
def test_a_script_runs_under_torchrun_and_exits_without_an_error(asked: str, used: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TORCHRUN_SCRIPT.replace("BACKEND", asked))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert run.returncode == 0, run.stderr
    told = [Path(f"{script}.{rank}").read_text() for rank in range(2)]
    assert [line.split(":")[0] for line in told] == [f"rank {rank} of 2, local {rank}, {used}" for rank in range(2)]
    assert told[0].split(":")[1] == told[1].split(":")[1]


# ---- numbers -------------------------------------------------------------------------------------------------------


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    plain = [param for param in model.parameters() if param.dim() < 2]
    decayed = [param for param in model.parameters() if param.dim() >= 2]
    return [{"params": decayed, "lr": 3e-3, "weight_decay": 0.1}, {"params": plain, "lr": 1e-3, "weight_decay": 0.0}]


def torch_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(two_groups(model), betas=(0.8, 0.95), foreach=False)


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def plain_weights(rank: int, world: int, accumulation: int, *, each_micro: bool) -> tuple[Any, list[float]]:
    """Weights and losses of manual data parallelism: gradients of the mean losses, averaged over the ranks.

    each_micro: average after each micro-batch, as stages that shard gradients do; this changes the order of sums.
    """
    model = TinyTransformer(SPEC)
    optimizer = AdamW(two_groups(model), betas=(0.8, 0.95))
    schedule = halving(optimizer)
    losses = []
    for step in range(STEPS):
        total = [torch.zeros_like(param) for param in model.parameters()]
        for micro in range(accumulation):
            loss = mean_loss(model, step, rank, micro)
            losses.append(loss.item())
            (loss / accumulation / world).backward()
            for grad, param in zip(total, model.parameters(), strict=True):
                if each_micro:
                    dist.all_reduce(param.grad)
                grad += param.grad
                param.grad = None
        for grad, param in zip(total, model.parameters(), strict=True):
            if not each_micro:
                dist.all_reduce(grad)
            param.grad = grad
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return dict(model.named_parameters()), losses


def engine_weights(rank: int, world: int, accumulation: int, row: int, way: str) -> tuple[Any, list[float]]:
    """The same with the engine. way: whether the optimizer comes from a config section, an instance or a callable."""
    model = TinyTransformer(SPEC)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": row},
    }
    given: dict[str, Any] = {}
    if way == "section":
        config["optimizer"] = {"type": "AdamW", "params": {"betas": [0.8, 0.95]}}
        given = {"model_parameters": two_groups(model), "lr_scheduler": halving}
    elif way == "instances":
        optimizer = torch_adamw(model)
        given = {"optimizer": optimizer, "lr_scheduler": halving(optimizer)}
    else:
        given = {"optimizer": lambda _: torch_adamw(model)}
    engine, view, _, scheduler = initialize_quietly(model=model, config=config, **given)
    by_hand = halving(view) if scheduler is None else None  # a scheduler that the training loop steps
    losses = []
    for step in range(STEPS):
        for micro in range(accumulation):
            loss = mean_loss(engine, step, rank, micro)
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
            assert engine.was_step_applied() is (micro + 1 == accumulation)
        if by_hand is not None:
            by_hand.step()
    assert engine.get_lr() == [3e-3 / 4, 1e-3 / 4] == [group["lr"] for group in view.param_groups]
    with engine.runtime.full_params() as whole:
        weights = {name: value.clone() for name, value in whole.items()}
    engine.destroy()
    return weights if row == 3 else dict(model.named_parameters()), losses  # test_destroy.py has row 3


def compare_with_plain() -> list[str]:
    rank, world = dist.get_rank(), dist.get_world_size()
    differing = []
    for accumulation, row, way in (
        (1, 0, "section"),
        (1, 1, "instances"),
        (1, 2, "callable"),
        (1, 3, "section"),
        (2, 1, "callable"),
        (2, 3, "instances"),
    ):
        expected, told = plain_weights(rank, world, accumulation, each_micro=row >= 2)
        found, losses = engine_weights(rank, world, accumulation, row, way)
        differing += [
            f"{accumulation, row, way}: {name}" for name in expected if not torch.equal(expected[name], found[name])
        ]
        assert losses == told, (accumulation, row, way)
    return differing


def test_two_ranks_have_the_bits_of_plain_data_parallelism() -> None:
    """fp32; the mean losses are averaged over micro-batches and ranks, and factors of 2 cause no rounding."""
    assert run_ranks(compare_with_plain, 2) == [[], []]
