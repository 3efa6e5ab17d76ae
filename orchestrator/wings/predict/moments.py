"""The predicted memory of the moments outside of steps: which ones there are, and which ones a run meets. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from orchestrator.config.schema import AdapterKind, CheckpointKind, Device, WeightsExport
from orchestrator.wings.predict.step import ConfigMemory
from zero_runtime.optim.configs import MATRIX_STATES
from zero_runtime.predict.memory.outside_step import HostStore, MomentBytes, OutsideStep, UnitParts

EXPORTED_BYTES = 2  # of an element of exported weights, in bf16 or fp16


def all_moments(memory: ConfigMemory) -> list[MomentBytes]:
    """Every moment outside of steps, whether or not a run of the configuration meets it; none if nothing was traced."""
    if not memory.parts:
        return []
    counted = counted_from(memory)
    return [
        counted.building(reads=memory.config.model.path is not None),
        counted.loading(),
        counted.saving(),
        counted.exporting(EXPORTED_BYTES),
        counted.exporting_files(EXPORTED_BYTES),
    ]


def counted_from(memory: ConfigMemory) -> OutsideStep:
    """What the moments are counted from. At least one micro-batch must have been traced."""
    pairs, rule = zip(memory.units, memory.largest_numels, strict=True), memory.config.optimizer.rule
    offload = memory.config.offload
    file = (memory.moves, offload.scratch().block_bytes) if offload.uses_nvme else None
    return OutsideStep(
        [UnitParts(size, kind, largest) for (size, kind), largest in pairs],
        memory.rules,
        memory.parts[0].peaks.between_steps,
        len(rule.state_names) - (len(MATRIX_STATES) if rule.matrix_patterns is not None else 0),
        on_cpu=memory.config.resources.device is not Device.cuda,
        store=HostStore(memory.away(stepped=False).host, memory.away().host, file),
        # A frozen base that was read from a folder is not saved (worker/saving.py).
        with_frozen=memory.config.adapter.kind is AdapterKind.none or memory.config.model.path is None,
    )


class Met(NamedTuple):
    """What a run meets. outside: the moments outside of its steps. kept: bytes on a rank's host in steps, besides those
    of offload: the copy of the last save."""

    outside: tuple[MomentBytes, ...] = ()
    kept: int = 0


def met(memory: ConfigMemory) -> Met:
    """The moments that a run meets. From its first save on it keeps the copy of that save."""
    if not memory.parts:
        return Met()
    config, counted, checkpoint = memory.config, counted_from(memory), memory.config.checkpoint
    found = [counted.building(reads=config.model.path is not None)]
    if checkpoint.resume != "none":
        found.append(counted.loading())
    saves = checkpoint.kind is not CheckpointKind.none
    copied = counted.copied() if saves else 0
    if saves:
        found.append(counted.saving())
    if checkpoint.weights is not WeightsExport.none:
        exporting = counted.exporting(EXPORTED_BYTES)
        found.append(replace(exporting, host=exporting.host + copied))
    return Met(tuple(found), copied if checkpoint.every is not None else 0)


def on_device(moment: MomentBytes, *, shared: bool) -> int:
    """The bytes of a moment in the memory that a rank computes in. shared: it is the host's."""
    return moment.device + moment.host * shared


def worst(moments: Sequence[MomentBytes], *, shared: bool) -> MomentBytes | None:
    """The moment with the most bytes there."""
    return max(moments, key=lambda one: on_device(one, shared=shared), default=None)
