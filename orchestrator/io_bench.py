"""`zlab io-bench FOLDER`: how fast scratch files are there, and the settings to use."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from orchestrator.paths import program
from orchestrator.units import digits
from zero_runtime.errors import missing_folder

USAGE = "zlab io-bench FOLDER"
BAD_USAGE, FAILED = 2, 1


def main(words: Sequence[str]) -> int:
    """0: measured. 1: the folder cannot be used. 2: the words were wrong, or there is no such folder."""
    if len(words) != 1 or words[0].startswith("-"):
        told = f"expected a folder on the drive to measure, found {len(words)} words"
        print(f"error: {told}\nusage: {USAGE}", file=sys.stderr)
        return BAD_USAGE
    folder = Path(words[0]).expanduser().absolute()
    if not os.path.isdir(folder):
        print(
            f"error: {folder}: expected a folder on the drive to measure, found {missing_folder(folder)}",
            file=sys.stderr,
        )
        return BAD_USAGE
    print(f"measuring {folder}: files of 256 MiB, 20 settings, some seconds", flush=True)
    from zero_runtime.errors import OffloadError
    from zero_runtime.tiers.drive import DriveSpeed, measure_drive

    found: list[DriveSpeed] = []
    try:
        print("block MiB  requests  read GiB/s  write GiB/s  both at once, each way GiB/s")
        for speed in measure_drive(folder):
            found.append(speed)
            numbers = (digits(value / 2**30) for value in (speed.read, speed.write, speed.both))
            print("{:>9}  {:>8}  {:>10}  {:>11}  {:>12}".format(speed.block_mib, speed.requests, *numbers), flush=True)
    except OffloadError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    best = max(found, key=lambda speed: speed.both)
    # The smallest setting that is nearly as fast: fewer threads, and less memory for what is in flight.
    near = [speed for speed in found if speed.both >= 0.95 * best.both]
    pick = min(near, key=lambda speed: (speed.requests * speed.block_mib, speed.requests))
    if not pick.direct:
        print("this file system has no direct I/O: the page cache is in these numbers, and takes memory in a run")
    fastest = f"{digits(best.both / 2**30)} GiB/s each way"
    print(f"pick     {pick.block_mib} MiB x {pick.requests} requests: within 5 % of the fastest, {fastest}")
    options = f"offload.folder={words[0]} offload.block_mib={pick.block_mib} offload.requests={pick.requests}"
    print(f"next     {program()} zero=stage3 offload=optimizer_param_nvme {options}")
    return 0
