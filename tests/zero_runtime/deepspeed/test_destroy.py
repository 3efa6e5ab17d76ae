"""After engine.destroy the model has its trained weights, or raises by name, and trains on in another engine."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.models import TinySpec, TinyTransformer, batch
from harness.ranks import run_ranks
from harness.seed_loop import initialize_quietly
from torch.nn import functional as F

from zero_runtime.checkpoint.hugging_face.gathered import save_gathered_weights
from zero_runtime.checkpoint.save import save_checkpoint
from zero_runtime.deepspeed.engine import Engine
from zero_runtime.errors import CallOrderError, ParameterReadError, PlanError

SPEC = TinySpec(frozen=True, tied=True)
NAME = "embed.weight"


def engine_of(model: Any, stage: int, dtype: str = "fp32", device: str = "none", folder: Path | None = None) -> Engine:
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": device, "nvme_path": str(folder)}},
        "bf16": {"enabled": dtype == "bf16"},
    }
    return initialize_quietly(model=model, config=config)[0]


def loss_of(model: Any, step: int) -> torch.Tensor:
    ids, labels = batch(SPEC, step, dist.get_rank(), 0)
    return F.cross_entropy(model(ids).reshape(-1, SPEC.vocab).float(), labels.clamp(min=0).reshape(-1))


def train(engine: Engine, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(engine, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def trained_weights(engine: Engine) -> dict[str, torch.Tensor]:
    """In the dtype that the model computes in, as test_entry.py compares them with plain PyTorch's."""
    dtype = next(engine.module.parameters()).dtype
    with engine.runtime.full_params() as whole:
        return {name: value.to(dtype) for name, value in whole.items()}


def check_methods_raise(engine: Engine, folder: Path) -> None:
    names = [name for kind in Engine.__mro__[:-1] for name in vars(kind) if not name.startswith("_")]
    methods = [name for name in names if callable(getattr(Engine, name))]
    assert {"save_checkpoint", "backward", "module_state_dict", "get_lr"} < set(methods)
    for name in set(methods) - {"destroy"}:
        with pytest.raises(CallOrderError, match=f"^{name}: expected an engine in use, found one that was destroyed"):
            getattr(engine, name)()
    with pytest.raises(CallOrderError, match="destroyed"):
        engine(torch.zeros(1, 1))
    for call in (engine.runtime.step, engine.runtime.full_params, engine.runtime):
        with pytest.raises(CallOrderError, match="expected an open runtime"):
            call()
    for save in (lambda: save_checkpoint(engine.runtime, folder, step=1, trainer={}), engine.runtime.renew):
        with pytest.raises(CallOrderError, match=r"expected (a model with parameters|an open runtime)"):
            save()
    with pytest.raises(CallOrderError, match="save_gathered_weights: expected a model with parameters, found none"):
        save_gathered_weights(engine.runtime, folder / "weights")
    assert not list(folder.iterdir())
    engine.destroy()


def check_whole(model: Any, expected: dict[str, torch.Tensor]) -> None:
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    told = torch.load(saved, weights_only=True)
    for name, param in model.named_parameters():
        assert type(param) is torch.nn.Parameter
        assert param.grad is None
        assert param.untyped_storage().nbytes() == param.nbytes, "a view would keep its flat tensor"
        assert torch.equal(param, expected[name]), name
        assert torch.equal(told[name], expected[name]), name


def check_guarded(model: Any) -> None:
    for read in (model.state_dict, lambda: torch.save(model, io.BytesIO()), lambda: loss_of(model, 0)):
        with pytest.raises(
            ParameterReadError, match=r"parameter '.*': its runtime was closed .*save the weights before"
        ):
            read()
    with pytest.raises(PlanError, match=f"found that of '{NAME}'.*save the weights before"):
        engine_of(model, 2)


def destroyed(stage: int, dtype: str, device: str, folder: Path) -> None:
    """Train, destroy, and train on at the next stage."""
    model = TinyTransformer(SPEC)
    engine = engine_of(model, stage, dtype, device, folder)
    train(engine, range(2))
    if stage == 3 and dist.get_world_size() > 1:
        with pytest.raises(PlanError, match="found one that is in use"):
            engine_of(model, stage)
    expected = trained_weights(engine)
    state = engine.module_state_dict()
    if stage == 1:
        engine.backward(loss_of(engine, 2))  # gradients that no step takes
    engine.destroy()
    check_methods_raise(engine, folder)
    if stage == 3 and dist.get_world_size() > 1:
        check_guarded(model)
        model.load_state_dict(state, assign=True)
        model.head.weight = model.embed.weight  # which `assign` gives parameters of their own
    check_whole(model, expected)
    with torch.no_grad():
        plain = loss_of(model, 2).item()
    again = engine_of(model, (stage + 1) % 4, dtype)
    first, second = train(again, range(2, 4))
    assert first == plain != second
    again.destroy()


@pytest.mark.parametrize(
    ("stage", "world", "dtype", "device"),
    [
        (0, 2, "fp32", "none"),
        (1, 2, "fp32", "none"),
        (2, 2, "bf16", "nvme"),  # full copies are stale between steps
        (3, 2, "fp32", "none"),
        (3, 1, "bf16", "none"),
        pytest.param(1, 2, "fp32", "cpu", marks=pytest.mark.full),
        pytest.param(2, 2, "fp32", "none", marks=pytest.mark.full),
        pytest.param(2, 2, "bf16", "cpu", marks=pytest.mark.full),
        pytest.param(3, 1, "fp32", "nvme", marks=pytest.mark.full),
        pytest.param(3, 2, "bf16", "cpu", marks=pytest.mark.full),
    ],
)
def test_a_destroyed_engine_leaves_whole_weights_or_parameters_that_raise(
    stage: int, world: int, dtype: str, device: str, tmp_path: Path
) -> None:
    run_ranks(destroyed, world, stage, dtype, device, tmp_path)


def fails_alone(folder: Path) -> None:
    """Rank 1 fails between two steps; its `finally` must not wait for the others, whose weights it would gather."""
    model = TinyTransformer(SPEC)
    engine = engine_of(model, 2, "fp32", "nvme", folder)
    train(engine, range(1))
    if dist.get_rank() == 1:
        try:
            raise ValueError("of the user's")
        except ValueError:
            engine.destroy()
        with pytest.raises(ParameterReadError, match=NAME):
            model.state_dict()


def test_a_rank_that_fails_gathers_nothing_when_it_is_destroyed(tmp_path: Path) -> None:
    run_ranks(fails_alone, 2, tmp_path)


def saved_pretrained(folder: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    engine = engine_of(model, 2)
    ids = torch.arange(8).view(1, 8)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    expected = trained_weights(engine)
    engine.destroy()
    model.save_pretrained(folder)
    for name, param in GPT2LMHeadModel.from_pretrained(folder).named_parameters():
        assert torch.equal(param, expected[name]), name


def test_save_pretrained_after_destroy_writes_the_trained_weights(tmp_path: Path) -> None:
    run_ranks(saved_pretrained, 1, tmp_path)
