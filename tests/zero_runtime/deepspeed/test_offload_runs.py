"""Drop-in engines have the same bits with and without offload, and states offloaded to a file are stored there."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from harness.checkpoints import whole
from harness.models import TinySpec, TinyTransformer, batch
from harness.ranks import run_ranks
from harness.seed_loop import initialize_quietly
from torch.nn import functional as F

from zero_runtime.accounting import scratch_bytes
from zero_runtime.errors import OffloadError, PlanError
from zero_runtime.offload import scratch_file
from zero_runtime.offload.nvme import NvmeTier
from zero_runtime.offload_plan import ALIGN_BYTES, aligned

SPEC = TinySpec(tied=True, frozen=True)
BLOCK, STEPS, SAVED_AFTER = 2 * ALIGN_BYTES, 4, 2


class Row(NamedTuple):
    """A run: its ZeRO stage, its sections `offload_optimizer` and `offload_param`, and its precision."""

    level: int
    optimizer: dict[str, Any] | None = None
    params: dict[str, Any] | None = None
    precision: dict[str, Any] | None = None


def engine_of(row: Row, folder: Path, seed: int = 0) -> Any:
    """An engine for `row`, whose nvme_path is `folder`."""
    zero: dict[str, Any] = {"stage": row.level}
    for name, section in (("offload_optimizer", row.optimizer), ("offload_param", row.params)):
        if section is not None:
            zero[name] = section | ({"nvme_path": str(folder)} if section["device"] == "nvme" else {})
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 3}},
        "zero_optimization": zero,
        "aio": {"block_size": BLOCK, "queue_depth": 2},
        **(row.precision or {}),
    }
    return initialize_quietly(model=TinyTransformer(replace(SPEC, seed=seed)), config=config)[0]


def train(engine: Any, first: int, steps: int) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        for micro in range(engine.gradient_accumulation_steps()):
            ids, labels = batch(SPEC, step, dist.get_rank(), micro)
            loss = F.cross_entropy(engine(ids).float().reshape(-1, SPEC.vocab), labels.clamp(min=0).reshape(-1))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def outcome(engine: Any, first: int = 0, steps: int = STEPS) -> tuple[list[float], dict[str, torch.Tensor], list[Any]]:
    """Losses, every full state, and the engine's learning rates, gradient norm, skipped steps and loss scale."""
    losses = train(engine, first, steps)
    told = [engine.get_lr(), engine.get_global_grad_norm(), engine.skipped_steps, engine.cur_scale]
    assert engine.was_step_applied()
    return losses, whole(engine.runtime), told


def assert_equal(found: Any, wanted: Any) -> None:
    assert found[0] == wanted[0]
    assert found[1].keys() == wanted[1].keys()
    for name, values in wanted[1].items():
        assert torch.equal(found[1][name], values), name
    assert found[2] == wanted[2]


def parity(folder: Path, plain: Row, rows: list[Row]) -> None:
    engine = engine_of(plain, folder)
    wanted = outcome(engine)
    assert bool(engine.skipped_steps) is (plain.precision is FP16)
    engine.destroy()
    for row in rows:
        engine = engine_of(row, folder)
        offload = engine.runtime.settings.offload
        assert offload.uses_nvme or offload.uses_host
        assert isinstance(engine.runtime.tier, NvmeTier) is offload.uses_nvme, "on a CPU the host is the device"
        assert_equal(outcome(engine), wanted)
        engine.destroy()
    assert not folder.exists() or list(folder.iterdir()) == [], "a scratch file is unlinked while it is open"


ON_CPU, ON_NVME = {"device": "cpu"}, {"device": "nvme"}
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 18, "hysteresis": 1}}  # the first steps overflow
FILES: list[tuple[Row, list[Row]]] = [
    (Row(1), [Row(1, ON_NVME)]),
    (Row(2), [Row(2, {**ON_NVME, "pipeline_read": False})]),
    (Row(3), [Row(3, ON_NVME), Row(3, ON_NVME, ON_NVME), Row(3, {**ON_NVME, "ratio": 0.5}, ON_NVME)]),
    (Row(3, precision=BF16), [Row(3, ON_NVME, ON_CPU, BF16), Row(3, ON_NVME, ON_NVME, BF16)]),
    (Row(3, precision=FP16), [Row(3, ON_NVME, ON_NVME, FP16)]),
]


def all_in_files(folder: Path) -> None:
    for plain, rows in FILES:
        parity(folder, plain, rows)


@pytest.mark.full
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.full), 2])
def test_states_in_a_scratch_file_change_no_bits(world: int, tmp_path: Path) -> None:
    run_ranks(all_in_files, world, tmp_path)


def on_the_host(folder: Path) -> None:
    for plain, *rows in (
        (Row(1), Row(1, ON_CPU)),
        (Row(2), Row(2, ON_CPU)),
        (Row(3), Row(3, ON_CPU), Row(3, None, ON_CPU), Row(3, {**ON_CPU, "ratio": 0.5}, ON_CPU)),
    ):
        parity(folder, plain, rows)
    assert not folder.exists()


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.full), 2])
def test_offload_to_the_host_changes_nothing_if_the_device_is_a_cpu(world: int, tmp_path: Path) -> None:
    run_ranks(on_the_host, world, tmp_path / "never made")


