"""Weights in a folder load into the shards at every stage: each rank reads its own ranges, and none holds them all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness.models import TinySpec, TinyTransformer
from harness.oracle import ADAMW
from harness.patience import HANG_S
from harness.ranks import run_alone, run_ranks
from safetensors.torch import save_file

from zero_runtime.checkpoint.files import WEIGHTS, WEIGHTS_INDEX
from zero_runtime.checkpoint.hugging_face.names import match_names
from zero_runtime.checkpoint.hugging_face.source import WeightsFolder
from zero_runtime.errors import CheckpointError, PlanError
from zero_runtime.initial_values import parameters_on_meta
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime
from zero_runtime.tensor_source import Renamed
from zero_runtime.world import world_size

REPOSITORY = Path(__file__).resolve().parents[4]
SPEC = TinySpec(tied=True, frozen=True, seed=5)
BF16 = MixedPrecision(param="bf16", reduce="fp32", master="fp32", compute="fp32")


def _runtime(weights, stage: int = 3, precision: MixedPrecision | None = None) -> ZeroRuntime:
    with parameters_on_meta():
        model = TinyTransformer(SPEC)
    return ZeroRuntime(
        model,
        ZeroPlan.from_stage(stage),
        precision or MixedPrecision(),
        ADAMW,
        RuntimeSettings(weights=weights, initialise=_constant),
        torch.device("cpu"),
    )


def _constant(module: torch.nn.Module) -> None:
    for param in module.parameters(recurse=False):
        param.fill_(0.25)


def _write(folder: Path) -> dict[str, torch.Tensor]:
    values = {name: param.detach().clone() for name, param in TinyTransformer(SPEC).named_parameters()}
    folder.mkdir(exist_ok=True)
    save_file(values, folder / WEIGHTS)
    return values


def _read_at_every_row(folder: Path) -> list[tuple[int, int]]:
    """By stage and precision: bytes read and bytes of this rank's shards, after comparing the values."""
    wanted, found = _write(folder.with_name(f"{folder.name}-own-{os.getpid()}")), []
    for stage in range(4):
        for precision in (MixedPrecision(), BF16):
            with WeightsFolder(folder) as source:
                runtime = _runtime(source, stage, precision)
                with runtime.full_params() as values:
                    assert values.keys() == wanted.keys()
                    for name, whole in values.items():
                        assert torch.equal(whole, wanted[name].to(whole.dtype)), (stage, name)
                ids = torch.arange(22).view(2, 11)
                with torch.no_grad():
                    logits = runtime(ids)
                if precision != BF16:
                    assert torch.equal(logits, TinyTransformer(SPEC)(ids)), stage
                held = sum(
                    piece.stop - piece.start
                    for unit in runtime.units
                    for piece in unit.layout.pieces(runtime.collectives.shard_rank)
                )
                found.append((source.bytes_read, 4 * held))
                runtime.close()
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_each_rank_reads_only_its_own_ranges_and_the_weights_have_the_folders_bits(world: int, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    _write(folder)
    for rows in run_ranks(_read_at_every_row, world, folder):
        assert [read for read, _ in rows] == [held for _, held in rows]


def _part_of_the_model(folder: Path) -> None:
    """Parameters that the folder lacks get initial values, and `Renamed` gives a source other names."""
    with WeightsFolder(folder) as source:
        names = [name for name in source.names() if name != "blocks.0.up.weight"]
        runtime = _runtime(Renamed(source, {name: name for name in names}), stage=2)
    with runtime.full_params() as values:
        assert bool((values["blocks.0.up.weight"] == 0.25).all())
        assert not bool((values["blocks.0.up.bias"] == 0.25).any())


def test_parameters_that_the_source_lacks_get_initial_values(tmp_path: Path) -> None:
    _write(tmp_path)
    run_ranks(_part_of_the_model, 2, tmp_path)


class _Broken:
    """A source whose disk fails on rank 1 only."""

    def __init__(self, source: WeightsFolder, rank: int) -> None:
        self._source, self._rank = source, rank

    def __getattr__(self, name: str):
        return getattr(self._source, name)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        if self._rank == 1:
            raise CheckpointError("the disk fails")
        return self._source.read(name, start, stop)


def _one_rank_cannot_read(folder: Path) -> str:
    with WeightsFolder(folder) as source, pytest.raises(CheckpointError) as error:
        _runtime(_Broken(source, torch.distributed.get_rank()))
    assert world_size() == 2
    return str(error.value)


def test_if_one_rank_cannot_read_all_ranks_raise_the_same_error(tmp_path: Path) -> None:
    _write(tmp_path)
    assert run_ranks(_one_rank_cannot_read, 2, tmp_path) == ["rank 1: the disk fails"] * 2


def _other_shape(folder: Path) -> None:
    values = _write(folder)
    values["norm.bias"] = torch.zeros(3)
    save_file(values, folder / WEIGHTS)
    with WeightsFolder(folder) as source, pytest.raises(PlanError, match=r"norm\.bias: \[20\], found \[3\]"):
        _runtime(source)


def test_a_weight_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    run_ranks(_other_shape, 1, tmp_path)


# ---- folders that cannot be read -------------------------------------------------------------------------------------


def test_missing_or_unreadable_files_are_reported_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="found nothing; give the folder of a model"):
        WeightsFolder(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="found neither; give the folder that save_pretrained wrote"):
        WeightsFolder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"a pickle; convert it once"):
        WeightsFolder(tmp_path)
    (tmp_path / WEIGHTS_INDEX).write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors: expected a file of the checkpoint"):
        WeightsFolder(tmp_path)
    for name in ("../model.safetensors", "m" * 5000):
        (tmp_path / WEIGHTS_INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(
            CheckpointError, match=r"names of files beside it, found .*; copy the folder again"
        ) as error:
            WeightsFolder(tmp_path)
        assert len(str(error.value)) < 600
    (tmp_path / WEIGHTS_INDEX).write_bytes(b"\xff" * 1_000_000)
    with pytest.raises(CheckpointError, match=r"found something else \(UnicodeDecodeError: 'utf-8' codec") as error:
        WeightsFolder(tmp_path)
    assert len(str(error.value)) < 600


def test_an_unsupported_dtype_is_refused_by_name(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4).to(torch.float8_e4m3fn)}, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match="found F8_E4M3; convert the weights"):
        WeightsFolder(tmp_path)


