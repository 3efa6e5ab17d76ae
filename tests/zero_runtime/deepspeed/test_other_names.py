"""DeepSpeed's names beside initialize: on two ranks each does what DeepSpeed's does, and absent ones say what to do."""

from __future__ import annotations

import argparse
import json
import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.plain_optimizers import Adam, AdamW
from harness.ranks import run_alone, run_ranks
from harness.seed_loop import full_values, initialize_quietly, unequal
from torch import nn

import zero_runtime
from zero_runtime.deepspeed import absent
from zero_runtime.errors import ParameterReadError, PlanError

WIDTH = 6
CONFIG = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0}


def small_model() -> nn.Module:
    """Two layers, whose 91 elements are a multiple of no number of ranks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH + 1))


def at_level(number: int, **more: Any) -> dict[str, Any]:
    """A configuration without clipping at one ZeRO stage."""
    return {**CONFIG, "zero_optimization": {"stage": number}, **more}


def mean_loss(model: Any, step: int) -> torch.Tensor:
    """The loss of this rank's rows in a step."""
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return model(torch.randn(4, WIDTH, generator=generator)).square().mean()


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, torch.Tensor]:
    """One step with the mean of the ranks' gradients, which are returned."""
    optimizer.zero_grad()
    (mean_loss(model, step) / dist.get_world_size()).backward()
    for param in model.parameters():
        dist.all_reduce(param.grad)
    optimizer.step()
    return {name: param.grad.clone() for name, param in model.named_parameters()}


# ---- comm ----------------------------------------------------------------------------------------------------------


def collectives() -> None:
    from zero_runtime import comm

    comm.init_distributed()  # there is a group: does nothing
    rank, world = comm.get_rank(), comm.get_world_size()
    assert (comm.is_initialized(), world) == (True, 2)
    total = torch.tensor([rank + 1.0])
    comm.all_reduce(total)
    assert total.item() == 3
    largest = torch.tensor([rank + 1.0])
    comm.all_reduce(largest, op=comm.ReduceOp.MAX)
    assert largest.item() == 2
    parts = [torch.zeros(2) for _ in range(world)]
    comm.all_gather(parts, torch.full((2,), float(rank)))
    assert torch.stack(parts).tolist() == [[0, 0], [1, 1]]
    told = torch.tensor([float(rank)])
    comm.broadcast(told, src=1)
    assert told.item() == 1
    share = torch.zeros(2)
    comm.reduce_scatter(share, list(torch.arange(4.0).mul(rank + 1).split(2)))
    assert share.tolist() == [3 * (2 * rank), 3 * (2 * rank + 1)]
    comm.barrier()
    os.environ["LOCAL_RANK"] = "5"
    assert comm.get_local_rank() == 5
    with pytest.raises(AttributeError, match=r"comm\.log_summary: torch\.distributed has no such function; use all_"):
        _ = comm.log_summary


# ---- ops.adam ------------------------------------------------------------------------------------------------------


