"""Predicts the memory of points before they run, by zero_runtime's own memory model.

The units' shapes come from a short child process, which imports torch, and are kept in the user's cache by what
decides them, so that the next command with the same model needs no child.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from orchestrator import hardware
from orchestrator.cluster import ClusterKind
from orchestrator.deciding import Prediction
from orchestrator.folders import CONF
from orchestrator.point import Point
from orchestrator.record import read_json, write_json_atomic
from orchestrator.schema import AdapterKind, Device, RunConfig, to_dict
from orchestrator.state_groups import Place
from zero_runtime.flat_layout import FlatLayout
from zero_runtime.memory_model import UnitSize, step_peak_bytes
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision

# What decides a model's units and the optimizer's states. Anything else only decides what is made of them.
DECIDING = ("model", "adapter", "optimizer", "precision")
CHILD_S = 120.0
# What answers depend on beside the question: a newer library may know a key, or count an optimizer's bytes otherwise.
MADE_BY = ("worker/shapes.py", "worker/setup.py", "workloads/models.py", "workloads/adapters.py")
LIBRARIES = ("torch", "transformers", "peft")


def predict(points: Sequence[Point]) -> dict[str, Prediction]:
    """By label; a point whose model the child could not build has none, and its run will say why."""
    shapes = _shapes([point.config for point in points])
    found = {}
    for point in points:
        units = shapes.get(_key(point.config))
        if units is not None:
            found[point.label] = _prediction(point.config, units)
    return found


def states_bytes(config: RunConfig) -> int | None:
    """Model states of one rank; None where the model cannot be built."""
    units = _shapes([config]).get(_key(config))
    return None if units is None else _prediction(config, units).states_bytes


def problems(points: Sequence[Point]) -> dict[str, str]:
    """By label, what is wrong with a model that cannot be built, in the words of the job that would try.

    Models that ship are known to be right, so that for them alone no child is asked.
    """
    if all(_ships(point.config) for point in points):
        return {}
    answers = _answers([point.config for point in points])
    told = {point.label: answers.get(_key(point.config), {}).get("problem") for point in points}
    return {label: text for label, text in told.items() if text is not None}


def _ships(config: RunConfig) -> bool:
    """Whether the model is an unchanged one of conf/, without adapters."""
    return config.adapter.kind is AdapterKind.none and to_dict(config)["model"] in _shipped_models()


@functools.cache
def _shipped_models() -> list[Any]:
    return [yaml.safe_load(file.read_text(encoding="utf-8")) for file in (CONF / "model").glob("*.yaml")]


def _prediction(config: RunConfig, shapes: dict[str, Any]) -> Prediction:
    ranks, on_cuda = config.resources.ranks or 1, config.resources.device is Device.cuda
    plan = ZeroPlan.from_stage(config.zero.stage, shard_ranks=config.zero.shard_ranks)
    away = (Place.cpu, Place.nvme) if on_cuda else (Place.nvme,)
    units = []
    for unit in shapes["units"]:
        layout = FlatLayout.build(
            [(name, tuple(shape)) for name, shape in unit["shapes"]],
            shard_count=plan.shard_count(ranks),
            world=ranks,
            block_numel=shapes["block_numel"] if unit["trainable"] else 1,
        )
        size = UnitSize.of(
            layout,
            trainable=unit["trainable"],
            is_root=unit["is_root"],
            params_rest=unit["rests"] and config.offload.params in away,
            optimizer_rests=unit["rests"] and config.offload.optimizer in away,
            apart=on_cuda,
        )
        units.append((size, MixedPrecision(**unit["precision"])))
    peak = step_peak_bytes(
        plan,
        units,
        world=ranks,
        prefetch=config.zero.prefetch,
        micro_batches=config.batch.accumulation or 1,
        state_bytes=shapes["state_bytes"],
    )
    if config.cluster.kind is ClusterKind.slurm:
        return Prediction(peak.states, None)  # nobody here knows the memory of a node's GPU
    if on_cuda:
        sizes = [gpu.memory_bytes for gpu in hardware.visible_gpus() if gpu.memory_bytes is not None]
        return Prediction(peak.states, min(sizes, default=None))
    return Prediction(peak.states, hardware.memory_bytes(), ranks_share=ranks)


def _key(config: RunConfig) -> str:
    plain = to_dict(config)
    parts = {name: plain[name] for name in DECIDING}
    parts |= {"unit_numel": config.zero.unit_numel, "ratio": config.offload.ratio}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _shapes(configs: Sequence[RunConfig]) -> dict[str, dict[str, Any]]:
    """The units of each distinct model that can be built."""
    return {key: answer for key, answer in _answers(configs).items() if "units" in answer}


def _answers(configs: Sequence[RunConfig]) -> dict[str, dict[str, Any]]:
    """The units of each distinct model, or the problem that it has; from the cache or from the child."""
    wanted = {_key(config): config for config in configs}
    folder = cache_folder()
    found = {key: stored for key in wanted if (stored := read_json(folder / f"{key}.json")) is not None}
    missing = [key for key in wanted if key not in found]
    if missing:
        for key, answer in zip(missing, _ask_child([wanted[key] for key in missing]), strict=False):
            if answer is not None:
                write_json_atomic(folder / f"{key}.json", answer)
                found[key] = answer
    return found


def cache_folder() -> Path:
    """The user's alone, and of this version of the code that makes what lies there."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    source = b"".join((Path(__file__).parent / name).read_bytes() for name in MADE_BY)
    versions = " ".join(map(_version, LIBRARIES))
    folder = Path(base) / "zero-lab" / f"shapes-{hashlib.sha256(source + versions.encode()).hexdigest()[:8]}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _ask_child(configs: Sequence[RunConfig]) -> list[dict[str, Any] | None]:
    """One answer a configuration; None where the child does not know, nothing at all where it failed."""
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), root]))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "orchestrator.worker.shapes"],
            input=json.dumps([to_dict(config) for config in configs]),
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=CHILD_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    answers: list[dict[str, Any] | None] = json.loads(done.stdout)
    return answers
