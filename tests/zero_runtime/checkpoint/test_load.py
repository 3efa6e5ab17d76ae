"""A checkpoint loads at any stage, world, unit size and precision by reading only the needed bytes, or is refused."""

from __future__ import annotations

import os
import random
import shutil
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness.checkpoints import (
    GOES_ON,
    SAVED_AFTER,
    Setting,
    assert_states,
    draw,
    flip_a_bit,
    load_into,
    save_after,
    train,
    whole,
)
from harness.in_memory import InMemory
from harness.models import TinySpec
from harness.oracle import ADAMW
from harness.ranks import run_ranks
from harness.trainee import backwards_of_step
from safetensors import safe_open
from torch import nn

from zero_runtime.checkpoint import load
from zero_runtime.checkpoint.layout import INDEX, checksum_text
from zero_runtime.checkpoint.load import CheckpointReader, load_checkpoint, shards_of
from zero_runtime.checkpoint.retention import open_together
from zero_runtime.checkpoint.save import save_checkpoint
from zero_runtime.errors import CallOrderError, CheckpointError
from zero_runtime.optim.configs import AdamConfig, AdamWConfig, SgdConfig, TorchConfig
from zero_runtime.optim.groups import ParamGroup
from zero_runtime.optim.loss_scaler import LossScaleRule
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime
from zero_runtime.tensor_source import TensorSource

FP32, BF16 = MixedPrecision(), MixedPrecision("bf16")
PURE = MixedPrecision("bf16", "bf16", "bf16", "bf16")


def reload_everywhere(root: Path, saved: Setting, targets: list[Setting], optimizer=ADAMW, changes=None) -> None:
    """Save with the setting `saved` and load with every target of the same world size."""
    changes = changes or {}
    path, states = save_after(root, saved, optimizer, **changes)
    for target in targets:
        runtime, trainer = load_into(path, target, optimizer, **changes)
        assert trainer == {"samples": 96}
        assert runtime.updates == SAVED_AFTER
        assert_states(whole(runtime), states)
        train(runtime, target.case(**changes), SAVED_AFTER, 1)
        runtime.close()


@pytest.mark.parametrize(
    "saved", [pytest.param(Setting(0, 4), marks=pytest.mark.full), Setting(3, 4, BF16, shard_ranks=2)], ids=str
)
def test_states_have_the_same_bits_at_every_stage_unit_size_and_hybrid_group(saved: Setting, tmp_path: Path) -> None:
    targets = [Setting(0, 4), Setting(2, 4, BF16, shard_ranks=2), Setting(1, 4, unit_numel=500), Setting(3, 4)]
    run_ranks(reload_everywhere, 4, tmp_path, saved, targets)


@pytest.mark.parametrize("model", [TinySpec(tied=True), TinySpec(frozen=True)], ids=["tied", "frozen"])
def test_tied_and_frozen_parameters_come_back(model: TinySpec, tmp_path: Path) -> None:
    targets = [Setting(0, 2), Setting(3, 2, unit_numel=300)]
    run_ranks(reload_everywhere, 2, tmp_path, Setting(3, 2), targets, ADAMW, {"model": model})
    index = CheckpointReader.open(tmp_path / "step-00000003").index
    assert index.tied == ({"head.weight": "embed.weight"} if model.tied else {})
    assert all(entry.trainable for entry in index.parameters.values()) != model.frozen


def test_pure_16_bit_masters_load_into_fp32_masters_and_back(tmp_path: Path) -> None:
    run_ranks(reload_everywhere, 2, tmp_path, Setting(2, 2, PURE), [Setting(3, 2, PURE), Setting(1, 2, BF16)])
    run_ranks(reload_everywhere, 2, tmp_path, Setting(2, 2, BF16), [Setting(0, 2, PURE)])


GROUPS = (ParamGroup(("head.weight",), lr_scale=0.5), ParamGroup(("embed.weight", "norm.weight"), weight_decay=0.0))
OPTIMIZERS = {
    "groups": AdamWConfig(groups=GROUPS),
    "sgd": SgdConfig(momentum=0.9),
    "no_states": SgdConfig(),
    "torch_nadam": TorchConfig(class_name="NAdam", groups=GROUPS),
}


def goes_on_like(root: Path, setting: Setting, target: Setting, optimizer) -> None:
    runtime = setting.runtime(optimizer)
    train(runtime, setting.case(), 0, SAVED_AFTER)
    path = save_checkpoint(runtime, root, step=SAVED_AFTER, trainer={})
    wanted = train(runtime, setting.case(), SAVED_AFTER, GOES_ON)
    states = whole(runtime)
    for trained_before in (0, 2):  # 2: with full copies, prefetched gathers and states to discard
        loaded = target.runtime(optimizer, model=TinySpec(seed=77))
        train(loaded, target.case(), 50, trained_before)
        load_checkpoint(loaded, CheckpointReader.open(path, verify=False))
        assert train(loaded, target.case(), SAVED_AFTER, GOES_ON) == wanted
        assert_states(whole(loaded), states)
        loaded.close()


