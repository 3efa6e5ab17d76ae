"""DeepSpeed's `utils.zero_to_fp32`: the full fp32 weights of a checkpoint, without an engine and without ranks.

It takes checkpoints of `engine.save_checkpoint` and those of DeepSpeed itself (stages 1 to 3). As a command:
`python -m zero_runtime.deepspeed.utils.zero_to_fp32 CHECKPOINT OUT [--tag TAG]`.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from zero_runtime.checkpoint.hugging_face.folder import write_weights
from zero_runtime.checkpoint.layout import MASTER
from zero_runtime.checkpoint.load import CheckpointReader
from zero_runtime.checkpoint.retention import committed
from zero_runtime.deepspeed.engine_checkpoint import folder_of
from zero_runtime.deepspeed.foreign_checkpoints.deepspeed import is_deepspeed, open_deepspeed
from zero_runtime.deepspeed.live_engines import owned
from zero_runtime.errors import CheckpointError, some
from zero_runtime.tensor_source import TensorSource

M = TypeVar("M", bound=nn.Module)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, torch.Tensor]:
    """The state dict: fp32 parameters on the CPU, also under the names that are tied to them, and buffers.

    checkpoint_dir: what save_checkpoint was given, whose newest checkpoint is read, or a folder inside it.
    CheckpointError if there is none, or for `exclude_frozen_parameters`. `lazy_mode` has no effect.
    """
    with _opened(checkpoint_dir, tag, exclude_frozen_parameters) as found:
        state = {name: _whole(found.weights, name) for name in found.weights.names()}
        state |= {name: buffer.clone() for name, buffer in found.buffers.items()}
        return state | {name: state[first] for name, first in found.tied.items() if first in state}


def load_state_dict_from_zero_checkpoint(model: M, checkpoint_dir: str | Path, tag: str | None = None) -> M:
    """Move the model to the CPU and give it the checkpoint's weights. Returns the model.

    The model of an engine stays where it is, and trains on from these weights; every rank calls it, between steps, and
    what GatheredParameters shows meanwhile stays as it is. CheckpointError if a parameter of the model is not in the
    checkpoint, or the reverse.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    own = dict(model.named_parameters())
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)} | dict(model.named_buffers()).keys()
    wrong = sorted((own.keys() - state.keys()) | (state.keys() - known))
    if wrong:
        raise CheckpointError(
            f"{checkpoint_dir}: expected the parameters of {type(model).__name__}, differing: {some(wrong)}"
        )
    runtime = next((found.runtime for found in map(owned, own.values()) if found is not None), None)
    if runtime is None or runtime.model is not model:
        model.cpu().load_state_dict(state, strict=False)
        return model
    runtime.check_between_steps("load_state_dict_from_zero_checkpoint")
    with runtime.full_params(write=True) as values:
        for name, value in values.items():
            value.copy_(state[name].view(value.shape))
    for name, buffer in model.named_buffers():
        buffer.copy_(state.get(name, buffer))
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | int = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the fp32 state dict into `output_dir`, as DeepSpeed does: pytorch_model.bin, which torch.load reads.

    With `safe_serialization` the parameters alone, as safetensors of at most 5 GB, in little memory; the folder must be
    new. `max_shard_size` has no effect.
    """
    if safe_serialization:
        with _opened(checkpoint_dir, tag, exclude_frozen_parameters) as found:
            write_weights(found.weights, output_dir, dtype=torch.float32)
        return
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    out = Path(output_dir) / "pytorch_model.bin"
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    torch.save(state, partial)
    partial.replace(out)  # several ranks may write it


class _Found(NamedTuple):
    weights: TensorSource
    buffers: Mapping[str, torch.Tensor]
    tied: Mapping[str, str]


@contextmanager
def _opened(folder: str | Path, tag: str | None, excludes: bool) -> Iterator[_Found]:
    if excludes:
        raise CheckpointError(f"{folder}: expected exclude_frozen_parameters=False: save without them instead")
    root = folder_of("load_checkpoint", folder, tag)
    if is_deepspeed(root):
        foreign = open_deepspeed(root)
        yield _Found(foreign.source(MASTER), foreign.buffers, foreign.tied)
        return
    with CheckpointReader.open(_newest_in(root)) as found:
        yield _Found(found.state(MASTER), found.buffers(), found.index.tied)


def _newest_in(root: Path) -> Path:
    """The newest checkpoint in a folder, in the newest of its tags, or the folder itself."""
    inside = [one for one in root.iterdir() if one.is_dir()] if root.is_dir() else []
    steps = committed(root) or _by_step(map(committed, inside))
    return steps[max(steps)] if steps else root


def _by_step(tags: Iterator[dict[int, Path]]) -> dict[int, Path]:
    return {step: path for steps in tags for step, path in steps.items()}


def _whole(source: TensorSource, name: str) -> torch.Tensor:
    shape = source.shape(name)
    return source.read(name, 0, math.prod(shape)).float().view(shape)


def main(words: Collection[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Write the full fp32 weights of a checkpoint.")
    parser.add_argument("checkpoint_dir")
    parser.add_argument("output_dir")
    parser.add_argument("-t", "--tag")
    parser.add_argument("--safe_serialization", action="store_true", help="safetensors in place of pytorch_model.bin")
    asked = parser.parse_args(None if words is None else list(words))
    convert_zero_checkpoint_to_fp32_state_dict(
        asked.checkpoint_dir, asked.output_dir, safe_serialization=asked.safe_serialization, tag=asked.tag
    )


if __name__ == "__main__":
    main()
