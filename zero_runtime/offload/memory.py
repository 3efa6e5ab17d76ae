"""Bytes of host memory and disk space that offload uses on a rank, by the arithmetic that the tiers allocate by.

Standard library only, like state_bytes.py, which computes the bytes that stay on the device. Every host tensor and
slot starts on a separate page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zero_runtime.offload_plan import ALIGN_BYTES, OffloadBytes, aligned
from zero_runtime.precision import ITEMSIZE_BYTES, MixedPrecision
from zero_runtime.state_bytes import UnitSize


def buffer_bytes(size: int) -> int:
    """Bytes to allocate for a page-aligned buffer of `size` bytes, wherever the allocation begins."""
    return aligned(size) + ALIGN_BYTES


@dataclass(frozen=True)
class Moves:
    """Settings that determine shard sizes and how many units are in transfer together. state_bytes: bytes per element
    of each of the optimizer's tensors. params_in_file: with a scratch file, offloaded parameters are stored in the
    file, not in host memory."""

    shard_count: int
    prefetch: int
    micro_batches: int = 1
    state_bytes: tuple[float, ...] = (4, 4)
    ahead: int = 1
    params_in_file: bool = True


Units = Iterable[tuple[UnitSize, MixedPrecision]]


def host_bytes(units: Units, moves: Moves) -> OffloadBytes:
    """Bytes if offloaded states are stored in host memory, separate from the device's memory."""
    params = grads = optimizer = staging = 0
    for size, kind in units:
        shard = size.padded_numel // moves.shard_count
        param = buffer_bytes(int(shard * kind.stored_bytes)) if size.params_offloaded else 0
        params += param
        if not (size.trainable and size.optimizer_offloaded):
            continue
        states = sum(buffer_bytes(round(shard * each)) for each in moves.state_bytes)
        if kind.master != kind.param or not size.params_offloaded:
            states += buffer_bytes(shard * ITEMSIZE_BYTES[kind.master])
        optimizer += states
        grads += buffer_bytes(shard * ITEMSIZE_BYTES[kind.grad(moves.micro_batches)])
        if kind.master != kind.param and not size.params_offloaded:
            staging += buffer_bytes(shard * ITEMSIZE_BYTES[kind.param])
    return OffloadBytes(params, grads, optimizer, staging)


def nvme_bytes(units: Units, moves: Moves, *, stepped: bool = True) -> OffloadBytes:
    """Bytes if offloaded states are stored in a scratch file: the file, and the slots for a step and for gathers ahead.
    With a device that has separate memory also the host copies of gradients and of new parameters.

    stepped: False before the first step, when one slot has been enough."""
    records, param_parts = [], []
    params = grads = updated = staging = scratch = 0
    for size, kind in units:
        shard = size.padded_numel // moves.shard_count
        offloaded = size.trainable and size.optimizer_offloaded
        param = aligned(int(shard * kind.stored_bytes)) if size.params_offloaded else 0
        in_file = param if moves.params_in_file else 0
        record = in_file + (_record(shard, size, kind, moves.state_bytes) if offloaded else 0)
        records.append(record)
        param_parts.append(in_file)
        updated += offloaded
        scratch += record
        params += buffer_bytes(param) if param and not in_file else 0
        if offloaded and size.separate_memory:
            grads += buffer_bytes(shard * ITEMSIZE_BYTES[kind.grad(moves.micro_batches)])
        if offloaded and size.separate_memory and not param:
            staging += buffer_bytes(shard * ITEMSIZE_BYTES[kind.param])
    if any(records):
        slots = max(min(updated, 2 * moves.ahead + 1), 1) if stepped else 1
        staging += slots * buffer_bytes(max(records))
    if (
        any(param_parts) and stepped
    ):  # the unit in use, those gathered ahead, and one whose read starts before its gather
        staging += min(sum(map(bool, param_parts)), moves.prefetch + 2) * buffer_bytes(max(param_parts))
    return OffloadBytes(params, grads, staging=staging, scratch=scratch)


def largest_read(unit: tuple[UnitSize, MixedPrecision], moves: Moves, numel: int, block_bytes: int) -> int:
    """Bytes while one tensor's `numel` elements after another are read from a unit's record to be written elsewhere: a
    copy, the one before it, and the buffer of complete blocks that it is taken from (`Slots.read_range`). The most of
    all tensors; 0 without a record."""
    size, kind = unit
    shard = size.padded_numel // moves.shard_count
    stored = aligned(int(shard * kind.stored_bytes)) if size.params_offloaded and moves.params_in_file else 0
    offloaded = size.trainable and size.optimizer_offloaded
    states = _record(shard, size, kind, moves.state_bytes) if offloaded else 0
    widest = max((*moves.state_bytes, ITEMSIZE_BYTES[kind.master]))
    reads = [(states, round(numel * widest)), (stored, int(numel * kind.stored_bytes))]
    return max(_read(part, nbytes, block_bytes) for part, nbytes in reads)


def _read(part: int, nbytes: int, block_bytes: int) -> int:
    """Bytes to read twice `nbytes`, which begin anywhere in a part of a record."""
    blocks = (-(-nbytes // block_bytes) + 1) * block_bytes
    return buffer_bytes(min(part, blocks)) + 2 * nbytes if part else 0


def _record(shard: int, size: UnitSize, kind: MixedPrecision, state_bytes: Sequence[float]) -> int:
    is_param = kind.master == kind.param and (size.params_offloaded or not size.separate_memory)
    master = 0 if is_param else aligned(shard * ITEMSIZE_BYTES[kind.master])
    return master + sum(aligned(round(shard * each)) for each in state_bytes)
