"""Checks files written by torch.save against the checksums that they contain.

torch.load does not compare them, so a flipped bit in a tensor would go unnoticed into training.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import BinaryIO

_BLOCK_BYTES = 1 << 20


def check_archive(file: Path | BinaryIO) -> None:
    """Read a file once and compare its checksums.

    Raises BadZipFile, or another error that reading a damaged archive may raise, if a record differs. Files without
    checksums pass: files from before 2020 are not archives, and torch.serialization.set_crc32_options(False) writes
    zeros instead of checksums.
    """
    if not zipfile.is_zipfile(file):
        return
    with zipfile.ZipFile(file) as archive:
        for record in archive.infolist():
            if record.CRC:
                _read(archive, record)


def _read(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> None:
    with archive.open(record) as data:
        while data.read(_BLOCK_BYTES):
            pass
