"""`zlab launch SCRIPT ARGUMENTS`: runs a script of the user's own on ranks of this machine."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import time
from collections.abc import Sequence
from functools import partial

from orchestrator.commands.verb_parser import VerbParser, add_json, verb_parser
from orchestrator.config.schema import Device
from orchestrator.config.strict import Refusal
from orchestrator.exit_codes import FAILED, OK
from orchestrator.machine import children, hardware
from orchestrator.machine.processes import signals_interrupt
from orchestrator.text.paths import program
from orchestrator.text.streams import complain
from orchestrator.wings.scripts.launch_words import add_words, own_slots
from orchestrator.wings.scripts.script_ranks import Placement, run_script

MOST_RANKS = 1024


def main(words: Sequence[str]) -> int:
    """0: every rank ended with exit code 0. 1: one did not, and all were ended. Refusal: the arguments were wrong."""
    asked = parser().parse_args(words)
    found = hardware.detect()
    placement = _placement(asked, found)
    script: list[str] = asked.script
    _check_script(script[0], asked)
    if asked.launcher:
        complain(f"note: --launcher {asked.launcher} has no effect on one machine")
    began = time.monotonic()
    with signals_interrupt():
        end = run_script(partial(_command, asked), placement)
    seconds = time.monotonic() - began
    if not end.message:
        complain(f"note: {_many(placement.ranks)} of {script[0]} ended with exit code 0 after {seconds:.0f} s")
        complain(f"next: {program()} fit --help      which settings fit onto which GPUs")
        return OK
    others = "the other ranks were ended" if placement.ranks > 1 else "nothing else ran"
    complain(f"error: {end.message}, after {seconds:.0f} s; {others}")
    for line in end.last_words:
        complain(f"error: rank {end.rank}: {line}")
    flags = [f"--{name}" for name in ("module", "no_python", "local_rank") if getattr(asked, name)]
    again = shlex.join([*(["--ranks", "1"] if placement.ranks > 1 else []), *flags, *script])
    complain(f"next: {program()} launch {again}      whether it fails alone, too")
    return FAILED


def parser() -> VerbParser:
    parser = verb_parser("launch", "Runs a script on ranks of this machine, with the environment that torchrun gives.")
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


def _check_script(script: str, asked: argparse.Namespace) -> None:
    """Refuse a script, a module or a program that is not there, before anything starts."""
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
        usage = f"{program()} launch --ranks 2 train.py ARGUMENTS"
        raise Refusal([f"{script}: expected a Python script, found {kind}; options come before it: {usage}"])


def _command(asked: argparse.Namespace, rank: int) -> list[str]:
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


def _placement(asked: argparse.Namespace, found: hardware.Hardware) -> Placement:
    asked.script = asked.script[asked.script[:1] == ["--"] :]
    device = Device(asked.device) if asked.device else Device.cuda if found.gpus else Device.cpu
    slots = own_slots(asked, found.gpus)
    ranks = (asked.ranks if slots is None else len(slots)) or (found.gpus if device is Device.cuda else 1)
    problems = []
    if slots is not None and os.environ.get("CUDA_VISIBLE_DEVICES") and device is Device.cuda:
        problems.append("CUDA_VISIBLE_DEVICES: expected none beside --hostfile, --include and --exclude; unset it")
    if not asked.script:
        problems.append(f"expected a script, found none: {program()} launch --ranks 2 train.py ARGUMENTS")
    if device is Device.cuda and ranks > found.gpus:
        problems.append(
            f"--ranks {ranks}: expected at most one rank for each of the {found.gpus} GPUs; use fewer, or --device cpu"
        )
    if problems:
        raise Refusal(problems)
    threads = asked.threads or max(1, found.cores // ranks)
    return Placement(ranks, device, threads, slots, asked.master_addr, asked.master_port or 0)


def _many(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"
