"""The words of DeepSpeed's launcher beside the number of ranks: those that work here, and those refused by name."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from orchestrator.commands.verb_parser import RefusedFlag
from orchestrator.config.strict import Refusal

LOCAL, PORT = "localhost", 29500
_EACH = "type torchrun on each machine, or name them in a --hostfile, and their ranks start over ssh"
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
    "--no_ssh": (0, _EACH),
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
    add("--master_port", type=int, metavar="PORT", help=f"default: one that is free; of several machines {PORT}")
    add("--master_addr", metavar="ADDRESS", help="of the first machine; default: its name, or the loopback")
    add("-H", "--hostfile", metavar="FILE", help="machines that ssh reaches: lines `NAME slots=N`")
    add("--num_nodes", "--nnodes", type=int, metavar="N", help="the first N machines of the hostfile; default: all")
    add("--node_rank", type=int, default=0, metavar="N", help="0: the launcher starts the ranks of all machines")
    add("--ssh_port", type=int, metavar="PORT", help="default: that of the configuration of ssh")
    add("--launcher_args", default="", metavar="WORDS", help="for ssh, such as '-F FILE'")
    add("--force_multi", action="store_true", help="start the ranks of a single machine over ssh, too")
    add("--no_ssh_check", action="store_true", help="the default: nothing is tried before the ranks start")
    add("--launcher", default="", metavar="NAME", help="no other than ssh: without effect")
    slots = parser.add_mutually_exclusive_group()
    slots.add_argument("-i", "--include", default="", metavar="SLOTS", help="such as localhost:0,2")
    slots.add_argument("-e", "--exclude", default="", metavar="SLOTS")
    for name, (values, instead) in _REFUSED.items():
        names = [name, *(["-q"] if name == "--quiet" else [])]
        add(*names, action=RefusedFlag, nargs=values, const=f"it is not here: {instead}", help=argparse.SUPPRESS)


def chosen_hosts(asked: argparse.Namespace, gpus: int) -> dict[str, list[int]] | None:
    """The slots that the words choose, by machine; None if they leave the choice on this one to --ranks.

    gpus: slots of this machine without a hostfile.
    """
    names_slots = asked.include or asked.exclude
    if names_slots and (asked.ranks or asked.num_nodes):
        raise Refusal(["--include, --exclude: expected no --num_gpus and --num_nodes beside them; leave these out"])
    hosts = _hostfile(asked.hostfile) if asked.hostfile else {LOCAL: list(range(gpus))}
    wanted = asked.num_nodes or len(hosts)
    if not 1 <= wanted <= len(hosts):
        expected = f"expected 1 to {len(hosts)}, as --hostfile has" if asked.hostfile else f"expected 1; {_EACH}"
        raise Refusal([f"--num_nodes {wanted}: {expected}, found {wanted}"])
    if asked.node_rank:
        raise Refusal([f"--node_rank {asked.node_rank}: expected 0; {_EACH}"])
    hosts = {host: slots[: asked.ranks] for host, slots in _filtered(dict(list(hosts.items())[:wanted]), asked).items()}
    return hosts if asked.hostfile or names_slots else None


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
    return {host: slots for host, slots in hosts.items() if slots}


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
