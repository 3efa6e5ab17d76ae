"""A rank inside a SLURM job: how it finds the other ranks, shows that it is alive, and requeues the job."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, MutableMapping, Sequence

from orchestrator.config.cluster import ClusterError
from orchestrator.launch.rank import RankRecord, Stopped, begin_rank, place, run_as_rank
from orchestrator.machine.interfaces import interface_to, set_interface
from orchestrator.machine.loopback import loopback
from orchestrator.records.record_file import read_or_warn, write_json_atomic
from orchestrator.records.run_record import AttemptPaths
from orchestrator.records.run_state import RunState
from orchestrator.wings.slurm.tools import ask, environ_job, read_scontrol_job

FIRST_PORT, PORTS = 15000, 15000  # below the range of ports that kernels assign automatically
SPECIAL_STEPS = 0xFFFFFFF0
BEAT_S = 10.0
OTHERS_S = 20.0


# ---- rendezvous -----------------------------------------------------------------------------------------------------


def say_place(environ: MutableMapping[str, str], hosts: Sequence[str]) -> None:
    """Sets the variables of torch and related libraries from SLURM's: the rank, rank 0's address, the interface to use.

    The ranks rendezvous over TCP and not through a file, because file locks often do not work on shared file systems.
    CUDA_VISIBLE_DEVICES stays as SLURM set it: a rank takes the device whose index is its local rank.
    """
    rank, world, local_rank = (int(environ[f"SLURM_{key}"]) for key in ("PROCID", "NTASKS", "LOCALID"))
    environ.update(place(rank, world, local_rank, local_world=world // max(len(hosts), 1)))
    environ["MASTER_PORT"] = str(port_of(environ["SLURM_JOB_ID"]))
    if len(hosts) <= 1:
        environ["MASTER_ADDR"] = loopback()
        return
    environ["MASTER_ADDR"] = address_of(hosts[0])
    on_first = environ.get("SLURM_NODEID", "0") == "0"
    set_interface(environ, interface_to(address_of(hosts[1] if on_first else hosts[0])))


def say_place_in_step(environ: MutableMapping[str, str], tell: Callable[[Sequence[str]], str] = ask) -> None:
    """`say_place` for a task of the user's own `srun`, which sets no variable of torch's.

    Changes nothing outside of such a step, in a step of one task, and where another launcher has set the rank. An
    interactive allocation, a batch script and a node's own step have numbers too, from SPECIAL_STEPS.
    """
    step = environ.get("SLURM_STEP_ID", "")
    if "RANK" in environ or not step.isdigit() or int(step) >= SPECIAL_STEPS or "SLURM_PROCID" not in environ:
        return
    if environ.get("SLURM_NTASKS", "1") == "1":
        return
    nodes = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]
    say_place(environ, tell(["scontrol", "show", "hostnames", nodes]).split())


def port_of(job: str) -> int:
    """A port that all ranks compute without communication, and that differs between jobs that may share a node."""
    return FIRST_PORT + int(job) % PORTS


def _addresses(name: str) -> object:
    return socket.getaddrinfo(name, None)  # covers IPv6 too: gethostbyname knows only IPv4


def address_of(
    node: str,
    resolve: Callable[[str], object] = _addresses,
    tell: Callable[[Sequence[str]], str] = ask,
) -> str:
    """The address of a node: its name if it resolves, else the address that SLURM itself uses."""
    try:
        resolve(node)
        return node
    except OSError:
        pass
    match = re.search(r"\bNodeAddr=(\S+)", tell(["scontrol", "-o", "show", "node", node]))
    if match is None:
        raise ClusterError(
            f"{node}: expected a name that resolves, or its NodeAddr from scontrol, found neither; name the node in "
            "/etc/hosts or set NodeAddr in slurm.conf"
        )
    return match[1]


# ---- the rank -------------------------------------------------------------------------------------------------------


def run_in_job(attempt: AttemptPaths, entry: str) -> None:
    """Main function of a rank, in an environment that `say_place` has prepared."""
    os.umask(0o077)
    node, job = os.environ.get("SLURMD_NODENAME", socket.gethostname()), environ_job()
    rank = begin_rank(attempt, "env://", where=f"job {job} on {node}, ")
    if rank.rank == 0:
        Heartbeat(attempt, node).start()
    stopped = run_as_rank(attempt, rank, entry)
    if stopped is not None and rank.rank == 0:
        _wait_for_others(attempt, rank.world)
        outcome = requeue(job, lambda asked: _tell_requeue(attempt, stopped, asked))
        os.write(1, f"{outcome}\n".encode())


class Heartbeat(threading.Thread):
    """Shows watchers on other machines, which cannot see the process, that rank 0 of the job is alive."""

    def __init__(self, attempt: AttemptPaths, node: str) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._attempt, self._node = attempt, node

    def run(self) -> None:
        while True:
            with contextlib.suppress(OSError):  # a full or missing disk must not stop training
                write_json_atomic(self._attempt.heartbeat, {"time": time.time(), "node": self._node})
            time.sleep(BEAT_S)


# ---- requeueing -----------------------------------------------------------------------------------------------------


def requeue(job: str, record: Callable[[str], None], tell: Callable[[Sequence[str]], str] = ask) -> str:
    """Requeues the job unless it is being ended for good. Returns one sentence about the outcome.

    `record` is called before the request, because SLURM ends this process right after it, and again if the request
    failed.
    """
    try:
        sight = read_scontrol_job(tell(["scontrol", "-o", "show", "job", job]))
        if sight.slurm_state != "RUNNING":
            # Requeueing now would bring back a job that was cancelled.
            outcome = f"not requeued: job {job} is {sight.slurm_state or 'not known'}"
            record(outcome)
            return outcome
        record(f"job {job} was requeued")
        tell(["scontrol", "requeue", job])
    except ClusterError as error:
        outcome = f"could not be requeued: {error}"
        record(outcome)
        return outcome
    return f"job {job} was requeued"


def _tell_requeue(attempt: AttemptPaths, stopped: Stopped, requeued: str) -> None:
    record = RankRecord(attempt, 0)
    record.write(RunState.preempted, message=f"{stopped}; {requeued}", step=stopped.step, saved=stopped.saved)


def _wait_for_others(attempt: AttemptPaths, world: int) -> None:
    """Waits until the other ranks have recorded how they ended: SLURM ends all ranks once the job is requeued."""
    deadline = time.monotonic() + OTHERS_S
    waiting = set(range(1, world))
    while waiting and time.monotonic() < deadline:
        records = {rank: read_or_warn(attempt.rank_record(rank)) or {} for rank in waiting}
        waiting = {rank for rank, record in records.items() if record.get("state") != RunState.preempted.value}
        time.sleep(0.05)
