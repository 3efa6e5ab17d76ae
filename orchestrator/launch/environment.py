"""The environment variables of a rank, the same from every way of starting it.

Our own launcher and SLURM's get them before the process starts (`job_settings`). A rank of torchrun or srun sets them
itself before it imports torch (wings/torchrun/join.py: `joined_settings`). What only the node knows, the rank sets
there (`set_kernel_cache`).
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from orchestrator.config.schema import Device, RunConfig
from orchestrator.machine import children
from orchestrator.machine.interfaces import GLOO, LOOPBACK

TUNABLES = "GLIBC_TUNABLES"
GLIBC = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=8589934592:glibc.malloc.hugetlb=1"
KERNEL_CACHE = "TRITON_CACHE_DIR"
# torch reads one of these; the others are older names. Which of two that are set decides, depends on the version.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


def job_environment(config: RunConfig, base: Mapping[str, str], gpus: Sequence[str] | None = None) -> dict[str, str]:
    """The full environment of the ranks. Values that the user set are kept, except thread counts, PYTHONPATH and
    CUDA_VISIBLE_DEVICES.

    `gpus`: the subset of the user's GPUs assigned to this job, as entries of CUDA_VISIBLE_DEVICES.
    """
    given = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    return {**base, **job_settings(config, base), **given}


def job_settings(config: RunConfig, base: Mapping[str, str]) -> dict[str, str]:
    """The variables that zero-lab sets, without those of `base` that it keeps."""
    resources = config.resources
    return rank_settings(resources.device, resources.threads, base, on_one_machine=resources.nodes == 1)


def rank_settings(device: Device, threads: int, base: Mapping[str, str], *, on_one_machine: bool) -> dict[str, str]:
    """The variables that zero-lab sets for a rank, without those of `base` that it keeps."""
    on_cuda = device is Device.cuda
    wanted = {
        "TOKENIZERS_PARALLELISM": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONFAULTHANDLER": "1",
        # The allocator reads this at process start: freed blocks are kept, so the next gather takes no page faults. In
        # huge pages a block's place in a core's caches depends less on the physical memory that a process was given.
        TUNABLES: GLIBC,
    }
    if on_one_machine:
        # All ranks are on one machine. Without this, gloo resolves the host name, which may fail.
        wanted[GLOO] = LOOPBACK
    if on_cuda:
        wanted |= _cuda_settings(base)
    else:
        # Threads that wait for each other sleep. By default GNU's OpenMP lets them spin at each barrier: where another
        # process has one of the cores, a barrier lasts until the scheduler takes the core from it.
        wanted["OMP_WAIT_POLICY"] = "PASSIVE"
    fixed = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    fixed[children.PYTHONPATH] = children.named(base)
    if not on_cuda:
        fixed["CUDA_VISIBLE_DEVICES"] = ""
    return {key: value for key, value in wanted.items() if key not in base} | fixed


def _cuda_settings(base: Mapping[str, str]) -> dict[str, str]:
    wanted = {
        # The order of nvidia-smi, by which GPUs are named and locked. CUDA's own order is by speed.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    if not any(name in base for name in ALLOCATOR):
        wanted["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return wanted


def set_kernel_cache(environ: MutableMapping[str, str]) -> None:
    """Makes Triton keep its compiled kernels on this node's own disk, except where the user has named a folder.

    Its default is below the home, which on a cluster is one network file system for all ranks of all nodes.
    """
    folder = Path(tempfile.gettempdir()) / f"zlab-triton-{os.getuid()}"
    if KERNEL_CACHE not in environ and _is_private(folder):
        environ[KERNEL_CACHE] = str(folder)


def _is_private(folder: Path) -> bool:
    """Whether only this user can write to the folder, created if it is missing: what it contains is executed."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return False
    shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not shared


def caution(environ: Mapping[str, str], device: Device) -> str | None:
    """The warning about a variable of the user that is kept but slows the ranks; None without such a variable."""
    if device is not Device.cuda or environ.get(QUEUES) != "1":
        return None
    return (
        f"{QUEUES}=1 gives a GPU one queue for all streams, so that gathers, reductions and computation wait for each "
        "other; unset it (the default is 8), or set 16 with offload or zero.shard_ranks"
    )
