"""Takes a run back to its beginning: the first weights, the optimizer before its first step, the first samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from orchestrator.wings.engines.foreign_runtime import first_values
from orchestrator.worker.listeners import RankRun
from orchestrator.worker.saving import Reached
from orchestrator.worker.setup import build_deferred
from zero_runtime.runtime import ZeroRuntime


def begin_again(run: RankRun) -> None:
    """Takes the run back, with the engine that has trained it. A collective, between two steps. The first values are
    made anew, as when the engine was built, so that no copy of them takes memory until then."""
    runtime: Any = run.runtime
    model, initialise = build_deferred(run.config)
    params = dict(model.named_parameters())
    with first_values(run.config, model, initialise) as first_value:
        if run.config.engine.is_own:
            _own_again(runtime, lambda name: first_value(name, params[name]))
        else:
            trained = ((name, one) for name, one in params.items() if one.requires_grad)
            runtime.engine.begin_again((name, first_value(name, one).float()) for name, one in trained)
    run.loop.progress, run.loop.first_update = Reached(), runtime.updates


def _own_again(runtime: ZeroRuntime, first_value: Callable[[str], torch.Tensor]) -> None:
    for unit in runtime.units:
        if not unit.trainable:
            continue
        with runtime.full_params(unit.names, write=True) as own:
            for name, value in own.items():
                value.copy_(first_value(name))
        with runtime.resident(unit, writes=True):
            for state in runtime.optimizer.states_of(unit).values():
                state.zero_()
    runtime.optimizer.load_counters(dict.fromkeys(runtime.optimizer.counters(), 0.0))
    runtime.scaler = runtime.settings.loss_scale.start()
