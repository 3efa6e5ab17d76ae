"""A rank inside a SLURM job finds the other ranks, and requeues its job only while that job is running."""

from __future__ import annotations

import os
from collections.abc import Sequence

import psutil
import pytest

from orchestrator.config.cluster import ClusterError
from orchestrator.launch.rank import rank_in_world
from orchestrator.wings.slurm import rank as slurm_rank
from orchestrator.wings.slurm.rank import address_of, interface_to, port_of, requeue, say_place, say_place_in_step
from orchestrator.wings.slurm.tools import environ_job

JOB = {"SLURM_JOB_ID": "4411208", "SLURM_ARRAY_JOB_ID": "4411207", "SLURM_ARRAY_TASK_ID": "2", "SLURM_PROCID": "5"}
JOB |= {"SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_RESTART_COUNT": "2"}


def nowhere(name: str) -> str:
    raise OSError(name)


def test_slurms_variables_become_those_that_torch_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_rank, "address_of", {"gpu1": "gpu1", "gpu2": "10.0.0.2"}.get)
    ways = {"gpu1": "eth0", "10.0.0.2": "ib0"}
    monkeypatch.setattr(slurm_rank, "interface_to", ways.get)
    environ = {**JOB, "CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    say_place(environ, ["gpu1", "gpu2"])
    assert {key: environ[key] for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")} == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
    }
    assert (environ["MASTER_ADDR"], environ["GLOO_SOCKET_IFNAME"]) == ("gpu1", "eth0")
    assert environ["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    found = rank_in_world(environ, "env://")
    assert found is not None
    assert (found.rank, found.world, found.local_rank, found.restarts) == (5, 8, 1, 2)
    # The first node takes its interface to the second node, because the one to itself is the loopback.
    first = {**JOB, "SLURM_NODEID": "0"}
    say_place(first, ["gpu1", "gpu2"])
    assert first["GLOO_SOCKET_IFNAME"] == "ib0"
    mine = {**JOB, "GLOO_SOCKET_IFNAME": "bond0"}
    say_place(mine, ["gpu1", "gpu2"])
    assert mine["GLOO_SOCKET_IFNAME"] == "bond0"


def test_ranks_on_one_node_connect_over_the_loopback() -> None:
    environ = dict(JOB)
    say_place(environ, ["gpu1"])
    assert environ["MASTER_ADDR"] == "127.0.0.1"
    assert "GLOO_SOCKET_IFNAME" not in environ


STEP = JOB | {"SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": "gpu[1-2]"}


def told(words: Sequence[str]) -> str:
    assert words == ["scontrol", "show", "hostnames", "gpu[1-2]"]
    return "gpu1\ngpu2\n"


def test_a_task_of_the_users_own_srun_is_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_rank, "address_of", str)
    monkeypatch.setattr(slurm_rank, "interface_to", {"gpu1": "ib0"}.get)
    environ = dict(STEP)
    say_place_in_step(environ, told)
    place = [environ[key] for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")]
    assert place == ["5", "8", "1", "4", "gpu1"]
    assert environ["GLOO_SOCKET_IFNAME"] == "ib0"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        JOB,
        STEP | {"RANK": "0"},
        STEP | {"SLURM_NTASKS": "1"},
        STEP | {"SLURM_STEP_ID": "4294967290"},
        STEP | {"SLURM_STEP_ID": "batch"},
    ],
    ids=["no job", "a batch script", "torchrun in a step", "one task", "an interactive allocation", "no number"],
)
def test_what_is_no_task_among_several_is_left_as_it_is(environ: dict[str, str]) -> None:
    after = dict(environ)
    say_place_in_step(after, nowhere_to_ask)
    assert after == environ


def test_jobs_on_one_node_use_different_ports() -> None:
    ports = [port_of(str(job)) for job in range(4411207, 4411207 + 1000)]
    assert len(set(ports)) == 1000
    assert all(1024 < port < 32768 for port in ports)


def test_a_nodes_name_is_used_if_it_resolves_and_otherwise_its_address_in_slurm() -> None:
    assert address_of("gpu1", resolve=lambda name: "10.0.0.1", tell=nowhere_to_ask) == "gpu1"
    told = "NodeName=gpu1 Arch=x86_64 NodeAddr=10.0.0.7 NodeHostName=gpu1 Port=6818\n"
    assert address_of("gpu1", resolve=nowhere, tell=lambda words: told) == "10.0.0.7"
    with pytest.raises(ClusterError, match="name the node in /etc/hosts"):
        address_of("gpu1", resolve=nowhere, tell=lambda words: "Node gpu1 not found")


def nowhere_to_ask(words: Sequence[str]) -> str:
    raise AssertionError(words)


def test_the_interface_is_the_one_that_reaches_the_address() -> None:
    loopback = next(name for name, ways in psutil.net_if_addrs().items() if any(w.address == "127.0.0.1" for w in ways))
    assert interface_to("127.0.0.1") == loopback
    assert interface_to("no.such.host.invalid") is None


def test_a_task_of_an_array_is_named_after_the_array() -> None:
    assert environ_job(JOB) == "4411207_2"
    assert environ_job({"SLURM_JOB_ID": "7"}) == "7"
    assert "SLURM_JOB_ID" not in os.environ


class Scontrol:
    def __init__(self, state: str, *, requeues: bool = True) -> None:
        self.state, self.requeues = state, requeues
        self.asked: list[str] = []

    def __call__(self, words: Sequence[str]) -> str:
        self.asked.append(words[-2])
        if words[-2] == "requeue" and not self.requeues:
            raise ClusterError("scontrol requeue: Requested operation is presently disabled")
        return f"JobId=7 JobState={self.state} Reason=None Restarts=0 ExitCode=0:0 NodeList=n StartTime=N/A\n"


def test_a_running_job_is_requeued_and_says_so_before_it_is_ended() -> None:
    said: list[str] = []
    scontrol = Scontrol("RUNNING")
    assert requeue("7", said.append, scontrol) == said[0] == "job 7 was requeued"
    assert scontrol.asked == ["job", "requeue"]


@pytest.mark.parametrize("state", ["CANCELLED", "COMPLETING", "TIMEOUT", ""])
def test_a_job_that_is_no_longer_running_is_not_requeued(state: str) -> None:
    said: list[str] = []
    scontrol = Scontrol(state)
    assert "not requeued" in requeue("7", said.append, scontrol)
    assert scontrol.asked == ["job"]


def test_a_site_that_forbids_requeueing_is_noted_in_the_record() -> None:
    said: list[str] = []
    requeue("7", said.append, Scontrol("RUNNING", requeues=False))
    assert "could not be requeued: scontrol requeue: Requested operation" in said[-1]
