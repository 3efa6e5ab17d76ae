"""Saves the live weights of a runtime as a Hugging Face folder, without a checkpoint in between."""

from __future__ import annotations

from pathlib import Path

import torch

from zero_runtime.agreement import agree, trouble_of
from zero_runtime.checkpoint.hugging_face.folder import MODEL, FolderWriter
from zero_runtime.errors import CheckpointError
from zero_runtime.runtime import ZeroRuntime


def save_gathered_weights(
    runtime: ZeroRuntime,
    out: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    stem: str = MODEL,
) -> None:
    """Gather unit by unit; rank 0 writes all weights (the masters, rounded to `dtype`). Every rank calls it,
    outside of backwards.

    Memory: one unit in the master's dtype on every rank. CheckpointError, the same on every rank, if `out` exists or
    cannot be written; after a failed write the ranks still gather all units, since the others cannot know of it.
    """
    runtime.check_weights("save_gathered_weights")
    collectives = runtime.collectives
    shapes = {name: shape for unit in runtime.units for name, shape in unit.full_shapes.items()}
    writer: FolderWriter | None = None

    def begin() -> None:
        nonlocal writer
        if collectives.rank == 0:
            writer = FolderWriter(out, shapes, dtype, stem)

    def write_all() -> None:
        trouble: CheckpointError | None = None
        for unit in runtime.units:
            whole: dict[str, torch.Tensor] = {}  # frees the last unit before this one is gathered
            with runtime.resident(unit):
                whole = unit.full_of(unit.weights_shard)
            if writer is None or trouble is not None:
                continue  # this rank writes nothing, but takes part in the gather of every unit
            try:
                for segment in unit.layout.segments:
                    writer.put(whole[segment.name].reshape(-1))
            except CheckpointError as error:
                trouble = error
        if trouble is not None:
            raise trouble
        if writer is not None:
            writer.commit()

    agree(collectives, trouble_of(begin))
    agree(collectives, trouble_of(write_all))
