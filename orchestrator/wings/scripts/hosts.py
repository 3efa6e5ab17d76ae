"""Runs a user's own script on ranks of several machines: one ssh to each, which runs the launcher's part there.

[Note: a connection that ends]
The input of ssh stays open while the ranks run, and bytes go through it all the time. The part on the other machine
ends its ranks once its input has ended or was silent for SILENCE_S: the launcher was killed, or the network is down.
When one ssh ends, the launcher ends the others, and with them their ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from orchestrator.config.strict import Refusal
from orchestrator.launch.verdict import Sight
from orchestrator.machine import children
from orchestrator.machine.processes import PATIENCE_S, end_session, how_it_ended, signals_ignored
from orchestrator.records.run_state import RunState
from orchestrator.text.streams import complain
from orchestrator.wings.scripts.launch_words import PORT
from orchestrator.wings.scripts.script_ranks import REPORT, RankChild, ScriptEnd, end_of, follow, started

SILENCE_S = 60.0
_PART = "orchestrator.wings.scripts.launch_script"
# Nobody could answer a question for a password. Without the other options a machine that is gone would hold ssh.
_OPTIONS = ("-oBatchMode=yes", "-oConnectTimeout=30", "-oServerAliveInterval=10")
# The variables that DeepSpeed's launcher exports, by the beginnings of their names.
_EXPORTED = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")


class _Host(NamedTuple):
    """A machine, its ranks, the ssh to it and the input of that ssh."""

    name: str
    ranks: range
    child: RankChild
    line: BinaryIO


def run_on_hosts(slots: Mapping[str, Sequence[int]], asked: argparse.Namespace) -> ScriptEnd:
    """Run the script on the slots of each machine. No rank is left on a machine that answers when it returns or raises.

    Call it from the main thread.
    """
    hosts: list[_Host] = []
    try:
        for name, job in list(_jobs(slots, asked)):
            hosts.append(_connected(name, job, asked))
        follow([host.child for host in hosts], lambda _: _send(hosts))
    finally:
        with signals_ignored():
            _end(hosts)
    end = end_of([sight for host in hosts for sight in _sights(host)])
    where = next(host for host in hosts if end.rank in host.ranks)
    place = f"on {where.name} (its ranks: {', '.join(map(str, where.ranks))})"
    return end._replace(message=end.message and f"{end.message}, {place}")


def _jobs(slots: Mapping[str, Sequence[int]], asked: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """The job of each machine, with the machine's name."""
    names, sizes = list(slots), [len(own) for own in slots.values()]
    environment = {name: value for name, value in os.environ.items() if name.startswith(_EXPORTED)} | own_variables()
    address = asked.master_addr or names[0]
    for host, (name, own) in enumerate(slots.items()):
        place = {"world": sum(sizes), "first": sum(sizes[:host]), "host": host, "address": address}
        place |= {"port": asked.master_port or PORT, "peer": address if host else names[-1]}
        yield name, {"asked": vars(asked), "slots": own, "place": place, "environment": environment}


def _connected(name: str, job: Mapping[str, Any], asked: argparse.Namespace) -> _Host:
    port = [] if asked.ssh_port is None else ["-p", str(asked.ssh_port)]
    part = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(children.words(_PART))}"
    command = ["ssh", "-T", *shlex.split(asked.launcher_args), *port, *_OPTIONS, "--", name, part]
    read, write = os.pipe()
    ssh = started(command, os.environ, read)
    os.close(read)
    first = job["place"]["first"]
    ranks = range(first, first + len(job["slots"]))
    host = _Host(name, ranks, RankChild(ssh, first, {}), os.fdopen(write, "wb", 0))
    _send([host], json.dumps(job).encode())
    os.set_blocking(write, False)  # an ssh that is connecting, or whose machine is gone, takes nothing
    return host


def _send(hosts: Sequence[_Host], sent: bytes = b"") -> None:
    for host in hosts:
        with suppress(BrokenPipeError):  # its ssh has ended, which is seen elsewhere
            host.line.write(sent + b"\n")


def _end(hosts: Sequence[_Host]) -> None:
    """End the ranks of all machines, and wait until each has said that they are gone."""
    for host in hosts:
        host.line.close()
    for host in hosts:
        process = host.child.process
        try:
            process.communicate(timeout=2 * PATIENCE_S)
        except subprocess.TimeoutExpired:
            complain(f"warning: {host.name} did not say that its ranks have ended; they do within {SILENCE_S:g} s")
        end_session(process.pid)
        process.wait()


def _sights(host: _Host) -> Iterator[Sight]:
    child = host.child
    said = f": {child.words[-1]}" if child.words and child.code and child.code > 0 else ""
    error = "" if child.code is None else f"the connection {how_it_ended(child.code)}{said}"
    unseen = RunState.error if error else None
    for rank in host.ranks:
        yield (child.reported or {}).get(rank, Sight(rank, unseen, child.ended_at, error))


def own_variables() -> dict[str, str]:
    """The variables of .deepspeed_env, or the file that DS_ENV_FILE names, in the home and in the current folder."""
    places = [folder / os.environ.get("DS_ENV_FILE", ".deepspeed_env") for folder in (Path.home(), Path())]
    lines = [
        (file, line.strip())
        for file in places
        if file.is_file()
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    told = [(file, line) for file, line in lines if line and not line.startswith("#")]
    if wrong := [f"{file}: expected lines `NAME=VALUE`, found {line!r}" for file, line in told if "=" not in line]:
        raise Refusal(wrong)
    return {name.strip(): value.strip() for _, line in told for name, _, value in [line.partition("=")]}


class ParentLine:
    """The connection of the launcher's part on another machine, over which it reports the ends of its ranks."""

    def __init__(self) -> None:
        self.job: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
        self._heard = time.monotonic()
        self._reported: set[int] = set()
        os.set_blocking(sys.stdin.fileno(), False)

    def look(self, ranks: Sequence[RankChild]) -> None:
        """Report ranks that have ended. ConnectionError if the launcher is gone."""
        for rank in ranks:
            if rank.code is not None and rank.number not in self._reported:
                self._reported.add(rank.number)
                os.write(sys.stderr.fileno(), REPORT % (rank.number, rank.code))
        with suppress(BlockingIOError):
            if not os.read(sys.stdin.fileno(), 1 << 16):
                raise ConnectionError("the connection to the launcher ended")
            self._heard = time.monotonic()
        if time.monotonic() - self._heard > SILENCE_S:
            raise ConnectionError(f"nothing came from the launcher for {SILENCE_S:g} s")
