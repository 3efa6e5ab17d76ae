"""Damaged and malicious checkpoints of other libraries are refused by name and change nothing in the process."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from zero_runtime.checkpoint.load import CheckpointReader
from zero_runtime.deepspeed.foreign_checkpoints.deepspeed import open_deepspeed
from zero_runtime.deepspeed.foreign_checkpoints.source import check_archive
from zero_runtime.errors import CheckpointError

MADE = Path(__file__).resolve().parents[3] / "foreign" / "deepspeed"  # by tests/foreign/make_deepspeed.py


def told(open_it: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as error:
        open_it()
    return str(error.value)


def test_a_pipe_instead_of_a_file_is_refused_without_waiting(tmp_path: Path) -> None:
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


def test_a_flipped_bit_in_a_tensor_is_detected(tmp_path: Path) -> None:
    file = tmp_path / "one.pt"
    shutil.copy(next((MADE / "stage2" / "global_step3").glob("*optim_states.pt")), file)
    check_archive(file)
    with zipfile.ZipFile(file) as archive:
        largest = max(archive.infolist(), key=lambda record: record.file_size)
        values = archive.read(largest)
    whole = bytearray(file.read_bytes())
    whole[whole.index(values) + 1] ^= 4
    file.write_bytes(whole)
    assert "Bad CRC-32" in told(lambda: check_archive(file))


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
