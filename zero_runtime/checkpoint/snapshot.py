"""The tensors that one rank writes into a checkpoint: its part of every state, as views of the runtime or as a copy."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from zero_runtime.checkpoint.compatibility import kept_buffers
from zero_runtime.checkpoint.layout import BUFFER, BufferEntry, Index, OptimizerEntry, ParameterEntry
from zero_runtime.checkpoint.load import shards_of
from zero_runtime.checkpoint.tensor_file import DTYPE_NAMES, LateValues
from zero_runtime.errors import CheckpointError
from zero_runtime.optim.configs import scale_name
from zero_runtime.optim.quantized_state import CodedShard
from zero_runtime.optim.sharded import ToldState
from zero_runtime.runtime import ZeroRuntime
from zero_runtime.unit import Unit
from zero_runtime.wings import PAGE_LOCKED, load

_PAGE_BYTES = 4096


class StatePart(NamedTuple):
    """Elements [start, stop) of one state of a flattened parameter; `values` is 1-D."""

    state: str
    name: str
    start: int
    stop: int
    values: torch.Tensor | LateValues


def parts_of(runtime: ZeroRuntime, members: Sequence[int], *, with_frozen: bool = True) -> list[StatePart]:
    """This rank's parts as views, widest dtype first, so that each part is aligned to its dtype in the file.

    `members`: the ranks that write to this rank's folder.
    """
    # Every byte once: ranks that hold the same shard (stage 0, hybrid sharding) write an equal range of it each, so all
    # write the same amount at every stage. With tensor parallelism this holds for the slices; replicated parameters are
    # written by the first rank of each group.
    collectives = runtime.collectives
    alike = [rank for rank in members if collectives.holds_shard_of(rank)]
    place, places = alike.index(collectives.rank), len(alike)
    found = []
    for unit in runtime.units:
        if not unit.trainable and not with_frozen:
            continue
        numel = unit.layout.shard_numel
        low, high = numel * place // places, numel * (place + 1) // places
        for state, shard in shards_of(runtime, unit).items():
            for piece in unit.parameters.pieces.values():
                # The overlap of this piece with the range [low, high) of the shard that this rank writes.
                begin = max(piece.shard_offset, low)
                end = min(piece.shard_offset + piece.numel, high)
                if begin < end and unit.slices.counts_here(piece.name):
                    split = unit.slices.splits.get(piece.name)
                    first = 0 if split is None else unit.slices.rank * split.local_numel
                    start = first + piece.start + begin - piece.shard_offset
                    values = _values(runtime, unit, state, shard, begin, end)
                    found.append(StatePart(state, piece.name, start, start + end - begin, values))
    if collectives.rank == members[0]:
        found += _buffers(runtime)
    return sorted(found, key=lambda part: -part.values.element_size())


def _values(
    runtime: ZeroRuntime, unit: Unit, state: str, shard: ToldState, begin: int, end: int
) -> torch.Tensor | LateValues:
    if unit.parameters.is_coded:  # read back when they are copied, one part at a time
        return LateValues(torch.float32, end - begin, lambda: unit.weights_shard[begin:end].cpu(), in_file=False)
    read = runtime.read_offloaded(unit, state)
    if not isinstance(shard, torch.Tensor):
        reads = (read, runtime.read_offloaded(unit, scale_name(state))) if isinstance(shard, CodedShard) else (read,)
        load = partial(shard.read, begin, end, *reads)
        return LateValues(shard.dtype, end - begin, lambda: load().cpu(), in_file=read is not None)
    if read is None:
        return shard[begin:end]
    return LateValues(shard.dtype, end - begin, partial(read, begin, end), in_file=True)


def _buffers(runtime: ZeroRuntime) -> Iterator[StatePart]:
    for name, buffer in kept_buffers(runtime.model).items():
        if buffer.dtype not in DTYPE_NAMES:
            raise CheckpointError(
                f"buffer {name}: expected a dtype of {', '.join(DTYPE_NAMES.values())}, found {buffer.dtype}; register "
                "it with persistent=False, or keep it in another dtype"
            )
        yield StatePart(BUFFER, name, 0, buffer.numel(), buffer.detach().contiguous().view(-1))


class Snapshot:
    """Host memory for one copy of a rank's parts, reused by every save; it is allocated again if the parts grow.

    It is page-locked if parts are on a GPU, until this object is no longer used.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._locked: Any = None  # a PageLocked of offload/copy_streams.py

    def copy(self, parts: Sequence[StatePart]) -> list[StatePart]:
        """The same parts, with their values copied into this memory. Blocks until the copies are complete."""
        sizes = [part.values.numel() * part.values.element_size() for part in parts]
        tensors = [part.values for part in parts if isinstance(part.values, torch.Tensor)]
        on_device = [values.device for values in tensors if values.is_cuda]
        if self._memory.numel() < sum(sizes):
            self._allocate(sum(sizes), on_device[0] if on_device else None)
        copies, offset = [], 0
        for part, size in zip(parts, sizes, strict=True):
            values = self._memory[offset : offset + size].view(part.values.dtype)
            found = part.values if isinstance(part.values, torch.Tensor) else part.values.cpu()
            values.copy_(found, non_blocking=True)
            copies.append(part._replace(values=values))
            offset += size
        if on_device:
            torch.cuda.synchronize(on_device[0])
        return copies

    def _allocate(self, nbytes: int, gpu: torch.device | None) -> None:
        """Replace the memory, whose copies have all been written."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        if self._locked is not None:
            self._locked.close()
        if gpu is None:
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
            self._memory[::_PAGE_BYTES].zero_()
            return
        if self._locked is None:
            self._locked = load(PAGE_LOCKED)(gpu, "checkpoint", "save in the foreground")
            weakref.finalize(self, self._locked.close).atexit = False  # a process that ends unlocks everything
        self._memory = self._locked.allocate(nbytes, torch.uint8)


def index_without_files(
    runtime: ZeroRuntime, step: int, trainer: dict, own: Sequence[dict], members: Sequence[int]
) -> Index:
    """The index without pieces and files. `own`: what each rank contributed, by rank; its counters and rng are used."""
    optimizer, scaler = runtime.optimizer, runtime.scaler
    parameters = {
        name: ParameterEntry(shape, dtype, unit.trainable, {}, unit.slices.splits.get(name))
        for unit in runtime.units
        for dtype in [DTYPE_NAMES[unit.weights_shard.dtype]]  # once a unit: for codes the weights are a new tensor
        for name, shape in unit.full_shapes.items()
    }
    counters: dict[str, float] = {}
    for one in own:
        counters |= one["counters"]
    return Index(
        step=step,
        world=runtime.collectives.world,
        ranks=tuple(members),
        parameters=parameters,
        buffers={
            name: BufferEntry(tuple(buffer.shape), DTYPE_NAMES[buffer.dtype], "")
            for name, buffer in kept_buffers(runtime.model).items()
            if buffer.dtype in DTYPE_NAMES
        },
        tied=_tied_names(runtime.model),
        files={},
        optimizer=OptimizerEntry(optimizer.config.saved_as, tuple(optimizer.state_names), counters),
        scaler={
            "moves": scaler.rule.static is None,
            "scale": scaler.scale,
            "hysteresis_left": scaler.hysteresis_left,
            "steps": scaler.steps,
            "last_overflow": scaler.last_overflow,
        },
        rng={str(rank): one["rng"] for rank, one in enumerate(own)},
        trainer=trainer,
    )


def _tied_names(model: nn.Module) -> dict[str, str]:
    """For each parameter with several names: a map from every further name to the first."""
    first: dict[int, str] = {}
    tied = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(param), name)
        if owner != name:
            tied[name] = owner
    return tied
