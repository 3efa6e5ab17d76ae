"""The bytes in host memory and in the scratch file that a runtime's settings lead to, before anything is allocated."""

from __future__ import annotations

from zero_runtime.offload.memory import Moves, Units, host_bytes, nvme_bytes
from zero_runtime.offload_plan import OffloadBytes, Tier
from zero_runtime.optim.configs import STATE_ITEMSIZE_BYTES, OptimizerConfig
from zero_runtime.settings import RuntimeSettings


def predicted_bytes(settings: RuntimeSettings, config: OptimizerConfig, units: Units, shard_count: int) -> OffloadBytes:
    """The bytes of one rank."""
    offload = settings.offload
    moves = Moves(
        shard_count,
        settings.prefetch,
        settings.micro_batches,
        tuple(STATE_ITEMSIZE_BYTES[held.dtype] / held.per for held in config.held_states),
        1 if offload.scratch is None else offload.scratch.ahead,
        offload.params is Tier.NVME,
    )
    return (nvme_bytes if offload.uses_nvme else host_bytes)(units, moves)
