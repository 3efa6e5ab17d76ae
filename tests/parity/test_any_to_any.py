"""A checkpoint saved at any row, world and precision loads at any other, each rank reading only what it needs.

What is loaded is compared bit for bit with whole tensors that the saving run wrote down through another path, and a
loaded run with one that was set to the same values by hand, at the same target.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness.models import TinySpec
from harness.oracle import LR, Case
from harness.ranks import run_ranks
from harness.trainee import backwards_of_step, build_runtime

from zero_runtime.checkpoint.load import Checkpoint, load_checkpoint
from zero_runtime.checkpoint.save import save_checkpoint
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import ZeroRuntime

WORLDS, STAGES, DTYPES = (1, 2, 3, 4), (0, 1, 2, 3), ("fp32", "bf16")
MODEL = TinySpec(tied=True, frozen=True)
OTHER = replace(MODEL, seed=99)  # what a target starts from, so that nothing is right by chance
SAVED_STEPS, MORE_STEPS = 3, 5


@dataclass(frozen=True)
class Setting:
    """A row, a world and a precision; the number of micro-batches is 1, so all rows of a world have one result."""

    stage: int
    world: int
    dtype: str

    def runtime(self, model: TinySpec = MODEL) -> ZeroRuntime:
        return build_runtime(self.case(model), self.stage)

    def case(self, model: TinySpec = MODEL) -> Case:
        return Case(self.world, precision=MixedPrecision(self.dtype), model=model)

    def folder(self, root: Path) -> Path:
        return root / f"{self.dtype}-{self.world}-{self.stage}"


SETTINGS = [Setting(*values) for values in product(STAGES, WORLDS, DTYPES)]


def whole(runtime: ZeroRuntime) -> dict[str, torch.Tensor]:
    """Every whole state by `state/name`."""
    with runtime.full_params() as params:
        found = {f"master/{name}": value for name, value in params.items()}
    for unit in runtime.units:
        for segment in unit.layout.segments:
            states = runtime.full_optimizer_state(segment.name) if unit.trainable else {}
            found |= {f"{state}/{segment.name}": value for state, value in states.items()}
    return found


def train(runtime: ZeroRuntime, setting: Setting, steps: range) -> list[float]:
    losses = []
    for step in steps:
        backwards_of_step(runtime, setting.case(), step)
        losses.append(runtime.step(LR).loss)
    return losses


def _save_sources(root: Path, settings: list[Setting]) -> dict[Setting, list[float]]:
    """Save each after some steps; the losses of the steps after that, of the run that was never interrupted."""
    losses = {}
    for setting in settings:
        runtime = setting.runtime()
        train(runtime, setting, range(SAVED_STEPS))
        save_checkpoint(runtime, setting.folder(root), step=SAVED_STEPS, trainer={"samples": 7})
        states = whole(runtime)
        if dist.get_rank() == 0:
            torch.save(states, setting.folder(root) / "whole.pt")
        losses[setting] = train(runtime, setting, range(SAVED_STEPS, SAVED_STEPS + MORE_STEPS))
        runtime.close()
    return losses


def _set_by_hand(runtime: ZeroRuntime, states: dict[str, torch.Tensor], updates: int) -> None:
    """The same values without the checkpoint's code: cut from whole tensors."""
    rank = runtime.collectives.shard_rank
    for unit in runtime.units:
        unit.set_values({name: states[f"master/{name}"] for name in (one.name for one in unit.layout.segments)})
        for state, shard in runtime.optimizer.states_of(unit).items():
            for piece in unit.layout.pieces(rank):
                part = states[f"{state}/{piece.name}"].reshape(-1)[piece.start : piece.stop]
                shard[piece.shard_offset :][: part.numel()].copy_(part)
    runtime.optimizer.load_counters({"updates": updates})


def _bytes_of_shards(runtime: ZeroRuntime, states: dict[str, torch.Tensor]) -> int:
    """Bytes, as saved, of the elements that this rank's shards hold."""
    numel = {
        piece.name: piece.stop - piece.start
        for unit in runtime.units
        for piece in unit.layout.pieces(runtime.collectives.shard_rank)
    }
    return sum(numel.get(key.split("/", 1)[1], 0) * value.element_size() for key, value in states.items())


