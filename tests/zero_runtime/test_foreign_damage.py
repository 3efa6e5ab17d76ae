"""Damaged and malicious checkpoints of other libraries: refused by name, and nothing of this process is changed."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from zero_runtime.checkpoint.archive import check_archive
from zero_runtime.checkpoint.dcp_source import METADATA, open_dcp
from zero_runtime.checkpoint.deepspeed_source import open_deepspeed
from zero_runtime.checkpoint.foreign import ForeignCheckpoint
from zero_runtime.checkpoint.load import Checkpoint
from zero_runtime.checkpoint.stand_ins import StandIn, read_pickle
from zero_runtime.errors import CheckpointError

MADE = Path(__file__).resolve().parents[1] / "foreign" / "deepspeed"  # by tests/foreign/make_deepspeed.py
DATA = "__0_0.distcp"
NAMES = ["weight", "bias"]
SAVED = {"model.weight": torch.arange(12.0).view(4, 3), "model.bias": torch.arange(4.0)}
SAVED |= {"optim.state.weight.step": torch.tensor(3.0), "optim.state.weight.exp_avg": torch.ones(4, 3)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint as torch.distributed.checkpoint writes it, in one file."""
    folder = tmp_path / "dcp"
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
    """All that it holds, flattened, by state and parameter."""
    found.verify()
    sources = {state: found.source(state) for state in found.chunks}
    return {
        f"{state}/{name}": source.read(name, 0, math.prod(found.parameters[name].shape))
        for state, source in sources.items()
        for name in source.names()
    }


def test_what_stands_in_for_torch_s_classes_holds_what_was_saved(saved: Path) -> None:
    found = open_dcp(saved, NAMES)
    assert found.updates == 3
    assert {name: entry.shape for name, entry in found.parameters.items()} == {"weight": (4, 3), "bias": (4,)}
    assert torch.equal(found.source("master").read("weight", 1, 12), torch.arange(1.0, 12.0))
    assert torch.equal(found.source("exp_avg").read("weight", 0, 12), torch.ones(12))


# ---- what would change the process ----------------------------------------------------------------------------------

METADATA_CLASS = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
POISON = {
    "a method of pathlib's class": (b'cpathlib\nPosixPath\n(N(S"unlink"\ncpathlib\nPosixPath\ndtb0', Path, "unlink"),
    "a new attribute of pathlib's class": (b'cpathlib\nPosixPath\n(N(S"zattack"\nI1\ndtb0', PosixPath, "zattack"),
    "an attribute of torch's class": (METADATA_CLASS + b'(N(S"zattack"\nI1\ndtb0', dcp.Metadata, "zattack"),
    "the defaults of a function": (
        b'ctorch.serialization\n_get_layout\n(N(S"__defaults__"\n(I1\ntdtb0',
        torch.serialization._get_layout,
        "__defaults__",
    ),
}


@pytest.mark.parametrize("name", POISON)
def test_a_pickle_that_sets_attributes_of_a_class_is_refused_and_sets_none(name: str, saved: Path) -> None:
    text, owner, attribute = POISON[name]
    before = getattr(owner, attribute, None)
    whole = (saved / METADATA).read_bytes()
    (saved / METADATA).write_bytes(text + whole)
    with pytest.raises(CheckpointError, match="expected the metadata of a distributed checkpoint"):
        open_dcp(saved, NAMES)
    assert getattr(owner, attribute, None) is before
    (saved / METADATA).write_bytes(whole)
    assert open_dcp(saved, NAMES).updates == 3


def kinds_in(found: Any) -> set[type]:
    """The types of all that it is made of."""
    inner: list[Any] = []
    if isinstance(found, StandIn):
        inner = [*found.arguments, found.state]
    elif isinstance(found, dict):
        inner = [*found, *found.values()]
    elif isinstance(found, (list, tuple)):
        inner = list(found)
    return {type(found)}.union(*map(kinds_in, inner))


def test_no_class_of_anybody_else_s_is_made(saved: Path) -> None:
    with (saved / METADATA).open("rb") as file:
        found = kinds_in(read_pickle(file, lambda module, name: True))
    assert StandIn in found
    assert found <= {StandIn, type, dict, list, tuple, str, int, bool, type(None)}


# ---- damage ----------------------------------------------------------------------------------------------------------