def moved(folder: Path) -> None:
    """Check the bytes of one step by counting each block that is read or written, and the block size set in `aio`."""
    counts: dict[str, list[int]] = {"_read_block": [], "_write_block": []}
    for name, sizes in counts.items():
        really = getattr(scratch_file.ScratchFile, name)

        def counting(self: Any, offset: int, block: memoryview, what: str, *, really=really, sizes=sizes) -> None:
            sizes.append(len(block))
            really(self, offset, block, what)

        setattr(scratch_file.ScratchFile, name, counting)
    found = []
    for row in (Row(2, ON_NVME), Row(3, {**ON_NVME, "ratio": 0.5}), Row(3, ON_NVME, ON_NVME)):
        engine = engine_of(row, folder)
        train(engine, 0, 1)
        for sizes in counts.values():
            sizes.clear()
        train(engine, 1, 1)
        found.append([sum(sizes) for sizes in counts.values()] + [scratch_bytes(engine.runtime)])
        expected = moments(engine.runtime.units)
        assert max(map(max, counts.values())) == BLOCK
        engine.destroy()
    all_states, half, params_too = found
    assert all_states[0] == all_states[1] == all_states[2] == expected
    assert half[0] == half[1] == half[2]
    assert 0.3 * all_states[2] < half[2] < 0.7 * all_states[2]
    assert params_too[0] > params_too[1] > all_states[1], "each gather reads parameters too"


def moments(units: list[Any]) -> int:
    """Bytes of AdamW's two fp32 moments of every trainable unit, each rounded up to full pages.

    In fp32 the master is the parameter, which is not offloaded.
    """
    return sum(2 * aligned(4 * unit.layout.shard_numel) for unit in units if unit.trainable)


def test_a_step_reads_and_writes_the_states_in_the_file(tmp_path: Path) -> None:
    run_ranks(moved, 1, tmp_path)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def round_trip(root: Path) -> None:
    """A checkpoint of offloaded states resumes in a file, in memory and at another stage, with the same bits."""
    row = Row(3, ON_NVME, ON_NVME)
    engine = engine_of(row, root)
    train(engine, 0, SAVED_AFTER)
    assert engine.save_checkpoint(root / "saved", client_state={"epoch": 1})
    assert engine.save_16bit_model(root / "weights")
    wanted = outcome(engine, SAVED_AFTER, 2)
    engine.destroy()
    for other in (row, Row(3), Row(2, ON_NVME), Row(3, ON_NVME, ON_CPU)):
        engine = engine_of(other, root, seed=7)
        path, client = engine.load_checkpoint(root / "saved")
        assert path is not None
        assert client == {"epoch": 1}
        assert engine.global_steps == SAVED_AFTER
        assert_equal(outcome(engine, SAVED_AFTER, 2), wanted)
        engine.destroy()


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2])
def test_an_engine_with_scratch_files_saves_checkpoints_that_resume_with_any_offload(
    world: int, tmp_path: Path
) -> None:
    run_ranks(round_trip, world, tmp_path)


# ---- refused when a run begins ---------------------------------------------------------------------------------------


def refused(folder: Path) -> list[str]:
    """Messages of several refused starts with one model, which then trains with an optimizer that is passed in."""
    model = TinyTransformer(SPEC)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    told = []

    def initialize(path: Path, **more: Any) -> Any:
        section = {"device": "nvme", "nvme_path": str(path)}
        config = {"train_batch_size": 6, "zero_optimization": {"stage": 2, "offload_optimizer": section}, **more}
        given = {} if "optimizer" in more else {"optimizer": torch.optim.AdamW(model.parameters())}
        return initialize_quietly(model=model, config=config, **given)[0]

    for kind in ("Lamb", "Adagrad"):
        with pytest.raises(PlanError) as error:
            initialize(folder, optimizer={"type": kind})
        told.append(str(error.value))
    (folder / "file").touch()
    with pytest.raises(OffloadError) as no_folder:
        initialize(folder / "file")
    really = os.statvfs
    os.statvfs = lambda path: SimpleNamespace(f_bavail=0, f_frsize=1)  # type: ignore[assignment]
    with pytest.raises(OffloadError) as full:
        initialize(folder)
    os.statvfs = really
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    engine = initialize(folder)
    train(engine, 0, 1)
    engine.destroy()
    return [*told, str(no_folder.value), str(full.value)]


def test_a_run_without_space_or_host_implementation_is_refused_before_the_model_is_touched(tmp_path: Path) -> None:
    first, second = run_ranks(refused, 2, tmp_path)
    assert first == second
    lamb, adagrad, no_folder, full = first
    assert "expected an optimizer that updates one unit after another" in lamb
    assert "found Lamb" in lamb
    assert "found torch.optim.Adagrad" in adagrad
    assert "expected a folder for scratch files, found a file of that name" in no_folder
    assert "bytes free for the scratch files of 2 ranks, found 0; make room" in full


def stays() -> None:
    zero = {"stage": 2, "cpu_offload": True}
    config = {"train_batch_size": 3, "optimizer": {"type": "Lamb"}, "zero_optimization": zero}
    engine = initialize_quietly(model=TinyTransformer(SPEC), config=config)[0]
    train(engine, 0, 1)
    engine.destroy()


def test_an_optimizer_that_cannot_be_offloaded_may_use_cpu_offload_if_the_device_is_a_cpu() -> None:
    run_ranks(stays, 1)
