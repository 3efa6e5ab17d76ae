"""The variables and the device index that a rank ends with are the same from every way of starting it.

The ways are our own launcher, torchrun, one srun task per GPU, SLURM over two nodes, and a MIG device.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from points import make_config

from orchestrator.config.schema import Device, RunConfig
from orchestrator.launch import environment
from orchestrator.launch.rank import rank_in_world
from orchestrator.machine import hardware
from orchestrator.planning.rules.scene import scene_of
from orchestrator.planning.rules.table import check_parts
from orchestrator.wings.slurm import rank as slurm_rank
from orchestrator.wings.torchrun import join
from orchestrator.wings.torchrun.join import AT_START, joined_settings
from zero_runtime.own_device import device_index

EIGHT = ["H100"] * 8
ON_CUDA = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "OMP_NUM_THREADS": "3",
    "MKL_NUM_THREADS": "3",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
TORCHRUN = {"RANK": "11", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "a"}
TORCHRUN |= {"MASTER_ADDR": "gpu1", "MASTER_PORT": "29500"}
ONE_MACHINE = {**TORCHRUN, "RANK": "3", "WORLD_SIZE": "8"}
TASK = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "3"}
SRUN = {**TASK, "RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "localhost", "CUDA_VISIBLE_DEVICES": "0"}
JOB = {**TASK, "SLURM_JOB_ID": "7", "SLURM_PROCID": "11", "SLURM_NTASKS": "16", "SLURM_NODEID": "1"}


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    plain = make_config(tmp_path)
    return replace(plain, resources=replace(plain.resources, device=Device.cuda, threads=3))


@pytest.fixture(autouse=True)
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"gpu1": "ib0", "gpu2": "ib0", "named-after-loopback": environment.LOOPBACK}
    monkeypatch.setattr(join, "interface_to", ways.get)
    monkeypatch.setattr(slurm_rank, "interface_to", ways.get)
    monkeypatch.setattr(slurm_rank, "address_of", str)


def joined(config: RunConfig, base: Mapping[str, str]) -> dict[str, str]:
    return {**base, **joined_settings(config, base)}


def submitted(config: RunConfig, job: Mapping[str, str], hosts: list[str]) -> dict[str, str]:
    """What a rank of a SLURM job has: the settings on its command line, then what it finds out on its node."""
    over = replace(config, resources=replace(config.resources, nodes=len(hosts)))
    found = {**job, **environment.job_settings(over, {})}
    slurm_rank.say_place(found, hosts)
    return found


def index_of(environ: Mapping[str, str], count: int) -> int:
    rank = rank_in_world(environ, "env://")
    assert rank is not None
    return device_index(rank.local_rank, count)


def test_every_way_of_starting_gives_the_same_variables_on_cuda(config: RunConfig) -> None:
    starts = {
        "own launcher": environment.job_environment(config, {}, ["GPU-1", "GPU-2"]),
        "torchrun": joined(config, ONE_MACHINE),
        "torchrun on two machines": joined(config, TORCHRUN),
        "srun": joined(config, SRUN),
        "SLURM on two nodes": submitted(config, JOB, ["gpu1", "gpu2"]),
    }
    for start, environ in starts.items():
        assert {name: environ[name] for name in ON_CUDA} == ON_CUDA, start
    assert starts["own launcher"]["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"
    assert starts["srun"]["CUDA_VISIBLE_DEVICES"] == "0"
    indices = [index_of(starts["torchrun"], 8), index_of(starts["srun"], 1), index_of(starts["SLURM on two nodes"], 8)]
    assert indices == [3, 0, 3]


def test_on_several_machines_nccl_takes_the_interface_of_gloo(config: RunConfig) -> None:
    over_two = (joined(config, TORCHRUN), submitted(config, JOB, ["gpu1", "gpu2"]))
    for environ in over_two:
        assert (environ["GLOO_SOCKET_IFNAME"], environ["NCCL_SOCKET_IFNAME"]) == ("ib0", "=ib0")
    mine = joined(config, {**TORCHRUN, "GLOO_SOCKET_IFNAME": "bond0"})
    assert (mine["GLOO_SOCKET_IFNAME"], mine["NCCL_SOCKET_IFNAME"]) == ("bond0", "=bond0")
    both = {"GLOO_SOCKET_IFNAME": "bond0", "NCCL_SOCKET_IFNAME": "ib"}
    assert both.items() <= joined(config, {**TORCHRUN, **both}).items()
    assert both.items() <= submitted(config, {**JOB, **both}, ["gpu1", "gpu2"]).items()
    # Debian's /etc/hosts gives a machine's own name an address of the loopback, which other machines cannot reach.
    assert "GLOO_SOCKET_IFNAME" not in joined(config, {**TORCHRUN, "MASTER_ADDR": "named-after-loopback"})


def test_on_one_machine_gloo_takes_the_loopback_and_nccl_decides_itself(config: RunConfig) -> None:
    for environ in (joined(config, ONE_MACHINE), joined(config, SRUN), environment.job_environment(config, {})):
        assert environ["GLOO_SOCKET_IFNAME"] == environment.LOOPBACK
        assert "NCCL_SOCKET_IFNAME" not in environ
    unknown = {name: value for name, value in TORCHRUN.items() if name != "LOCAL_WORLD_SIZE"}
    assert joined(config, unknown)["GLOO_SOCKET_IFNAME"] == "ib0"


@pytest.mark.parametrize("name", environment.ALLOCATOR)
def test_an_allocator_that_the_user_configured_is_kept_under_each_of_its_names(config: RunConfig, name: str) -> None:
    mine = {**ONE_MACHINE, name: "max_split_size_mb:64", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    for environ in (joined(config, mine), environment.job_environment(config, mine)):
        assert [environ.get(other) for other in environment.ALLOCATOR if other != name] == [None, None]
        assert (environ[name], environ["CUDA_DEVICE_ORDER"]) == (mine[name], "FASTEST_FIRST")


def test_a_joined_rank_does_not_claim_what_only_the_start_of_a_process_can_set(config: RunConfig) -> None:
    settings = joined_settings(config, ONE_MACHINE)
    assert settings.keys().isdisjoint(AT_START)


def test_ranks_on_cpus_get_no_variable_of_cuda_and_see_no_gpu(config: RunConfig) -> None:
    on_cpu = replace(config, resources=replace(config.resources, device=Device.cpu))
    for environ in (joined(on_cpu, ONE_MACHINE), environment.job_environment(on_cpu, {})):
        assert environ["CUDA_VISIBLE_DEVICES"] == ""
        assert environ.keys().isdisjoint({"CUDA_DEVICE_ORDER", "PYTORCH_ALLOC_CONF"})
        assert environ["OMP_WAIT_POLICY"] == "PASSIVE"
    mine = {"OMP_WAIT_POLICY": "ACTIVE"}
    assert environment.job_environment(on_cpu, mine).items() >= mine.items()


def test_compiled_kernels_are_kept_on_the_node_where_only_the_user_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    first: dict[str, str] = {}
    environment.set_kernel_cache(first)
    folder = Path(first["TRITON_CACHE_DIR"])
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700
    mine = {"TRITON_CACHE_DIR": "/mine"}
    environment.set_kernel_cache(mine)
    assert mine == {"TRITON_CACHE_DIR": "/mine"}
    folder.chmod(0o777)
    shared: dict[str, str] = {}
    environment.set_kernel_cache(shared)
    assert shared == {}
    folder.rmdir()
    folder.symlink_to(tmp_path)  # as another user might, to a folder of this user
    environment.set_kernel_cache(shared)
    assert shared == {}


def test_one_queue_for_all_streams_is_warned_about_on_cuda_alone() -> None:
    one = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert "=1 gives a GPU one queue" in (environment.caution(one, Device.cuda) or "")
    assert environment.caution(one, Device.cpu) is None
    assert environment.caution({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, Device.cuda) is None
    assert environment.caution({}, Device.cuda) is None


def refusals(environ: Mapping[str, str], config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(hardware, "gpu_models", lambda: list(EIGHT))
    monkeypatch.setattr(hardware, "torch_has_cuda", lambda: True)
    ranks = {} if "RANK" in environ else {"ranks": 2}
    resources = replace(config.resources, **{"ranks": None, **ranks})
    parts = {"resources": resources, "cluster": config.cluster, "hardware": config.hardware}
    broken = check_parts(parts, scene_of(environ))
    return [f"{one}" for one in broken]


def test_ranks_without_a_gpu_of_their_own_are_refused_before_the_start(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusals(ONE_MACHINE, config, monkeypatch) == []
    assert refusals(SRUN, config, monkeypatch) == []  # one GPU is visible to each of eight tasks
    (few,) = refusals({**ONE_MACHINE, "CUDA_VISIBLE_DEVICES": "0"}, config, monkeypatch)
    assert "at most the GPUs here, 1" in few
    (part,) = refusals({"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"}, config, monkeypatch)
    assert "must be 1 on a MIG device" in part


def test_the_environment_of_this_process_is_left_as_it_is(config: RunConfig) -> None:
    before = dict(os.environ)
    joined(config, TORCHRUN)
    submitted(config, JOB, ["gpu1", "gpu2"])
    assert dict(os.environ) == before
