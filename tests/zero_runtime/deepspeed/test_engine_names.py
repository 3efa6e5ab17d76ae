"""The names that scripts ask an engine and its optimizer for, beside those of the training loop."""

from __future__ import annotations

import pytest
import torch
from harness.ranks import run_alone
from harness.seed_loop import initialize_quietly
from torch import nn

from zero_runtime.errors import PlanError


def names() -> None:
    """The names that scripts ask an engine and its optimizer for."""
    x = torch.ones(2, 4)
    engine, optimizer, loader, _ = initialize_quietly(
        model=nn.Linear(4, 4),
        config={
            "train_batch_size": 2,
            "fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 30, "hysteresis": 1},
            "scheduler": {"type": "WarmupLR", "params": {}},
        },
        training_data=torch.zeros(4, 4),
    )
    assert engine.training_dataloader is loader
    assert not engine.monitor.enabled
    engine.monitor.write_events([("loss", 1.0, 1)])
    engine.empty_partition_cache()
    assert optimizer.optimizer.param_groups is optimizer.param_groups
    assert (optimizer.overflow, optimizer.dynamic_loss_scale, optimizer.needs_scaler()) == (False, True, True)
    scaler = optimizer.loss_scaler
    engine.backward(engine(x).mean())
    engine.step()
    assert (optimizer.overflow, engine.skipped_steps, engine.was_step_applied()) == (True, 1, False)
    with pytest.raises(AttributeError, match="no setter"):
        scaler.cur_scale = 4.0
    with pytest.raises(AttributeError, match="raise_error_at_min_scale"):
        scaler.raise_error_at_min_scale = False
    assert scaler.loss_scale == scaler.cur_scale == optimizer.cur_scale == engine.cur_scale == 2.0**29
    assert engine.lr_scheduler.get_mom() == engine.get_mom() == [(0.9, 0.999)]
    engine.set_train_micro_batch_size(5)
    assert engine.get_batch_info() == (5, 5, 1)
    engine.global_samples = 0
    engine.backward(engine(x).mean())
    engine.step()
    assert engine.global_samples == 5
    with pytest.raises(PlanError, match=r"expected a multiple of 5 .* found 7"):
        engine.set_train_batch_size(7)
    for name in ("offload_states", "reload_states"):
        with pytest.raises(AttributeError, match="offload_optimizer"):
            getattr(engine, name)
    engine.destroy()


def test_scripts_find_the_names_that_they_use() -> None:
    run_alone(names)