def _load_pairs(root: Path, pairs: list[tuple[Setting, Setting]]) -> list[tuple[Setting, Setting, list[float], str]]:
    """Of each pair, the losses after loading, and what was not as it should be."""
    found = []
    for source, target in pairs:
        runtime = target.runtime(OTHER)
        checkpoint = Checkpoint.open(source.folder(root) / f"step-{SAVED_STEPS:08d}")
        trainer = load_checkpoint(runtime, checkpoint)
        wanted = torch.load(source.folder(root) / "whole.pt")
        troubles = [] if trainer == {"samples": 7} else [f"trainer {trainer}"]
        loaded = whole(runtime)
        troubles += [key for key, value in wanted.items() if not torch.equal(loaded[key], value.to(loaded[key].dtype))]
        needed = _bytes_of_shards(runtime, wanted)
        if checkpoint.bytes_read != needed:
            troubles.append(f"read {checkpoint.bytes_read} bytes, needed {needed}")
        losses = train(runtime, target, range(SAVED_STEPS, SAVED_STEPS + 2))
        other = target.runtime(OTHER)
        _set_by_hand(other, wanted, SAVED_STEPS)
        if train(other, target, range(SAVED_STEPS, SAVED_STEPS + 2)) != losses:
            troubles.append("losses differ from a run that was set to the same values by hand")
        found.append((source, target, losses, ", ".join(troubles)))
        runtime.close()
        other.close()
    return found


# In `make test`: each row in each precision, at worlds that all occur; in `make test-full` all.
SAMPLE = [
    Setting(stage, WORLDS[(stage + 2 * place) % 4], dtype) for stage in STAGES for place, dtype in enumerate(DTYPES)
]
Sources = tuple[Path, dict[Setting, list[float]]]


def save_sources(root: Path, settings: list[Setting]) -> Sources:
    """Every setting saved, and the losses of each run that was not interrupted."""
    losses: dict[Setting, list[float]] = {}
    for world in WORLDS:
        losses |= run_ranks(_save_sources, world, root, [one for one in settings if one.world == world])[0]
    return root, losses


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    return save_sources(tmp_path_factory.mktemp("sample"), SAMPLE)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    return save_sources(tmp_path_factory.mktemp("sources"), SETTINGS)


def assert_pairs_load(root: Path, pairs: list[tuple[Setting, Setting]]) -> None:
    for world in WORLDS:
        there = [pair for pair in pairs if pair[1].world == world]
        for by_rank in run_ranks(_load_pairs, world, root, there, timeout_s=280):
            assert [(source, target, text) for source, target, _, text in by_rank if text] == []


def test_a_sample_of_pairs_loads(sample: Sources) -> None:
    """Every third pair of the sample: 3 has no factor in common with its size, so each is saved and loaded."""
    assert_pairs_load(sample[0], list(product(SAMPLE, SAMPLE))[::3])


@pytest.mark.full
@pytest.mark.parametrize("part", range(8))
def test_every_pair_loads(part: int, sources: Sources) -> None:
    assert_pairs_load(sources[0], list(product(SETTINGS, SETTINGS))[part::8])


def _go_on(root: Path, settings: list[Setting]) -> dict[Setting, list[float]]:
    found = {}
    for setting in settings:
        runtime = setting.runtime(OTHER)
        load_checkpoint(runtime, Checkpoint.open(setting.folder(root) / f"step-{SAVED_STEPS:08d}"))
        found[setting] = train(runtime, setting, range(SAVED_STEPS, SAVED_STEPS + MORE_STEPS))
        runtime.close()
    return found


def test_a_run_that_goes_on_at_its_own_setting_has_the_bits_of_one_never_interrupted(sample: Sources) -> None:
    root, losses = sample
    for world in WORLDS:
        settings = [one for one in SAMPLE if one.world == world]
        for by_setting in run_ranks(_go_on, world, root, settings):
            assert by_setting == {setting: losses[setting] for setting in settings}
