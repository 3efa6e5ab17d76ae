"""The words of DeepSpeed's launcher beside the number of ranks: those that work here, and those refused by name."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from orchestrator.commands.verb_parser import RefusedFlag
from orchestrator.config.strict import Refusal

LOCAL, PORT = "localhost", 29500
_ONE_MACHINE = "no other machine is started from here; leave it out, and type torchrun on each of several machines"
_ELASTIC = "checkpoints load at any number of ranks; start again with the ranks that are there"
_CORES = "--threads sets the cores of a rank; pin the launcher by `taskset` or `numactl`"
_QUIET = "the launcher prints one line at the end, to stderr"
# By flag: how many values follow it, and what to do instead.
_REFUSED: dict[str, tuple[int, str]] = {
    "--profile": (0, "DeepSpeed's launcher has none either; use torch.profiler in the script"),
    "--autotuning": (1, "`zlab choose` finds the fastest settings"),
    "--elastic_training": (0, _ELASTIC),
    "--min_elastic_nodes": (1, _ELASTIC),
    "--max_elastic_nodes": (1, _ELASTIC),
    "--force_multi": (0, _ONE_MACHINE),
    "--no_ssh": (0, _ONE_MACHINE),
    "--no_ssh_check": (0, _ONE_MACHINE),
    "--ssh_port": (1, _ONE_MACHINE),
    "--launcher_args": (1, _ONE_MACHINE),
    "--venv_script": (1, "activate the environment, and start the launcher in it"),
    "--save_pid": (0, "the shell has the launcher's process id in $!"),
    "--enable_each_rank_log": (1, "redirect the output; lines of rank 1 and above begin with their rank"),
    "--bind_cores_to_rank": (0, _CORES),
    "--bind_core_list": (1, _CORES),
    "--log_level": (1, _QUIET),
    "--quiet": (0, _QUIET),
}


def add_words(parser: argparse.ArgumentParser) -> None:
    """Add the words; each may be written with hyphens, as torchrun has them."""

    def add(*names: str, **settings: Any) -> None:
        parser.add_argument(*names, *(f"--{name[2:].replace('_', '-')}" for name in names if "_" in name), **settings)

    add("--module", action="store_true", help="SCRIPT is a module, as for python -m")
    add("--no_python", action="store_true", help="SCRIPT is a program of another kind")
    add("--local_rank", action="store_true", help="give the script --local_rank=N, as DeepSpeed's launcher does")
    add("--no_local_rank", dest="local_rank", action="store_false", help="the default: LOCAL_RANK alone says it")
    add("--master_port", type=int, default=None, metavar="PORT", help="default: one that is free")
    add("--master_addr", default=None, metavar="ADDRESS", help="of this machine; default: its loopback")
    add("-H", "--hostfile", default=None, metavar="FILE", help="lines `NAME slots=N`")
    add("--num_nodes", "--nnodes", type=int, default=None, metavar="N", help="machines; above 1: prints what to type")
    add("--node_rank", type=int, default=0, metavar="N", help="0 on one machine")
    add("--launcher", default="", metavar="NAME", help="for several machines: slurm, else one line for each")
    slots = parser.add_mutually_exclusive_group()
    slots.add_argument("-i", "--include", default="", metavar="SLOTS", help="such as localhost:0,2")
    slots.add_argument("-e", "--exclude", default="", metavar="SLOTS")
    for name, (values, instead) in _REFUSED.items():
        names = [name, *(["-q"] if name == "--quiet" else [])]
        add(*names, action=RefusedFlag, nargs=values, const=f"it is not here: {instead}", help=argparse.SUPPRESS)


def own_slots(asked: argparse.Namespace, gpus: int) -> list[int] | None:
    """The slots that the words choose on this machine; None if they leave the choice to --ranks.

    gpus: slots of this machine without a hostfile. Refusal with what to type, if they name several machines.
    """
    names_slots = asked.include or asked.exclude
    if names_slots and (asked.ranks or asked.num_nodes):
        raise Refusal(["--include, --exclude: expected no --num_gpus and --num_nodes beside them; leave these out"])
    hosts = _hostfile(asked.hostfile) if asked.hostfile else {LOCAL: list(range(gpus))}
    wanted = asked.num_nodes or len(hosts)
    if asked.hostfile and not 1 <= wanted <= len(hosts):
        raise Refusal([f"--num_nodes {wanted}: expected 1 to {len(hosts)}, as --hostfile has, found {wanted}"])
    if not asked.hostfile and wanted > 1:
        hosts = {f"HOST_{number}": list(range(asked.ranks or 0)) for number in range(wanted)}
    hosts = _filtered(dict(list(hosts.items())[:wanted]), asked)
    if len(hosts) > 1:
        found = f"expected one machine, found {len(hosts)}: {_ONE_MACHINE.partition(';')[0]}; type"
        raise Refusal([found, *_lines(hosts, asked)])
    if asked.node_rank:
        raise Refusal([f"--node_rank {asked.node_rank}: expected 0 on one machine; say --num_nodes, or leave it out"])
    (slots,) = hosts.values()
    return slots[: asked.ranks] if asked.hostfile or names_slots else None


def _hostfile(path: str) -> dict[str, list[int]]:
    if not Path(path).is_file():  # DeepSpeed goes on with this machine alone
        raise Refusal([f"--hostfile {path}: expected a file, found none; leave it out for this machine alone"])
    hosts: dict[str, list[int]] = {}
    for line in map(str.strip, Path(path).read_text(encoding="utf-8").splitlines()):
        if line and not line.startswith("#"):
            found = re.match(r"(\S+)\s+slots=(\d+)", line)
            if not found or found[1] in hosts:
                raise Refusal([f"--hostfile {path}: expected lines `NAME slots=N`, one for a name, found {line!r}"])
            hosts[found[1]] = list(range(int(found[2])))
    if not any(hosts.values()):
        raise Refusal([f"--hostfile {path}: expected lines `NAME slots=N`, found none"])
    return hosts


def _filtered(hosts: dict[str, list[int]], asked: argparse.Namespace) -> dict[str, list[int]]:
    """The hosts with the slots that --include names, or without those that --exclude names: NAME[:SLOT,...][@...]."""
    words, flag = asked.include or asked.exclude, "--include" if asked.include else "--exclude"
    named: dict[str, list[int]] = {}
    for word in words.split("@") if words else ():
        found = re.fullmatch(r"([^:]+)(?::(\d+(?:,\d+)*))?", word)
        known = hosts.get(found[1], []) if found else []
        slots = list(map(int, found[2].split(","))) if found and found[2] else known
        if not found or not slots or not set(slots) <= set(known):
            every = " ".join(f"{name}:{','.join(map(str, all_slots))}" for name, all_slots in hosts.items())
            raise Refusal([f"{flag} {words}: expected slots of {every}, found {word}"])
        named[found[1]] = slots
    if not words:
        return hosts
    kept = {host: [one for one in slots if (one in named.get(host, ())) == bool(asked.include)]
            for host, slots in hosts.items()}  # fmt: skip
    if not any(kept.values()):
        raise Refusal([f"{flag} {words}: expected slots that are left, found none"])
    return {host: slots for host, slots in kept.items() if slots}


def _lines(hosts: Mapping[str, list[int]], asked: argparse.Namespace) -> Iterator[str]:
    """What to type on each of several machines, or once under SLURM."""
    leader, on_slurm = asked.master_addr or next(iter(hosts)), asked.launcher.lower() == "slurm"
    flags = [flag for flag, given in (("--module", asked.module), ("--no-python", asked.no_python)) if given]
    for rank, (host, slots) in enumerate(hosts.items()):
        count = min(len(slots), asked.ranks or len(slots)) or "gpu"
        own = ["--node-rank", "$SLURM_NODEID" if on_slurm else rank, "--nproc-per-node", count]
        place = ["--nnodes", len(hosts), *own, "--master-addr", leader, "--master-port", asked.master_port or PORT]
        line = f"torchrun {' '.join(map(str, place))} {shlex.join([*flags, *asked.script])}"
        if slots != list(range(len(slots))):
            line = f"CUDA_VISIBLE_DEVICES={','.join(map(str, slots))} {line}"
        if on_slurm:
            yield f"srun --nodes {len(hosts)} --ntasks-per-node 1 bash -c {shlex.quote(line)}"
            return
        yield f"on {host}: {line}"
