"""Steps of checkpoint tests on ranks: train, save, load at another setting, continue; and damage to a file."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.models import TinySpec
from harness.oracle import ADAMW, LR, Case
from harness.trainee import backwards_of_step, build_runtime
from zero_runtime.checkpoint.load import CheckpointReader, load_checkpoint, shards_of
from zero_runtime.checkpoint.save import SaveSettings, save_checkpoint
from zero_runtime.optim.configs import OptimizerConfig
from zero_runtime.plan import OuterSharding
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import ZeroRuntime

SAVED_AFTER = 3  # steps
GOES_ON = 5


@dataclass(frozen=True)
class Setting:
    """Stage, world, precision and sizes: everything that a checkpoint must not depend on."""

    stage: int = 2
    world: int = 1
    precision: MixedPrecision = field(default_factory=MixedPrecision)
    shard_ranks: int | None = None
    unit_numel: int | None = None
    micro_batches: int = 2
    outer_sharding: OuterSharding | None = None

    def case(self, **changes: Any) -> Case:
        case = Case(self.world, self.micro_batches, precision=self.precision, shard_ranks=self.shard_ranks)
        return replace(case, outer_sharding=self.outer_sharding, **changes)

    def runtime(self, optimizer: OptimizerConfig = ADAMW, **changes: Any) -> ZeroRuntime:
        return build_runtime(self.case(**changes), self.stage, optimizer=optimizer, unit_numel=self.unit_numel)


def train(runtime: ZeroRuntime, case: Case, first: int, steps: int) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        backwards_of_step(runtime, case, step)
        losses.append(runtime.step(LR).loss)
    return losses


def whole(runtime: ZeroRuntime) -> dict[str, torch.Tensor]:
    """The full states of all parameters by `state/name`, which must be the same in two runs that are compared."""
    found = {}
    for unit in runtime.units:
        with runtime.resident(unit):
            for state, shard in shards_of(runtime, unit).items():
                values = shard if isinstance(shard, torch.Tensor) else shard.values()
                found |= {f"{state}/{name}": full.clone() for name, full in unit.full_of(values).items()}
    return found


def save_after(
    root: Path,
    setting: Setting,
    optimizer: OptimizerConfig = ADAMW,
    settings: SaveSettings | None = None,
    **changes: Any,
) -> tuple[Path, dict[str, torch.Tensor]]:
    """Train and save. Returns the checkpoint's folder and the full states at that moment."""
    runtime = setting.runtime(optimizer, **changes)
    train(runtime, setting.case(**changes), 0, SAVED_AFTER)
    path = save_checkpoint(runtime, root, step=SAVED_AFTER, trainer={"samples": 96}, settings=settings)
    states = whole(runtime)
    runtime.close()
    return path, states


def load_into(
    path: Path, setting: Setting, optimizer: OptimizerConfig = ADAMW, **changes: Any
) -> tuple[ZeroRuntime, dict[str, Any]]:
    """A runtime with other initial values, filled from the checkpoint; and the trainer state that was saved."""
    model = replace(changes.pop("model", TinySpec()), seed=77)
    runtime = setting.runtime(optimizer, model=model, **changes)
    return runtime, load_checkpoint(runtime, CheckpointReader.open(path, verify=False))


def assert_states(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Equal bits, after rounding `wanted` to the dtypes of `found` (which may have a 16-bit master)."""
    assert found.keys() == wanted.keys()
    for key, values in wanted.items():
        assert torch.equal(found[key], values.to(found[key].dtype)), key


def draw() -> tuple[float, float, float]:
    """One number from each generator: torch's, numpy's and Python's."""
    return float(torch.rand(())), float(np.random.rand()), random.random()


def flip_a_bit(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)
