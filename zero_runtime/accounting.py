"""Bytes of a runtime on one rank: predicted ones, and the tensors that hold them now."""

from __future__ import annotations

import torch

from zero_runtime.offload_plan import OffloadBytes
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import ZeroRuntime
from zero_runtime.state_bytes import (
    ElementBytes,
    StateBytes,
    UnitSize,
    element_bytes,
    model_state_bytes,
)
from zero_runtime.state_tier import is_offloaded
from zero_runtime.wings import OFFLOAD_BYTES, load

# ---- predictions -----------------------------------------------------------------------------------------------------


def unit_sizes(runtime: ZeroRuntime) -> list[UnitSize]:
    """The sizes of the units, in the order of registration."""
    separate = runtime.settings.offload.has_separate_memory(runtime.device.type)
    return [
        UnitSize.of(
            unit.layout,
            trainable=unit.trainable,
            state_bytes=runtime.optimizer.config.matrix_state_bytes if unit.matrices else None,
            is_root=runtime.model in unit.modules,
            params_offloaded=unit.parameters.params_offloaded,
            optimizer_offloaded=unit.parameters.states_offloaded,
            separate_memory=separate,
        )
        for unit in runtime.units
    ]


def bytes_of_element(runtime: ZeroRuntime) -> ElementBytes:
    """Bytes of the optimizer, and of error feedback, for each trained element."""
    world = runtime.collectives.data_world
    return element_bytes(runtime.plan, runtime.optimizer.config, runtime.settings.wire, world=world)


def _sizes_with_precision(runtime: ZeroRuntime) -> list[tuple[UnitSize, MixedPrecision]]:
    return list(zip(unit_sizes(runtime), (unit.precision for unit in runtime.units), strict=True))


def predicted_state_bytes(runtime: ZeroRuntime) -> StateBytes:
    """This rank's bytes of model states as predicted by `state_bytes.py`."""
    return model_state_bytes(
        runtime.plan,
        _sizes_with_precision(runtime),
        world=runtime.collectives.data_world,
        micro_batches=runtime.settings.micro_batches,
        **bytes_of_element(runtime),
    )


def predicted_offload_bytes(runtime: ZeroRuntime) -> OffloadBytes:
    """This rank's bytes in host memory and in the scratch file as predicted by `offload/memory.py`."""
    if not any(is_offloaded(unit) for unit in runtime.units):
        return OffloadBytes()
    sizes, shards = _sizes_with_precision(runtime), runtime.collectives.shard_count
    found: OffloadBytes = load(OFFLOAD_BYTES)(runtime.settings, runtime.optimizer.config, sizes, shards)
    return found


# ---- what exists now -------------------------------------------------------------------------------------------------


def scratch_bytes(runtime: ZeroRuntime) -> int:
    """Size of this rank's scratch file in bytes; 0 without one."""
    return runtime.tier.scratch_bytes


def host_tensors(runtime: ZeroRuntime) -> dict[str, list[torch.Tensor]]:
    """The tier's tensors in host memory, by component (params, grads, optimizer, staging)."""
    return runtime.tier.tensors()


def state_tensors(runtime: ZeroRuntime) -> dict[str, list[torch.Tensor]]:
    """Live flat tensors by component, without those in `host_tensors`; aliases share a storage."""
    tensors: dict[str, list[torch.Tensor]] = {"params": [], "grads": [], "optimizer": []}
    for unit in runtime.units:
        for component, own in unit.state_tensors().items():
            tensors[component] += own
    tensors["optimizer"] += runtime.optimizer.state_tensors()
    offloaded = {_storage(tensor) for own in host_tensors(runtime).values() for tensor in own}
    return {name: [tensor for tensor in own if _storage(tensor) not in offloaded] for name, own in tensors.items()}


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
