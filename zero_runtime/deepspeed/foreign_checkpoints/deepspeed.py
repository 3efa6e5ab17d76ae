"""Reads checkpoints that DeepSpeed's engine.save_checkpoint wrote at ZeRO stages 1, 2 and 3, tensor parallelism 1.

[Note: where a parameter lies]
Stages 1 and 2: each rank holds, for each parameter group, a flat part of the masters; `param_slice_mappings` describes
which elements are where in it. A parameter may continue from one rank's part into the next, in the order of ranks.
Stage 3: each parameter is cut into world equal parts, the last one padded; a rank's parts of all parameters are
concatenated in its flat tensors, group after group, in the order of `param_shapes`.
The moments have the layout of the masters. Frozen parameters are in the model's files: in full at stages 1 and 2, cut
like the others at stage 3.

[Note: no code from a checkpoint]
The files are pickles, opened with torch's `weights_only`. DeepSpeed's classes are never imported: a stand-in class of
ours replaces them. Any other class is an error.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zero_runtime.checkpoint.files import opened, read_small_file
from zero_runtime.checkpoint.layout import MASTER
from zero_runtime.deepspeed.foreign_checkpoints.source import Chunk, ForeignCheckpoint, of_tensor
from zero_runtime.errors import CheckpointError, brief

LATEST = "latest"
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_WEIGHTS_INSTEAD = "make a folder of weights of it with its own zero_to_fp32.py, and give that as model.path"


class StandIn:
    """Replaces an instance of a class of DeepSpeed's; has the attributes that the pickle gives it."""

    def __new__(cls, *_arguments: Any) -> StandIn:
        return super().__new__(cls)


def foreign_reader(path: Path) -> Callable[[], ForeignCheckpoint] | None:
    """A function that opens another library's checkpoint in a folder; None for any other folder."""
    return partial(open_deepspeed, path) if is_deepspeed(path) else None


def is_deepspeed(path: Path) -> bool:
    """Whether a folder is a DeepSpeed checkpoint, or a folder of several with a file `latest`."""
    return (path / LATEST).is_file() or any(path.glob("*_optim_states.pt"))


def open_deepspeed(path: str | Path) -> ForeignCheckpoint:
    """Open a checkpoint, or the one that `latest` names. Maps the files into memory and reads little of them.

    CheckpointError if files are missing, or have the layout of another kind or release.
    """
    folder = _folder_of(Path(path))
    try:
        return _open(folder, _optimizer_files(folder))
    except CheckpointError:
        raise
    except Exception as error:  # files of another layout, and damaged ones, may hold any objects
        told = f"{type(error).__name__}: {error}"
        raise _bad(folder, "the layout of DeepSpeed 0.10 or later", told, _WEIGHTS_INSTEAD) from error


def _open(folder: Path, files: Sequence[Path]) -> ForeignCheckpoint:
    optimizer = [_load(file)["optimizer_state_dict"] for file in files]
    stage = 3 if "fp32_flat_groups" in optimizer[0] else 2
    world = len(optimizer)
    partitions = optimizer[0].get("partition_count")
    count = partitions[0] if isinstance(partitions, Sequence) else partitions
    if count != world:
        raise _bad(folder, f"the files of {count} ranks", str(world), "copy the whole folder")
    read = _stage3 if stage == 3 else _stages1_and_2
    model_files = _model_files(folder, stage, world)
    model = [_load(file) for file in model_files]
    parameters = {name: tuple(shape) for group in model[0]["param_shapes"] for name, shape in group.items()}
    chunks = read(folder, optimizer, parameters, model[0]["param_shapes"])
    for name, shape, found in _frozen(model, stage):
        parameters[name] = shape
        chunks[MASTER][name] = found
    return ForeignCheckpoint(
        path=folder,
        kind=f"DeepSpeed ZeRO stage {3 if stage == 3 else '1 or 2'}, {world} ranks",
        updates=_updates(optimizer[0], model[0]),
        parameters=parameters,
        chunks=chunks,
        tied=dict(model[0].get("shared_params") or {}),
        buffers={name: model[0]["module"][name] for name in model[0].get("buffer_names") or ()},
        archives=(*files, *model_files),
    )


def _folder_of(path: Path) -> Path:
    latest = path / LATEST
    if not latest.is_file():
        return path
    tag = read_small_file(latest).decode("utf-8", errors="replace").strip()
    if not tag or "\0" in tag or Path(tag).name != tag or not os.path.isdir(path / tag):
        raise _bad(path, f"the folder {brief(tag)!r} that {LATEST} names", "none", "give the folder of a checkpoint")
    return path / tag


def _optimizer_files(folder: Path) -> list[Path]:
    found: dict[int, Path] = {}
    for file in folder.glob("*_optim_states.pt"):
        match = _OPTIMIZER.fullmatch(file.name)
        if match is None or int(match[2]) != 0:
            raise _bad(folder, "ranks of data parallelism alone", file.name, _WEIGHTS_INSTEAD)
        found[int(match[1])] = file
    if sorted(found) != list(range(len(found))) or not found:
        raise _bad(folder, "*_optim_states.pt of every rank", f"those of {sorted(found)}", "copy the whole folder")
    return [found[rank] for rank in sorted(found)]


