"""Predicted bytes while a model is built and while a state or weights are written are those that torch's allocator
counts on two CPU ranks, but for storages of a few numbers."""

from __future__ import annotations

import gc
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from harness.allocations import allocated_peak
from harness.ranks import run_ranks
from points import config_of

from orchestrator.config.schema import Device, RunConfig
from orchestrator.config.state_groups import Offload, Precision
from orchestrator.plan.memory_cache import units_key
from orchestrator.plan.step import Memories
from orchestrator.worker.activations import answers
from orchestrator.worker.setup import build_deferred
from orchestrator.worker.shapes import units_of
from orchestrator.workloads.models import token_losses
from zero_runtime.checkpoint.background import BackgroundSaver
from zero_runtime.checkpoint.hugging_face.gathered import save_gathered_weights
from zero_runtime.checkpoint.hugging_face.source import WeightsFolder
from zero_runtime.integrations.pretrained import weights_of
from zero_runtime.memory.census import take_census
from zero_runtime.memory.outside_step import MomentBytes
from zero_runtime.offload.plan import Tier
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime

WORLD, SEQ = 2, 16
MESSAGES_BYTES = 64  # the ranks agree in messages of fewer than eight numbers of 8 bytes
PRECISIONS = {
    "fp32": Precision(MixedPrecision(), compute="fp32"),
    "bf16": Precision(MixedPrecision("bf16"), compute="bf16"),
    "bf16 in fp32": Precision(MixedPrecision("bf16"), compute="fp32"),
}
WIDE = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3}
CASES = [(stage, name) for stage in (0, 1, 3) for name in PRECISIONS]


class Counted(NamedTuple):
    """Bytes of a rank: of all its tensors at the worst moment of each."""

    building: int
    loading: int
    saving: int
    exporting: int


def configured(stage: int, precision: str) -> RunConfig:
    config = config_of(4, every=None, stage=stage, ranks=WORLD)
    model = replace(config.model, config=config.model.config | WIDE)
    return replace(config, model=model, precision=PRECISIONS[precision])


def counted(cases: list[tuple[int, str]]) -> list[Counted]:
    gc.disable()  # a collection frees cycles at times that depend on what else has run
    return [_counted(configured(*case)) for case in (cases[0], *cases)][1:]  # the first one prepares the process


def _counted(config: RunConfig) -> Counted:
    building, runtime = built(config)
    ids = torch.zeros((1, SEQ), dtype=torch.int64)
    runtime.backward(token_losses(runtime.model, ids, ids, None))
    runtime.step(1e-3)
    resting = take_census(runtime).states
    with tempfile.TemporaryDirectory() as own:
        folder = Path(runtime.collectives.gather_objects(own)[0])

        def save() -> None:
            saver = BackgroundSaver(folder / "checkpoints")
            saver.save(runtime, step=1, trainer={})
            saver.wait(runtime)

        def export() -> None:
            save_gathered_weights(runtime, folder / "weights")

        saving, exporting = allocated_peak(save), allocated_peak(export)
        save_gathered_weights(runtime, folder / "fp32", dtype=torch.float32)
        loading, _ = built(config, folder / "fp32")
        runtime.collectives.gather_objects(None)  # no rank needs the folder any more
    return Counted(building, loading, resting + saving, resting + exporting)


def built(config: RunConfig, weights: Path | None = None) -> tuple[int, ZeroRuntime]:
    """The bytes that the construction of a runtime takes, and the runtime."""
    model, initialise = build_deferred(config)
    settings = RuntimeSettings(prefetch=config.zero.prefetch, initialise=initialise)
    made = []

    def build() -> None:
        with ExitStack() as stack:
            source = None
            if weights is not None:
                source = weights_of(stack.enter_context(WeightsFolder(str(weights))), model)
            rule, device = config.optimizer.rule, torch.device("cpu")
            with_weights = replace(settings, weights=source)
            made.append(ZeroRuntime(model, config.zero.plan, config.precision.mixed, rule, with_weights, device))

    return allocated_peak(build), made[0]


def predicted(case: tuple[int, str]) -> list[MomentBytes]:
    config = configured(*case)
    memory = Memories(dict(answers([config])) | {units_key(config): units_of(config)}).of(config)
    assert memory is not None
    building, saving, exporting = memory.outside_step()
    loading = memory.moments().building(reads=True)
    return [building, loading, saving, exporting]


@pytest.fixture(scope="module")
def by_rank() -> list[list[Counted]]:
    return run_ranks(counted, WORLD, CASES)


@pytest.mark.full
def test_the_bytes_outside_of_steps_are_the_predicted_ones(by_rank: list[list[Counted]]) -> None:
    for place, case in enumerate(CASES):
        ranks = [rank[place] for rank in by_rank]
        for moment, *counted_bytes in zip(predicted(case), *ranks, strict=True):
            left_out = max(counted_bytes) - moment.device - moment.host
            assert 0 <= left_out <= MESSAGES_BYTES, (case, moment.name, counted_bytes)


def test_on_a_gpu_drawn_and_read_values_and_copies_are_on_the_host() -> None:
    config = configured(3, "bf16")
    on_gpus = replace(config, resources=replace(config.resources, device=Device.cuda))
    memory = Memories(dict(answers([on_gpus])) | {units_key(on_gpus): units_of(on_gpus)}).of(on_gpus)
    assert memory is not None
    building, saving, exporting = memory.outside_step()
    largest = WIDE["vocab_size"] * WIDE["hidden_size"]
    assert building.host == largest * (4 + 2) + 5056  # fp32, and its conversion to bf16
    assert building.device == predicted((3, "bf16"))[1].device  # as on a CPU whose values are read
    assert saving.host == predicted((3, "bf16"))[2].host
    assert exporting.host == largest * 2
    # A rank reads its half of the embedding, and the whole of a smaller projection that its shard holds.
    assert memory.moments().building(reads=True).host == WIDE["intermediate_size"] * WIDE["hidden_size"] * 4
    offloaded = replace(memory, config=replace(on_gpus, offload=Offload(optimizer=Tier.HOST)))
    assert offloaded.outside_step() == []