def adams() -> None:
    """FusedAdam is AdamW by default, DeepSpeedCPUAdam with adamw_mode=False is Adam: the bits of a plain loop."""
    from zero_runtime.ops.adam import DeepSpeedCPUAdam, FusedAdam

    constants = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    offloaded = at_level(2) | {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    cases: list[tuple[type[torch.optim.Optimizer], dict[str, Any], dict[str, Any], Any]] = [
        (FusedAdam, {}, at_level(1), AdamW),
        (FusedAdam, {"adam_w_mode": False}, at_level(3), Adam),
        (DeepSpeedCPUAdam, {}, offloaded, AdamW),
        (DeepSpeedCPUAdam, {"adamw_mode": False}, offloaded, Adam),
    ]
    for made, switches, config, plain in cases:
        model, other = small_model(), small_model()
        optimizer = made(model.parameters(), **constants, **switches)
        engine, *_ = initialize_quietly(model=model, optimizer=optimizer, config=config)
        assert isinstance(optimizer, made)
        expected = plain(other.parameters(), **constants)
        for step in range(3):
            engine.backward(mean_loss(engine, step))
            engine.step()
            plain_step(other, expected, step)
        assert unequal(full_values(engine), dict(other.named_parameters())) == [], (made, switches)
        engine.destroy()
    with pytest.raises(PlanError, match="expected bias_correction=True beside amsgrad, found False"):
        FusedAdam(small_model().parameters(), bias_correction=False, amsgrad=True)
    with pytest.raises(PlanError, match="expected fp32_optimizer_states=True, found False"):
        DeepSpeedCPUAdam(small_model().parameters(), fp32_optimizer_states=False)


# ---- utils ---------------------------------------------------------------------------------------------------------


def logs() -> None:
    from zero_runtime.utils import log_dist, logger

    assert isinstance(logger, logging.Logger)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.info("%d parameters", 91)
    log_dist("on one", ranks=[0])
    log_dist("on all", ranks=[-1])
    rank = dist.get_rank()
    on_one = [f"[rank {rank}] on one"] if rank == 0 else []
    assert lines == ["91 parameters", *on_one, f"[rank {rank}] on all"]


def full_tensors() -> None:
    """Parameters, gradients and states by parameter, at stage 3 in bf16 and in fp32, against a plain loop."""
    from zero_runtime import utils

    model, other = small_model(), small_model()
    engine, *_ = initialize_quietly(
        model=model, config=at_level(3, optimizer={"type": "AdamW", "params": {"lr": 0.01}})
    )
    optimizer = AdamW(other.parameters(), lr=0.01, weight_decay=0.0)
    params = dict(model.named_parameters())
    weights = {name: utils.safe_get_full_fp32_param(param) for name, param in params.items()}
    assert unequal(weights, dict(other.named_parameters())) == []
    engine.backward(mean_loss(engine, 0))
    found = {name: utils.safe_get_full_grad(param) for name, param in params.items()}
    assert unequal(found, plain_step(other, optimizer, 0)) == []
    engine.step()
    for state in ("exp_avg", "exp_avg_sq"):
        states = {name: utils.safe_get_full_optimizer_state(param, state) for name, param in params.items()}
        expected = {name: optimizer.state[param][state] for name, param in other.named_parameters()}
        assert unequal(states, expected) == []
    value = torch.full((WIDTH, WIDTH), 0.5 + dist.get_rank())
    utils.safe_set_full_fp32_param(params["0.weight"], value)
    assert torch.equal(utils.safe_get_full_fp32_param(params["0.weight"]), torch.full((WIDTH, WIDTH), 0.5))
    with pytest.raises(PlanError, match="expected one of exp_avg, exp_avg_sq, found 'momentum'"):
        utils.safe_get_full_optimizer_state(params["0.weight"], "momentum")
    with pytest.raises(PlanError, match="that no engine owns"):
        utils.safe_get_full_fp32_param(other[0].weight)
    engine.destroy()
    model = small_model()
    engine, *_ = initialize_quietly(model=model, config=at_level(3, bf16={"enabled": True}))
    weights = {name: utils.safe_get_full_fp32_param(param) for name, param in model.named_parameters()}
    assert {str(value.dtype) for value in weights.values()} == {"torch.float32"}
    assert unequal(weights, dict(small_model().named_parameters())) == []  # the masters, not their bf16 copies
    engine.destroy()


# ---- zero ----------------------------------------------------------------------------------------------------------


def gathered() -> None:
    """Full values inside, on every rank; with modifier_rank=0 what rank 0 writes stays, without it no change stays."""
    GatheredParameters = zero_runtime.zero.GatheredParameters
    for precision in ({}, {"bf16": {"enabled": True}}):
        model, plain = small_model(), small_model()
        engine, *_ = initialize_quietly(model=model, config=at_level(3, **precision))
        dtype = torch.bfloat16 if precision else torch.float32
        weight = model[0].weight
        with GatheredParameters(model.parameters()):
            inside = {name: param.detach().clone() for name, param in model.named_parameters()}
        with (
            pytest.raises(
                ParameterReadError, match=r"no change without modifier_rank, found one of 0\.weight, which is"
            ),
            GatheredParameters(model.parameters()),
        ):
            weight.data.zero_()
        assert unequal(inside, {name: param.detach().to(dtype) for name, param in plain.named_parameters()}) == []
        with pytest.raises(ParameterReadError, match=r"'0\.weight'"):
            weight.sum()
        before = full_values(engine)
        with GatheredParameters([weight, model[2].bias], modifier_rank=0):
            if dist.get_rank() == 0:
                weight.data[1] = 0.25
                nn.init.ones_(model[2].bias)
            else:
                weight.data.fill_(7)
        after = full_values(engine)
        expected = {**before, "2.bias": torch.ones(WIDTH + 1)}
        expected["0.weight"] = before["0.weight"].clone()
        expected["0.weight"][1] = 0.25  # the other rows keep the bits of the master
        assert unequal(after, expected) == []
        with torch.no_grad():
            plain.load_state_dict(expected)
            ones = torch.ones(1, WIDTH, dtype=dtype)
            assert torch.equal(engine(ones), plain.to(dtype)(ones))
        with GatheredParameters(weight, enabled=False), pytest.raises(ParameterReadError):
            weight.sum()
        with pytest.raises(PlanError, match="expected modifier_rank None or one of 2 ranks, found 2"):
            GatheredParameters(weight, modifier_rank=2)
        engine.destroy()


# ---- the rest ------------------------------------------------------------------------------------------------------


def recomputed() -> None:
    """checkpointing.checkpoint changes no gradient, at stage 3, where the recomputation gathers again."""
    from zero_runtime import checkpointing

    class Recomputing(nn.Module):
        def __init__(self, layers: nn.Module) -> None:
            super().__init__()
            self.layers = layers
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpointing.checkpoint(self._layers, x, 2.0)

        def _layers(self, x: torch.Tensor, factor: float) -> torch.Tensor:
            self.calls += 1
            return self.layers(x * factor)

    class Keeping(Recomputing):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self._layers(x, 2.0)

    weights = []
    for kind, calls in ((Keeping, 1), (Recomputing, 2)):
        engine, *_ = initialize_quietly(model=kind(small_model()), config=at_level(3))
        engine.backward(mean_loss(engine, 0))
        engine.step()
        assert engine.module.calls == calls
        weights.append(full_values(engine))
        engine.destroy()
    assert unequal(*weights) == []
    assert checkpointing.is_configured()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpointing.configure(None, partition_activations=True, checkpoint_in_cpu=False)
        checkpointing.reset()
    assert [str(one.message) for one in caught] == [
        "zero_runtime.checkpointing.configure: without effect here: partition_activations: each rank keeps those of "
        "its own tokens, with tensor parallelism too (exceptions: docs/parallel.md)"
    ]


def getters() -> None:
    config = {
        "train_batch_size": 12,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.25, "betas": [0.8, 0.95]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 2}},
    }
    engine, *_ = initialize_quietly(model=small_model(), config=config)
    assert engine.zero_optimization() is True
    assert engine.zero_optimization_stage() == 2
    assert engine.zero_optimization_partition_weights() is False
    assert (engine.fp16_enabled(), engine.bfloat16_enabled()) == (False, True)
    assert (engine.loss_scale(), engine.dynamic_loss_scale()) == (1.0, False)
    assert engine.gradient_clipping() == 0.5
    assert engine.get_batch_info() == (12, 2, 3)
    assert engine.train_batch_size() == 12
    assert engine.train_micro_batch_size_per_gpu() == 2
    assert engine.gradient_accumulation_steps() == 3
    assert (engine.dp_world_size, engine.world_size, engine.global_rank) == (2, 2, dist.get_rank())
    assert engine.get_mom() == [(0.8, 0.95)]
    assert engine.get_global_grad_norm() is None
    for _ in range(3):
        engine.backward(mean_loss(lambda x: engine(x.bfloat16()), 0))
        engine.step()
    assert (engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps) == (1, 3, 12, 0)
    assert engine.get_global_grad_norm() > 0
    engine.set_lr(0.125)
    assert engine.get_lr() == [0.125]
    state = engine.module_state_dict()
    assert {name: (tuple(value.shape), value.dtype) for name, value in state.items()} == {
        name: (tuple(value.shape), torch.bfloat16) for name, value in small_model().state_dict().items()
    }
    assert unequal(state, {name: value.bfloat16() for name, value in full_values(engine).items()}) == []
    for name, advice in absent.ABSENT_OF_ENGINE.items():
        with pytest.raises(AttributeError) as told:
            getattr(engine, name)
        assert str(told.value) == f"engine.{name}: {advice}"
    engine.destroy()


