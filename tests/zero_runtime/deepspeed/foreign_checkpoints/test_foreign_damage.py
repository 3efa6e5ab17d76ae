"""Damaged and malicious checkpoints of other libraries are refused by name and change nothing in the process."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
from foreign.small_dcp import DATA, NAMES, SAVED, read_all, write_dcp
from torch.distributed.checkpoint import metadata as dcp

from zero_runtime.checkpoint.load import CheckpointReader
from zero_runtime.deepspeed.foreign_checkpoints.archive import check_archive
from zero_runtime.deepspeed.foreign_checkpoints.dcp import METADATA, open_dcp
from zero_runtime.deepspeed.foreign_checkpoints.deepspeed import open_deepspeed
from zero_runtime.deepspeed.foreign_checkpoints.pickled import StandIn, read_pickle
from zero_runtime.errors import CheckpointError

MADE = Path(__file__).resolve().parents[3] / "foreign" / "deepspeed"  # by tests/foreign/make_deepspeed.py


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return write_dcp(tmp_path / "dcp")


def test_stand_ins_for_classes_of_torch_hold_the_saved_values(saved: Path) -> None:
    found = open_dcp(saved, NAMES)
    assert found.updates == 3
    assert {name: entry.shape for name, entry in found.parameters.items()} == {"weight": (4, 3), "bias": (4,)}
    assert torch.equal(found.source("master").read("weight", 1, 12), torch.arange(1.0, 12.0))
    assert torch.equal(found.source("exp_avg").read("weight", 0, 12), torch.ones(12))


# ---- attacks on the process -----------------------------------------------------------------------------------------

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
    """The types of `found` and of everything that it contains."""
    inner: list[Any] = []
    if isinstance(found, StandIn):
        inner = [*found.arguments, found.state]
    elif isinstance(found, dict):
        inner = [*found, *found.values()]
    elif isinstance(found, (list, tuple)):
        inner = list(found)
    return {type(found)}.union(*map(kinds_in, inner))


def test_reading_a_pickle_creates_only_stand_ins_and_builtin_types(saved: Path) -> None:
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
def test_invalid_metadata_is_refused_with_its_path(text: bytes, saved: Path) -> None:
    (saved / METADATA).write_bytes(text)
    assert told(lambda: open_dcp(saved, NAMES)).startswith(
        f"{saved / METADATA}: expected the metadata of a distributed"
    )


def test_a_pipe_instead_of_a_file_is_refused_without_waiting(saved: Path, tmp_path: Path) -> None:
    (saved / METADATA).unlink()
    os.mkfifo(saved / METADATA)
    assert "no regular file" in told(lambda: open_dcp(saved, NAMES))
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    os.mkfifo(folder / "index.json")
    assert "no regular file" in told(lambda: CheckpointReader.open(folder))
    deepspeed = tmp_path / "deepspeed"
    shutil.copytree(MADE / "stage2", deepspeed)
    file = deepspeed / "global_step3" / "mp_rank_00_model_states.pt"
    file.unlink()
    os.mkfifo(file)
    assert "no regular file" in told(lambda: open_deepspeed(deepspeed))


def test_a_deeply_nested_index_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    (folder / "index.json").write_bytes(b"[" * 10_000_000)
    assert "expected an index in JSON" in told(lambda: CheckpointReader.open(folder))


def test_a_flipped_bit_in_a_tensor_is_detected(saved: Path, tmp_path: Path) -> None:
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


def test_a_file_that_was_saved_without_checksums_is_accepted(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(9.0), "b": torch.ones(3)}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    check_archive(tmp_path / "a.pt")


def test_a_latest_file_with_an_impossible_folder_name_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "deepspeed"
    shutil.copytree(MADE / "stage2", folder)
    for tag in ("9" * 400, "x" * 100_000, "a\0b"):
        (folder / "latest").write_text(tag)
        text = told(lambda: open_deepspeed(folder))
        assert "that latest names, found none" in text
        assert len(text) < 600
