"""Writes a small checkpoint in the format of torch.distributed.checkpoint, and reads all of a foreign checkpoint."""

from __future__ import annotations

import math
import pickle
from pathlib import Path

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from zero_runtime.deepspeed.foreign_checkpoints.dcp import METADATA
from zero_runtime.deepspeed.foreign_checkpoints.source import ForeignCheckpoint

DATA = "__0_0.distcp"
NAMES = ["weight", "bias"]
SAVED = {"model.weight": torch.arange(12.0).view(4, 3), "model.bias": torch.arange(4.0)}
SAVED |= {"optim.state.weight.step": torch.tensor(3.0), "optim.state.weight.exp_avg": torch.ones(4, 3)}


def write_dcp(folder: Path) -> Path:
    """Creates the folder, writes the checkpoint into it, all data in one file, and returns the folder."""
    folder.mkdir()
    entries, places, data = {}, {}, b""
    for key, values in SAVED.items():
        chunk = dcp.ChunkStorageMetadata(torch.Size([0] * values.dim()), values.shape)
        entries[key] = dcp.TensorStorageMetadata(dcp.TensorProperties(), values.shape, [chunk])
        torch.save(values, folder / "one")
        one = (folder / "one").read_bytes()
        places[dcp.MetadataIndex(key, chunk.offsets, 0)] = _StorageInfo(DATA, len(data), len(one))
        data += one
    (folder / "one").unlink()
    (folder / DATA).write_bytes(data)
    (folder / METADATA).write_bytes(pickle.dumps(dcp.Metadata(entries, storage_data=places)))
    return folder


def read_all(found: ForeignCheckpoint) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint, flattened, by `state/parameter`."""
    found.verify()
    sources = {state: found.source(state) for state in found.chunks}
    return {
        f"{state}/{name}": source.read(name, 0, math.prod(found.parameters[name].shape))
        for state, source in sources.items()
        for name in source.names()
    }
