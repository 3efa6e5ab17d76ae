"""Bytes of the host's memory and of the drive that offload takes on a rank; the arithmetic that the tiers allocate by.

Standard library only, like memory/model.py, which tells what is left on the device. Every tensor and slot of the host
begins a page of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zero_runtime.memory.model import UnitSize
from zero_runtime.precision import ITEMSIZE_BYTES, MixedPrecision

ALIGN_BYTES = 4096  # what direct I/O asks of offsets, sizes and addresses on every common file system


def aligned(size: int) -> int:
    """The next multiple of ALIGN_BYTES."""
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


def buffer_bytes(size: int) -> int:
    """What a buffer of whole pages takes, wherever its memory happens to begin."""
    return aligned(size) + ALIGN_BYTES


@dataclass(frozen=True)
class OffloadBytes:
    """Of one rank. params, grads, optimizer: what rests in the host's memory. staging: what is there besides, for moves
    and for what a speculative step may have to forget. scratch: of the file; 0 where there is none."""

    params: int = 0
    grads: int = 0
    optimizer: int = 0
    staging: int = 0
    scratch: int = 0

    @property
    def host(self) -> int:
        """All of it that is memory."""
        return self.params + self.grads + self.optimizer + self.staging


@dataclass(frozen=True)
class Moves:
    """What decides how much is under way at once. state_bytes: an element of each of the optimizer's tensors.
    params_in_file: where there is a scratch file, parameters that rest do so in it, and not in the host's memory."""

    shard_count: int
    prefetch: int
    micro_batches: int = 1
    state_bytes: tuple[float, ...] = (4, 4)
    ahead: int = 1
    speculative: bool = False
    params_in_file: bool = True


Units = Iterable[tuple[UnitSize, MixedPrecision]]


def host_bytes(units: Units, moves: Moves) -> OffloadBytes:
    """Where what rests does so in the host's memory, apart from the device's."""
    params = grads = optimizer = staging = 0
    for size, kind in units:
        shard = size.padded_numel // moves.shard_count
        param = buffer_bytes(shard * ITEMSIZE_BYTES[kind.param]) if size.params_rest else 0
        params += param
        if not (size.trainable and size.optimizer_rests):
            continue
        states = sum(buffer_bytes(round(shard * each)) for each in moves.state_bytes)
        if kind.master != kind.param or not size.params_rest:
            states += buffer_bytes(shard * ITEMSIZE_BYTES[kind.master])
        optimizer += states
        grads += buffer_bytes(shard * ITEMSIZE_BYTES[kind.grad(moves.micro_batches)])
        if kind.master != kind.param and not size.params_rest:
            staging += buffer_bytes(shard * ITEMSIZE_BYTES[kind.param])
        staging += (states + param) * moves.speculative
    return OffloadBytes(params, grads, optimizer, staging)


def nvme_bytes(units: Units, moves: Moves) -> OffloadBytes:
    """Where it rests in a scratch file: the file, and the slots of a step and of gathers ahead. Beside a device of its
    own, also what crosses: gradients, and new parameters on their way up."""
    records, param_parts = [], []
    params = grads = updated = staging = scratch = 0
    for size, kind in units:
        shard = size.padded_numel // moves.shard_count
        rests = size.trainable and size.optimizer_rests
        param = aligned(shard * ITEMSIZE_BYTES[kind.param]) if size.params_rest else 0
        in_file = param if moves.params_in_file else 0
        record = in_file + (_record(shard, size, kind, moves.state_bytes) if rests else 0)
        records.append(record)
        param_parts.append(in_file)
        updated += rests
        scratch += record * (2 if rests and moves.speculative else 1)
        params += buffer_bytes(param) if param and not in_file else 0
        if rests and size.apart:
            grads += buffer_bytes(shard * ITEMSIZE_BYTES[kind.grad(moves.micro_batches)])
        if rests and not in_file and (moves.speculative or (size.apart and not param)):
            staging += buffer_bytes(shard * ITEMSIZE_BYTES[kind.param])
    if any(records):
        staging += max(min(updated, 2 * moves.ahead + 1), 1) * buffer_bytes(max(records))
    if any(param_parts):  # the unit in use, those that are gathered ahead, and one that sets out before its gather
        staging += min(sum(map(bool, param_parts)), moves.prefetch + 2) * buffer_bytes(max(param_parts))
    return OffloadBytes(params, grads, staging=staging, scratch=scratch)


def _record(shard: int, size: UnitSize, kind: MixedPrecision, state_bytes: Sequence[float]) -> int:
    is_param = kind.master == kind.param and (size.params_rest or not size.apart)
    master = 0 if is_param else aligned(shard * ITEMSIZE_BYTES[kind.master])
    return master + sum(aligned(round(shard * each)) for each in state_bytes)
