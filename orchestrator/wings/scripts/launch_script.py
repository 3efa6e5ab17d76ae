"""`zlab launch SCRIPT ARGUMENTS`: runs a script of the user's own on ranks of this machine, or of several."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from orchestrator.commands.verb_parser import VerbParser, add_json, verb_parser
from orchestrator.config.schema import Device
from orchestrator.config.strict import Refusal
from orchestrator.exit_codes import FAILED, OK
from orchestrator.machine import children, hardware
from orchestrator.machine.processes import StoppedBySignal, signals_interrupt
from orchestrator.text.paths import program
from orchestrator.text.streams import complain
from orchestrator.wings.scripts.hosts import ParentLine, run_on_hosts
from orchestrator.wings.scripts.launch_words import add_words, chosen_hosts
from orchestrator.wings.scripts.script_ranks import Placement, run_script

MOST_RANKS = 1024


def main(words: Sequence[str]) -> int:
    """0: every rank ended with exit code 0. 1: one did not, and all were ended. Refusal: the arguments were wrong."""
    asked = parser().parse_args(words)
    asked.script = asked.script[asked.script[:1] == ["--"] :]
    found = hardware.detect()
    hosts = chosen_hosts(asked, found.gpus)
    over_ssh = hosts is not None and (len(hosts) > 1 or asked.force_multi)
    if asked.launcher:
        complain(f"note: --launcher {asked.launcher} has no effect: ranks of other machines start over ssh")
    began = time.monotonic()
    with signals_interrupt():
        if hosts is not None and over_ssh:
            _check_script(asked)
            end, ranks = run_on_hosts(hosts, asked), sum(map(len, hosts.values()))
        else:
            placement = placement_of(asked, found, None if hosts is None else next(iter(hosts.values())), {})
            end, ranks = run_script(partial(command_of, asked), placement), placement.ranks
    seconds = time.monotonic() - began
    if not end.message:
        complain(f"note: {_many(ranks)} of {asked.script[0]} ended with exit code 0 after {seconds:.0f} s")
        return OK
    others = "the other ranks were ended" if ranks > 1 else "nothing else ran"
    complain(f"error: {end.message}, after {seconds:.0f} s; {others}")
    for line in end.last_words:
        complain(f"error: rank {end.rank}: {line}")
    flags = [f"--{name}" for name in ("module", "no_python", "local_rank") if getattr(asked, name)]
    again = shlex.join([*(["--ranks", "1"] if ranks > 1 else []), *flags, *asked.script])
    complain(f"next: {program()} launch {again}      whether it fails alone, too")
    return FAILED


def parser() -> VerbParser:
    parser = verb_parser(
        "launch", "Runs a script on ranks of this machine, or of a hostfile's, with the environment of torchrun."
    )
    # The launchers of DeepSpeed and torch call it so.
    names = ("--ranks", "--num_gpus", "--num-gpus", "--num_accelerators", "--nproc_per_node", "--nproc-per-node")
    parser.add_argument(*names, type=_count, default=None, metavar="RANKS", help="default: one for each GPU, else 1")
    parser.add_argument("--threads", type=_count, default=None, help="of each rank; default: its share of the cores")
    parser.add_argument("--device", choices=[device.value for device in (Device.cpu, Device.cuda)], default=None,
                        help="default: cuda if there are GPUs")  # fmt: skip
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT ARGUMENTS", help="the script and its words")
    add_words(parser)
    add_json(parser, "launch shows what the script prints")
    return parser


def _check_script(asked: argparse.Namespace) -> None:
    """Refuse a script, a module or a program that is not there, before anything starts."""
    usage = f"{program()} launch --ranks 2 train.py ARGUMENTS"
    script = (asked.script or [""])[0]
    if not script:
        raise Refusal([f"expected a script, found none: {usage}"])
    if asked.module:
        if script.endswith(".py"):
            name = script.removesuffix(".py").replace(os.sep, ".")
            raise Refusal(
                [f"--module {script}: expected a module's name, found a file; leave --module out, or: {name}"]
            )
    elif asked.no_python:
        if shutil.which(script) is None:
            raise Refusal([f"--no_python {script}: expected a program, found none of this name"])
    elif not os.path.isfile(script):
        kind = "a folder" if os.path.isdir(script) else "no file"
        raise Refusal([f"{script}: expected a Python script, found {kind}; options come before it: {usage}"])


def command_of(asked: argparse.Namespace, rank: int) -> list[str]:
    """What a rank runs."""
    script, *words = asked.script
    words = [script, *([f"--local_rank={rank}"] if asked.local_rank else []), *words]
    return words if asked.no_python else children.script_words(["-m", *words] if asked.module else words)


def _count(text: str) -> int:
    """argparse turns the ValueError into its own message."""
    number = int(text)
    if not 1 <= number <= MOST_RANKS:
        raise ValueError(text)
    return number


_count.__name__ = f"whole number from 1 to {MOST_RANKS}"  # argparse shows it: "invalid ... value: '0'"


def placement_of(
    asked: argparse.Namespace, found: hardware.Hardware, slots: Sequence[int] | None, place: Mapping[str, Any]
) -> Placement:
    """The ranks of this machine. slots: those that were chosen. place: this machine's among several; see Placement."""
    _check_script(asked)
    device = Device(asked.device) if asked.device else Device.cuda if found.gpus else Device.cpu
    ranks = (asked.ranks if slots is None else len(slots)) or (found.gpus if device is Device.cuda else 1)
    problems = []
    if slots is not None and os.environ.get("CUDA_VISIBLE_DEVICES") and device is Device.cuda:
        problems.append("CUDA_VISIBLE_DEVICES: expected none beside --hostfile, --include and --exclude; unset it")
    if device is Device.cuda and ranks > found.gpus:
        problems.append(
            f"--ranks {ranks}: expected at most one rank for each of the {found.gpus} GPUs; use fewer, or --device cpu"
        )
    if problems:
        raise Refusal(problems)
    threads = asked.threads or max(1, found.cores // ranks)
    own = {"address": asked.master_addr, "port": asked.master_port or 0, "world": ranks}
    return Placement(ranks, device, threads, slots, **{**own, **place})


def _many(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def part() -> int:
    """Run the ranks of this machine, one of several, for a launcher on another; see `ParentLine`."""
    line = ParentLine()
    os.environ.update(line.job["environment"])
    asked = argparse.Namespace(**line.job["asked"])
    try:
        with signals_interrupt():
            placement = placement_of(asked, hardware.detect(), line.job["slots"], line.job["place"])
            end = run_script(partial(command_of, asked), placement, line.look)
    except (OSError, Refusal, StoppedBySignal) as error:
        complain(f"error: {error}")
        return FAILED
    return FAILED if end.message else OK


if __name__ == "__main__":
    sys.exit(part())