def _model_files(folder: Path, stage: int, world: int) -> list[Path]:
    if stage == 3:
        return [folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(world)]
    return [folder / "mp_rank_00_model_states.pt"]


# ---- where parameters lie; see the note at the top ------------------------------------------------------------------


def _stages1_and_2(
    folder: Path, ranks: Sequence[Mapping[str, Any]], parameters: Mapping[str, tuple[int, ...]], _groups: object
) -> dict[str, dict[str, list[Chunk]]]:
    chunks: dict[str, dict[str, list[Chunk]]] = {}
    reached = dict.fromkeys(parameters, 0)
    for rank in ranks:
        states = rank["base_optimizer_state"]["state"]
        for group, mapping in enumerate(rank["param_slice_mappings"]):
            flat = {MASTER: rank["single_partition_of_fp32_groups"][group], **_tensors(states.get(group, {}))}
            for name, address in mapping.items():
                # A rank's part of a parameter continues where the part of the rank before it ended.
                start = reached[name]
                reached[name] = stop = start + address.numel
                for state, values in flat.items():
                    chunk = of_tensor(values, start, stop, address.start)
                    chunks.setdefault(state, {}).setdefault(name, []).append(chunk)
    for name, end in reached.items():
        if end != math.prod(parameters[name]):
            raise _bad(folder, f"all of {name}", f"{end} elements", "copy the whole folder")
    return chunks


def _stage3(
    folder: Path,
    ranks: Sequence[Mapping[str, Any]],
    parameters: Mapping[str, tuple[int, ...]],
    groups: Sequence[Mapping[str, Any]],
) -> dict[str, dict[str, list[Chunk]]]:
    chunks: dict[str, dict[str, list[Chunk]]] = {}
    for rank, held in enumerate(ranks):
        states = held["optimizer_state_dict"]["state"]
        flats = [
            {MASTER: master, **_tensors(states.get(place, {}))} for place, master in enumerate(held["fp32_flat_groups"])
        ]
        place = offset = 0
        for name in (name for group in groups for name in group):
            numel = math.prod(parameters[name])
            part = -(-numel // len(ranks))  # rounded up: the last rank's part may have padding
            # The flat tensor of this group is used up: the parameter is in the next group.
            while offset == flats[place][MASTER].numel() and part:
                place, offset = place + 1, 0
            start, stop = min(rank * part, numel), min((rank + 1) * part, numel)
            if offset + part > flats[place][MASTER].numel():
                raise _bad(folder, f"{part} elements of {name} on rank {rank}", "fewer", "copy the whole folder")
            for state, flat in flats[place].items():
                chunk = of_tensor(flat, start, stop, offset)
                chunks.setdefault(state, {}).setdefault(name, []).append(chunk)
            offset += part
    return chunks


def _frozen(model: Sequence[Mapping[str, Any]], stage: int) -> Iterator[tuple[str, tuple[int, ...], list[Chunk]]]:
    """Frozen parameters: stage 3 lists them; else the module's tensors in no group that are not shared or buffers."""
    if stage == 3:
        for name, shape in (model[0].get("frozen_param_shapes") or {}).items():
            numel = math.prod(shape)
            part = -(-numel // len(model))
            flats = [rank["frozen_param_fragments"][name].reshape(-1) for rank in model]
            ends = [(min(place * part, numel), min((place + 1) * part, numel)) for place in range(len(flats))]
            yield name, tuple(shape), [of_tensor(flat, *end) for flat, end in zip(flats, ends, strict=True)]
        return
    trained = {name for group in model[0]["param_shapes"] for name in group}
    others = {*trained, *(model[0].get("shared_params") or ()), *(model[0].get("buffer_names") or ())}
    for name, values in model[0]["module"].items():
        if name not in others and isinstance(values, torch.Tensor):
            yield name, tuple(values.shape), [of_tensor(values.reshape(-1), 0, values.numel())]


def _tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor) and value.dim() == 1}


def _updates(optimizer: Mapping[str, Any], model: Mapping[str, Any]) -> int:
    """The optimizer's own count, from a state or a group; if it has none, the engine's steps minus the skipped ones."""
    inner = optimizer.get("base_optimizer_state") or optimizer.get("optimizer_state_dict") or {}
    states = list(inner.get("state", {}).values())
    for place in (*states, *inner.get("param_groups", ())):
        if "step" in place:
            return int(place["step"])
    return int(model["global_steps"]) - int(model.get("skipped_steps", 0))


# ---- files -----------------------------------------------------------------------------------------------------------


def _load(file: Path) -> dict[str, Any]:
    """Load a DeepSpeed file, mapped into memory; DeepSpeed's classes become stand-ins, others are refused."""
    with opened(file):  # raises for a pipe, on which torch would block
        pass
    try:
        found = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        plain: list[Any] = [(StandIn, name) for name in found if name.startswith("deepspeed.")]
        with torch.serialization.safe_globals(plain):
            return dict(torch.load(file, map_location="cpu", mmap=True, weights_only=True))
    except Exception as error:  # a damaged pickle may raise any error
        told = " ".join(str(error).split())[:200] or type(error).__name__
        raise _bad(file, "a file that torch reads without running code", told, _WEIGHTS_INSTEAD) from error


def _bad(path: Path, expected: str, found: str, advice: str) -> CheckpointError:
    return CheckpointError(f"{path}: expected {expected}, found {found}; {advice}")
