"""Checks files that torch.save has written against the checksums that they hold of themselves.

torch reads them without comparing, so that a flipped bit in a tensor would be trained on.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import BinaryIO

_BLOCK_BYTES = 1 << 20


def check_archive(file: Path | BinaryIO) -> None:
    """Read it once and compare. BadZipFile, or what a damaged archive raises otherwise, where a record differs.

    Nothing where it keeps no checksums: files of before 2020 are no archives, and
    torch.serialization.set_crc32_options(False) writes zeros in their place.
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