def test_names_match_by_any_of_their_spellings_and_unmatched_names_are_refused() -> None:
    own = {"model.embed": ["model.embed", "head"], "model.norm": ["model.norm", "norm"]}
    assert match_names(own, ["head", "norm"], "w") == {"model.embed": "head", "model.norm": "norm"}
    with pytest.raises(CheckpointError, match=r"lacks model\.norm and has gain too many"):
        match_names(own, ["model.embed", "gain"], "w")


# ---- memory ----------------------------------------------------------------------------------------------------------

PROGRAM = """
import resource, sys
import torch, torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from safetensors.torch import load_file, save_file
from zero_runtime.initial_values import parameters_on_meta
from zero_runtime.checkpoint.hugging_face.source import WeightsFolder
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime
from zero_runtime.optim.configs import AdamWConfig

WIDTH, BLOCKS, WORLD = 1024, 64, 32
block_bytes = WIDTH * WIDTH * 4
folder = sys.argv[2]

def build(blocks):
    with parameters_on_meta():
        model = nn.Module()
        model.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(blocks))
    return model

def read(blocks):
    # The fake group answers a gather with this rank's own words: so does a world whose ranks all fare alike.
    with WeightsFolder(f"{folder}/{blocks}") as source:
        return ZeroRuntime(build(blocks), ZeroPlan.from_stage(3), MixedPrecision(), AdamWConfig(),
                           RuntimeSettings(weights=source), torch.device("cpu"))

torch.set_num_threads(1)
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
read(2).close()  # what the libraries allocate once is allocated
load_file(f"{folder}/2/model.safetensors")
(used,) = (int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmData"))
allowed = 3 * BLOCKS * block_bytes // WORLD + 8 * block_bytes
assert allowed < BLOCKS * block_bytes / 4
resource.setrlimit(resource.RLIMIT_DATA, (used + allowed, used + allowed))
if sys.argv[1] == "read":
    runtime = read(BLOCKS)
    for index, unit in enumerate(runtime.units):
        assert bool((unit.param_shard == index).all())
else:
    state = {name: value.clone() for name, value in load_file(f"{folder}/{BLOCKS}/model.safetensors").items()}
print("done")
"""


def _write_large(folder: Path) -> None:
    for blocks in (2, 64):
        (folder / str(blocks)).mkdir()
        values = {f"blocks.{index}.weight": torch.full((1024, 1024), float(index)) for index in range(blocks)}
        save_file(values, folder / str(blocks) / WEIGHTS)


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the process's size from /proc")
def test_weights_larger_than_the_memory_limit_are_read_into_the_shards(tmp_path: Path) -> None:
    """One of 32 ranks reads 256 MiB of weights while RLIMIT_DATA allows 56 MiB more; loading all of them fails."""
    run_alone(_write_large, tmp_path)
    read, whole = (
        subprocess.run(
            [sys.executable, "-c", PROGRAM, how, str(tmp_path)],
            cwd=REPOSITORY,
            env={**os.environ, "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1048576", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )
        for how in ("read", "whole")
    )
    assert read.stdout.strip() == "done", read.stderr
    assert whole.returncode != 0
    assert "allocate memory" in whole.stderr, whole.stderr
