"""`zlab io-bench FOLDER`: measures the speed of scratch files in a folder and prints the settings to use."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from orchestrator.commands.verb_parser import VerbParser, add_json, verb_parser
from orchestrator.config.strict import Refusal
from orchestrator.exit_codes import FAILED
from orchestrator.text.paths import program
from orchestrator.text.streams import complain
from orchestrator.text.units import digits
from zero_runtime.errors import missing_folder


def main(words: Sequence[str]) -> int:
    """0: measured. 1: the folder cannot be used. Refusal: the arguments were wrong."""
    arguments = parser().parse_args(words)
    folder = Path(arguments.folder).expanduser().absolute()
    if not os.path.isdir(folder):
        raise Refusal([f"{folder}: expected a folder on the drive to measure, found {missing_folder(folder)}"])
    print(f"measuring {folder}: files of 256 MiB, 20 settings, some seconds", flush=True)
    from zero_runtime.errors import OffloadError
    from zero_runtime.offload.drive_speed import DriveSpeed, measure_drive

    speeds: list[DriveSpeed] = []
    try:
        print("block MiB  requests  read GiB/s  write GiB/s  both together, each way GiB/s")
        for speed in measure_drive(folder):
            speeds.append(speed)
            numbers = (digits(value / 2**30) for value in (speed.read, speed.write, speed.both))
            print("{:>9}  {:>8}  {:>10}  {:>11}  {:>12}".format(speed.block_mib, speed.requests, *numbers), flush=True)
    except OffloadError as error:
        complain(f"error: {error}")
        return FAILED
    best = max(speeds, key=lambda speed: speed.both)
    # The smallest setting that is nearly as fast: it needs fewer threads and less memory for requests in flight.
    near = [speed for speed in speeds if speed.both >= 0.95 * best.both]
    pick = min(near, key=lambda speed: (speed.requests * speed.block_mib, speed.requests))
    if not pick.direct:
        print("this file system has no direct I/O: the page cache is in these numbers, and takes memory in a run")
    fastest = f"{digits(best.both / 2**30)} GiB/s each way"
    print(f"pick     {pick.block_mib} MiB x {pick.requests} requests: within 5 % of the fastest, {fastest}")
    options = f"offload.folder={arguments.folder} offload.block_mib={pick.block_mib} offload.requests={pick.requests}"
    print(f"next     {program()} zero=stage3 offload=optimizer_param_nvme {options}")
    return 0


def parser() -> VerbParser:
    parser = verb_parser("io-bench", "How fast scratch files are on a drive, and the settings to use.")
    parser.add_argument("folder", metavar="FOLDER", help="a folder on the drive to measure")
    add_json(parser, "io-bench prints a table, and the line to type")
    return parser
