"""Checks that a checkpoint fits the runtime's model and optimizer; one error describes how they differ."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from zero_runtime.checkpoint.layout import Index
from zero_runtime.errors import CheckpointError, some
from zero_runtime.runtime import ZeroRuntime


def kept_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's persistent buffers by name, without those registered with persistent=False."""
    return {
        name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(prefix, recurse=False)
        if name.rpartition(".")[2] not in module._non_persistent_buffers_set
    }


def check_same_model(runtime: ZeroRuntime, index: Index, where: str) -> None:
    """Raise CheckpointError unless parameters, their shapes, which of them are trained, and the buffers agree."""
    check_shapes(runtime, {name: entry.shape for name, entry in index.parameters.items()}, where, index.tied)
    expected = {name: unit.trainable for unit in runtime.units for name in unit.names}
    other = [name for name, trainable in expected.items() if index.parameters[name].trainable is not trainable]
    if other:
        wanted = "trained" if expected[other[0]] else "frozen"
        raise CheckpointError(
            f"{where}: expected {some(other)} to be {wanted} as in this model, found the opposite; freeze the same "
            "parameters as the run that saved it did"
        )
    buffers = {name: tuple(buffer.shape) for name, buffer in kept_buffers(runtime.model).items()}
    found = {name: entry.shape for name, entry in index.buffers.items()}
    if buffers != found:
        names = [name for name in {**buffers, **found} if buffers.get(name) != found.get(name)]
        raise CheckpointError(
            f"{where}: another architecture: expected the buffers of this model, found others ({some(names)}); build "
            "the model that saved it"
        )


def check_shapes(
    runtime: ZeroRuntime, found: Mapping[str, tuple[int, ...]], where: str, tied: Mapping[str, str]
) -> None:
    """Raise CheckpointError unless `found` has exactly the runtime's parameters, with equal shapes.

    tied: other names of parameters there, each with the name that `found` has.
    """
    expected = {name: shape for unit in runtime.units for name, shape in unit.full_shapes.items()}
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    if missing or extra:
        alias = [f"{name} is tied to {tied[name]} there" for name in missing if name in tied]
        raise CheckpointError(
            f"{where}: another architecture: expected the {len(expected)} parameters of this model, found "
            f"{len(found)}; it lacks {some(missing)} and has {some(extra)} too many"
            f"{''.join(f' ({text})' for text in alias[:1])}; build the model that saved it"
        )
    other = [name for name, shape in expected.items() if shape != found[name]]
    if other:
        name = other[0]
        raise CheckpointError(
            f"{where}: another architecture: expected {name} of shape {list(expected[name])}, found "
            f"{list(found[name])} ({len(other)} of {len(expected)} parameters differ); build the model that saved it"
        )


def check_same_optimizer(runtime: ZeroRuntime, index: Index, where: str) -> None:
    """Raise CheckpointError unless the optimizer's name and states agree; its constants may differ."""
    own = (runtime.optimizer.config.saved_as, tuple(runtime.optimizer.state_names))
    found = (index.optimizer.name, index.optimizer.states)
    if own != found:
        raise CheckpointError(
            f"{where}: another optimizer: expected {own[0]} with the states {some(own[1])}, found {found[0]} with "
            f"{some(found[1])}; use the optimizer that saved it, or load its weights alone"
        )
    for unit in runtime.units:
        held = set(runtime.optimizer.told_states_of(unit))
        for name in unit.names if held else ():
            entry = index.parameters[name]
            if entry.trainable and held != set(index.optimizer.states_of(entry)):
                raise CheckpointError(
                    f"{where}: {name}: expected the states {some(sorted(held))}, found "
                    f"{some(index.optimizer.states_of(entry))}; use the optimizer.matrices that saved it, or load its "
                    "weights alone"
                )