@pytest.mark.parametrize(
    "name", ["groups", *(pytest.param(name, marks=pytest.mark.full) for name in ("torch_nadam", "sgd", "no_states"))]
)
def test_every_optimizer_with_groups_resumes_with_the_same_bits(name: str, tmp_path: Path) -> None:
    run_ranks(goes_on_like, 2, tmp_path, Setting(3, 2), Setting(2, 2), OPTIMIZERS[name])


# ---- empty shards, buffers, scaler, random states --------------------------------------------------------------------


class Small(nn.Module):
    """A parameter with fewer elements than there are ranks, an empty parameter, and buffers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.tensor([0.5]))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * self.one + self.empty.sum()


def small_runtime(stage: int) -> ZeroRuntime:
    plan = ZeroPlan.from_stage(stage)
    return ZeroRuntime(Small(), plan, FP32, ADAMW, RuntimeSettings(), torch.device("cpu"))


def small_round_trip(root: Path) -> list[int]:
    runtime = small_runtime(3)
    generator = torch.Generator().manual_seed(3)
    runtime.backward(runtime.model(torch.randn(6, 3, generator=generator)).square().sum())
    runtime.step(0.1)
    path = save_checkpoint(runtime, root, step=1, trainer={})
    states, mean = whole(runtime), runtime.model.norm.running_mean.clone()
    for stage in (0, 3):
        other = small_runtime(stage)
        load_checkpoint(other, CheckpointReader.open(path))
        assert_states(whole(other), states)
        assert torch.equal(other.model.norm.running_mean, mean)
        assert int(other.model.norm.num_batches_tracked) == 1
    return [len(unit.layout.pieces(dist.get_rank())) for unit in runtime.units]


def test_shards_without_elements_and_buffers_are_restored(tmp_path: Path) -> None:
    pieces = run_ranks(small_round_trip, 4, tmp_path)
    assert sum(pieces[3]) == 0, "the last rank must hold nothing, or this proves nothing"
    assert set(CheckpointReader.open(tmp_path / "step-00000001").index.buffers) == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }


def scaler_and_random_states(root: Path) -> None:
    rule = LossScaleRule(initial_power=20, window=4)
    fp16 = Setting(2, 2, MixedPrecision("fp16"))
    runtime = fp16.runtime(loss_scale=rule)
    train(runtime, fp16.case(loss_scale=rule), 0, 6)
    torch.manual_seed(100 + dist.get_rank())
    np.random.seed(200 + dist.get_rank())
    random.seed(300 + dist.get_rank())
    draw()
    path = save_checkpoint(runtime, root, step=6, trainer={})
    drawn = draw()
    other, _ = load_into(path, replace(fp16, stage=3), loss_scale=rule)
    assert draw() == drawn
    assert other.scaler == runtime.scaler != rule.start()
    assert other.updates == runtime.updates < 6, "no step was skipped: this proves nothing of updates"
    wanted = train(runtime, fp16.case(loss_scale=rule), 6, GOES_ON)
    assert train(other, fp16.case(loss_scale=rule), 6, GOES_ON) == wanted
    assert other.scaler == runtime.scaler
    fp32, _ = load_into(path, Setting(1, 2))
    assert fp32.scaler.scale == 1


def test_loss_scale_update_count_and_random_states_of_all_ranks_are_restored(tmp_path: Path) -> None:
    run_ranks(scaler_and_random_states, 2, tmp_path)
    states = CheckpointReader.open(tmp_path / "step-00000006").index.rng
    assert states["0"] != states["1"]


# ---- from any source -------------------------------------------------------------------------------------------------


def filled_from_memory(stage: int) -> None:
    runtime = Setting(stage, 2, BF16).runtime()
    values = {
        name: torch.randn(segment.shape, generator=torch.Generator().manual_seed(place))
        for unit in runtime.units
        for place, (name, segment) in enumerate(zip(unit.names, unit.layout.segments, strict=True))
    }
    train(runtime, Setting(stage, 2, BF16).case(), 0, 1)
    moments = {key: one for key, one in whole(runtime).items() if not key.startswith("master/")}
    source: TensorSource = InMemory(values)
    load.fill(runtime, {"master": source})
    found = whole(runtime)
    assert_states({key: found[key] for key in moments}, moments)
    with runtime.full_params() as params:
        assert_states(dict(params), values)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_runtime_can_be_filled_from_any_tensor_source(stage: int) -> None:
    run_ranks(filled_from_memory, 2, stage)


def test_the_tensor_source_of_a_state_reads_any_range(tmp_path: Path) -> None:
    path, states = run_ranks(save_after, 3, tmp_path, Setting(2, 3))[0]
    with CheckpointReader.open(path) as checkpoint:
        for state in ("master", *checkpoint.index.optimizer.states):
            source = checkpoint.state(state)
            for name in source.names():
                flat = states[f"{state}/{name}"].reshape(-1)
                assert source.shape(name) == tuple(states[f"{state}/{name}"].shape)
                for start, stop in ((0, flat.numel()), (flat.numel() // 3, flat.numel() // 2), (5, 5)):
                    assert torch.equal(source.read(name, start, stop), flat[start:stop])
                    assert source.read(name, start, stop).dtype == source.dtype(name)


# ---- how much is read ------------------------------------------------------------------------------------------------


def bytes_read(path: Path, setting: Setting) -> tuple[int, int]:
    runtime = setting.runtime()
    checkpoint = CheckpointReader.open(path, verify=False)
    load_checkpoint(runtime, checkpoint)
    needed = sum(
        (piece.stop - piece.start) * 4
        for unit in runtime.units
        for _ in shards_of(runtime, unit)
        for piece in unit.layout.pieces(runtime.collectives.shard_rank)
    )
    return checkpoint.bytes_read, needed


def test_each_rank_reads_its_own_ranges_and_no_other_bytes(tmp_path: Path) -> None:
    path, states = run_ranks(save_after, 4, tmp_path, Setting(0, 4))[0]
    total = sum(values.numel() * 4 for values in states.values())
    found = run_ranks(bytes_read, 3, path, Setting(3, 3))
    assert [read for read, _ in found] == [needed for _, needed in found]
    assert sum(read for read, _ in found) == total
    assert run_ranks(bytes_read, 2, path, Setting(1, 2, shard_ranks=1))[0] == (total, total)


def test_verification_is_divided_so_that_each_file_is_read_by_one_rank(tmp_path: Path) -> None:
    path, _ = run_ranks(save_after, 3, tmp_path, Setting(2, 3))[0]
    found = run_ranks(files_verified, 2, path, Setting(2, 2))
    assert [sorted(names) for names in found] == [
        ["rank-00000-of-00003", "rank-00002-of-00003"],
        ["rank-00001-of-00003"],
    ]


def files_verified(path: Path, setting: Setting) -> list[str]:
    names, check = [], load.check_file
    load.check_file = lambda file, entry: (names.append(file.stem), check(file, entry))
    load_into(path, setting)
    return names


def test_the_files_are_plain_safetensors_of_similar_size_on_all_ranks(tmp_path: Path) -> None:
    path, states = run_ranks(save_after, 3, tmp_path, Setting(0, 3))[0]
    index = CheckpointReader.open(path).index
    assert sorted(os.listdir(path)) == sorted([INDEX, *index.files])
    found = {key: torch.full((values.numel(),), torch.nan) for key, values in states.items()}
    for name in index.files:
        with safe_open(path / name, "pt") as file:
            for param, entry in index.parameters.items():
                for state, extents in entry.pieces.items():
                    for extent in (one for one in extents if one.file == name):
                        found[f"{state}/{param}"][extent.start : extent.stop] = file.get_tensor(f"{state}/{param}")
    for key, values in states.items():
        assert torch.equal(found[key].view(values.shape), values)
    sizes = [entry.bytes for entry in index.files.values()]
    assert max(sizes) - min(sizes) < 0.25 * max(sizes)  # headers and padding: the model is tiny


# ---- what is refused -------------------------------------------------------------------------------------------------


def spoil_truncated(path: Path) -> None:
    file = path / "rank-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


def spoil_index(path: Path, old: str, new: str, *, honest: bool = True) -> None:
    """Change the index. honest: update its checksum as well, as another program that writes checkpoints would."""
    first, _, rest = (path / INDEX).read_text().partition("\n")
    assert old in rest
    rest = rest.replace(old, new, 1)
    if honest:
        first = f'{{"checksum":"{checksum_text(zlib.crc32(rest.encode()))}",'
    (path / INDEX).write_text(f"{first}\n{rest}")


SPOILT = {
    "truncated": (spoil_truncated, r"expected \d+ bytes, found \d+"),
    "bit_flipped": (lambda path: flip_a_bit(path / "rank-00000-of-00002.safetensors", -9), "expected checksum crc32:"),
    "header_flipped": (lambda path: flip_a_bit(path / "rank-00000-of-00002.safetensors", 40), ""),
    "missing": (lambda path: (path / "rank-00001-of-00002.safetensors").unlink(), "found none; copy the whole folder"),
    "index_missing": (lambda path: (path / INDEX).unlink(), "expected a file of the checkpoint, found none"),
    "index_torn": (lambda path: (path / INDEX).write_bytes((path / INDEX).read_bytes()[:99]), "an index in JSON"),
    "index_flipped": (lambda path: spoil_index(path, '"samples":96', '"samples":97', honest=False), "after its first"),
    "older": (
        lambda path: spoil_index(path, '"version":1', '"version":0'),
        "expected format version 1 or 2, found version 0",
    ),
    "key_missing": (lambda path: spoil_index(path, '"world":', '"words":'), "expected the key 'world'"),
    "foreign": (lambda path: spoil_index(path, '"format":"zero-lab checkpoint"', '"format":"x"'), "expected format"),
    "renamed": (lambda path: spoil_index(path, '"step":3', '"step":4'), "found one of step 4"),
    "dtype": (lambda path: spoil_index(path, '"dtype":"F32"', '"dtype":"F31"'), "one of the dtypes .*found 'F31'"),
    "gap": (lambda path: spoil_index(path, '"exp_avg":[["rank-00000', '"exp_avh":[["rank-00000'), "a gap at 0"),
}
OTHERS = {
    "architecture": ({"model": TinySpec(blocks=2)}, ADAMW, "another architecture: expected the .* too many"),
    "width": ({"model": TinySpec(width=24)}, ADAMW, r"another architecture: expected .* of shape \[37, 24\]"),
    "vocabulary": (
        {"model": TinySpec(vocab=41)},
        ADAMW,
        "another architecture: expected .* of shape .41, .* found .37, ",
    ),
    "tied": ({"model": TinySpec(tied=True)}, ADAMW, "another architecture: .* has head.weight too many"),
    "frozen": ({"model": TinySpec(frozen=True)}, ADAMW, "expected blocks.1.norm.weight, .* to be frozen"),
    "optimizer": ({}, SgdConfig(momentum=0.9), "another optimizer: expected Sgd with the states momentum_buffer"),
    "same_states": ({}, AdamConfig(), "another optimizer: expected Adam .*found AdamW"),
}


def refused(original: Path, folder: Path) -> None:
    """Every unfit checkpoint raises the same clear error on both ranks and leaves the runtime unchanged."""

    def check(runtime: ZeroRuntime, path: Path, says: str) -> None:
        before = whole(runtime)
        with pytest.raises(CheckpointError, match=says) as caught:
            load_checkpoint(runtime, open_together(runtime.collectives, path))
        texts = runtime.collectives.gather_objects(str(caught.value))
        assert texts[0] == texts[1]
        assert "expected" in texts[0]
        assert "; " in texts[0], texts[0]  # followed by what to do
        assert_states(whole(runtime), before)

    own = Setting(3, 2).runtime()
    for name, (spoil, says) in SPOILT.items():
        path = folder / name / original.name
        if dist.get_rank() == 0:
            shutil.copytree(original, path)
            spoil(path)
        dist.barrier()
        check(own, path, says)
    for changes, optimizer, says in OTHERS.values():
        other = Setting(3, 2).runtime(optimizer, **changes)
        check(other, original, says)
        other.close()
    partial = original.with_name(f".{original.name}.partial")
    if dist.get_rank() == 0:
        partial.mkdir()
    dist.barrier()
    check(own, partial, "still being written")
    check(own, original.with_name("step-00000009"), "found nothing")


def test_damaged_or_mismatched_checkpoints_are_refused_with_the_reason_on_all_ranks(tmp_path: Path) -> None:
    path, _ = run_ranks(save_after, 2, tmp_path / "good", Setting(3, 2))[0]
    run_ranks(refused, 2, path, tmp_path / "spoilt")


def test_a_checkpoint_without_read_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = run_ranks(save_after, 1, tmp_path, Setting(3, 1))[0]

    def denied(*args: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)  # a superuser can read every file
    with pytest.raises(CheckpointError, match="expected to be allowed to read it, found Permission denied; mend its"):
        CheckpointReader.open(path)


def mid_step(root: Path) -> None:
    setting = Setting(2, 1)
    runtime = setting.runtime()
    backwards_of_step(runtime, setting.case(), 0)
    with pytest.raises(CallOrderError, match="expected to be called between two steps"):
        save_checkpoint(runtime, root, step=1, trainer={})


def test_a_save_between_backward_and_step_is_refused(tmp_path: Path) -> None:
    run_ranks(mid_step, 1, tmp_path)