def told(open_it: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as error:
        open_it()
    return str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\x80\x04",
        b"\x80\x04\x8c\x02\xff\xfe.",  # not UTF-8
        b"\x80\x04\x8e" + (1 << 62).to_bytes(8, "little") + b".",  # more bytes than there is memory
        b"\x80\x04K\x05.",
        b"\x82\x07.",  # a code of copyreg's registry
        b"(" * 100_000 + b".",
        METADATA_CLASS + b")R.",
        METADATA_CLASS + b".",
    ],
)
def test_metadata_of_any_other_kind_is_named(text: bytes, saved: Path) -> None:
    (saved / METADATA).write_bytes(text)
    assert told(lambda: open_dcp(saved, NAMES)).startswith(
        f"{saved / METADATA}: expected the metadata of a distributed"
    )


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(saved: Path, tmp_path: Path) -> None:
    (saved / METADATA).unlink()
    os.mkfifo(saved / METADATA)
    assert "no regular file" in told(lambda: open_dcp(saved, NAMES))
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    os.mkfifo(folder / "index.json")
    assert "no regular file" in told(lambda: Checkpoint.open(folder))
    deepspeed = tmp_path / "deepspeed"
    shutil.copytree(MADE / "stage2", deepspeed)
    file = deepspeed / "global_step3" / "mp_rank_00_model_states.pt"
    file.unlink()
    os.mkfifo(file)
    assert "no regular file" in told(lambda: open_deepspeed(deepspeed))


def test_a_deep_index_is_no_index(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    (folder / "index.json").write_bytes(b"[" * 10_000_000)
    assert "expected an index in JSON" in told(lambda: Checkpoint.open(folder))


def test_a_flipped_bit_in_a_tensor_is_found(saved: Path, tmp_path: Path) -> None:
    data = bytearray((saved / DATA).read_bytes())
    data[data.index(SAVED["model.weight"].numpy().tobytes()) + 5] ^= 1
    (saved / DATA).write_bytes(data)
    assert "Bad CRC-32" in told(lambda: read_all(open_dcp(saved, NAMES)))
    file = tmp_path / "one.pt"
    shutil.copy(next((MADE / "stage2" / "global_step3").glob("*optim_states.pt")), file)
    check_archive(file)
    with zipfile.ZipFile(file) as archive:
        largest = max(archive.infolist(), key=lambda record: record.file_size)
        values = archive.read(largest)
    whole = bytearray(file.read_bytes())
    whole[whole.index(values) + 1] ^= 4
    file.write_bytes(whole)
    with pytest.raises(zipfile.BadZipFile, match="Bad CRC-32"):
        check_archive(file)


def test_a_file_that_was_saved_without_checksums_is_taken(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(9.0), "b": torch.ones(3)}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    check_archive(tmp_path / "a.pt")


def changed(data: bytes, rng: random.Random) -> bytes:
    """Bytes set, a part cut out, put in twice or exchanged, or an end lost."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        start = rng.randrange(max(len(found), 1))
        stop = min(len(found), start + rng.choice((1, 1, 2, 8, 64)))
        part = bytes(found[start:stop])
        what = rng.randrange(6)
        if what == 0:
            found = found[:start]
        elif what == 1:
            del found[start:stop]
        elif what == 2:
            found[start:start] = part * rng.choice((1, 3))
        else:
            found[start:stop] = rng.choice((rng.randbytes(len(part)), b"\xff" * len(part), b"(" * len(part)))
    return bytes(found)


def inputs(short: int, long: int) -> list[object]:
    return [pytest.param(range(short), id="short"), pytest.param(range(short, long), marks=pytest.mark.full, id="long")]


def taken(open_it: Callable[[], ForeignCheckpoint]) -> Iterator[dict[str, torch.Tensor]]:
    """What is read, if it is; any other exception than CheckpointError ends the test."""
    with contextlib.suppress(CheckpointError):
        yield read_all(open_it())


@pytest.mark.parametrize("seeds", inputs(300, 5000))
@pytest.mark.parametrize("name", [METADATA, DATA])
def test_a_changed_distributed_checkpoint_is_read_or_refused_by_name(name: str, seeds: range, saved: Path) -> None:
    whole = (saved / name).read_bytes()
    for seed in seeds:
        (saved / name).write_bytes(changed(whole, random.Random(seed)))
        for found in taken(lambda: open_dcp(saved, NAMES)):
            if name == DATA:  # its checksums leave nothing else
                assert torch.equal(found["master/weight"], torch.arange(12.0)), seed


@pytest.mark.parametrize("seeds", inputs(60, 1200))
def test_a_changed_deepspeed_checkpoint_is_read_or_refused_by_name(seeds: range, tmp_path: Path) -> None:
    for stage in (2, 3):
        folder = tmp_path / f"stage{stage}"
        shutil.copytree(MADE / f"stage{stage}", folder)
        files = sorted(folder.rglob("*.pt"))
        for seed in seeds:
            file = files[seed % len(files)]
            whole = file.read_bytes()
            file.write_bytes(changed(whole, random.Random(seed)))
            for _ in taken(partial(open_deepspeed, folder)):
                pass
            file.write_bytes(whole)