CHECKS = (collectives, adams, logs, full_tensors, gathered, recomputed, getters)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_names_do_what_they_promise_on_two_ranks(check: Callable[[], None]) -> None:
    run_ranks(check, 2)


def accelerator() -> None:
    found = zero_runtime.get_accelerator()
    assert (found.device_name(), found.device_name(1), found.current_device_name()) == ("cpu", "cpu", "cpu")
    assert (found.current_device(), found.device_count(), found.is_available()) == (0, 1, True)
    assert found.communication_backend_name() == "gloo"
    assert (found.is_bf16_supported(), found.is_fp16_supported()) == (True, True)
    for call in (lambda: found.set_device(3), found.synchronize, found.empty_cache, found.reset_peak_memory_stats):
        assert call() is None
    before = found.memory_allocated()
    kept = torch.ones(2**24)  # 64 MiB
    assert found.memory_allocated() > before
    assert found.max_memory_allocated() >= kept.nbytes
    found.manual_seed(4)
    first = torch.rand(3)
    assert torch.equal(first, torch.rand(3, generator=torch.Generator().manual_seed(4)))
    before = found.get_rng_state()
    drawn = torch.rand(3)
    found.set_rng_state(before)
    assert torch.equal(torch.rand(3), drawn)
    with pytest.raises(AttributeError, match=r"get_accelerator\(\)\.Stream is not here; use torch\.cuda"):
        _ = found.Stream


def test_the_accelerator_answers_for_a_cpu() -> None:
    run_alone(accelerator)


def from_a_command_line(folder: str) -> None:
    file = Path(folder, "ds_config.json")
    file.write_text(json.dumps(at_level(1)), encoding="utf-8")
    parser = argparse.ArgumentParser()
    assert zero_runtime.add_config_arguments(parser) is parser
    parsed = parser.parse_args(["--deepspeed", "--deepspeed_config", str(file)])
    engine, *_ = initialize_quietly(args=parsed, model=small_model())
    assert engine.zero_optimization_stage() == 1
    engine.destroy()
    assert parser.parse_args([]).deepspeed_config is None


def test_a_configuration_may_be_named_on_the_command_line(tmp_path: Path) -> None:
    run_alone(from_a_command_line, str(tmp_path))


@pytest.mark.parametrize("place", ["", "ops", "utils", "zero", "checkpointing"])
def test_a_name_that_is_not_here_says_what_to_do(place: str) -> None:
    module: Any = getattr(zero_runtime, place) if place else zero_runtime
    for name, advice in absent.ABSENT.items():
        with pytest.raises(AttributeError) as told:
            getattr(module, name)
        assert str(told.value) == f"{module.__name__}.{name} is not here: {advice}"
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing
