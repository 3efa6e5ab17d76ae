"""Settings of the scratch file of a rank. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zero_runtime.limits import Limits
from zero_runtime.offload.memory import ALIGN_BYTES, aligned


@dataclass(frozen=True)
class ScratchSettings:
    """Settings of the scratch file.

    folder: an existing folder on the disk to use. block_bytes: size of one request, a multiple of ALIGN_BYTES.
    requests: number of reads, and of writes, in flight together. ahead: number of units that are read ahead of the one
    being updated, and that are written behind it. verify: compare what is read back with the checksum of what was
    written; see [Note: checksums] in scratch_file.py.
    """

    folder: Path
    block_bytes: int = 4 << 20
    requests: int = 4
    ahead: int = 1
    verify: bool = True

    def __post_init__(self) -> None:
        limits = Limits(vars(self), "offload", optional=())
        rule = f"a multiple of {ALIGN_BYTES:,} and above 0, which direct I/O needs"
        above = max(aligned(self.block_bytes), ALIGN_BYTES)
        limits.must("block_bytes", lambda size: size > 0 and size % ALIGN_BYTES == 0, rule, above)
        limits.at_least(1, requests=4)
        limits.at_least(0, ahead=1)
        limits.conclude()
