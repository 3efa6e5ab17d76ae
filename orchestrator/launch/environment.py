"""The environment that the ranks of a job start in."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from orchestrator.config.schema import Device, RunConfig
from orchestrator.machine import children

TUNABLES = "GLIBC_TUNABLES"
GLIBC = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=8589934592"


def job_environment(config: RunConfig, base: Mapping[str, str], gpus: Sequence[str] | None = None) -> dict[str, str]:
    """What a careful person sets by hand for such a job. What the user set stays, but for the thread counts.

    `gpus`: those of the user's that this job has, as entries of CUDA_VISIBLE_DEVICES.
    """
    given = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    return {**base, **job_settings(config, base), **given}


def job_settings(config: RunConfig, base: Mapping[str, str]) -> dict[str, str]:
    """The part of the job's environment that we decide."""
    on_cuda = config.resources.device is Device.cuda
    threads = str(config.resources.threads)
    wanted = {
        "TOKENIZERS_PARALLELISM": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONFAULTHANDLER": "1",
        # The allocator reads it when the process starts: freed blocks stay, and the next gather takes no page faults.
        TUNABLES: GLIBC,
    }
    if config.resources.nodes == 1:
        # All ranks are on one machine; without it gloo resolves the host name, which may lead nowhere.
        wanted["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    if on_cuda and "PYTORCH_CUDA_ALLOC_CONF" not in base:
        wanted["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    fixed = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, children.PYTHONPATH: children.named(base)}
    if not on_cuda:
        fixed["CUDA_VISIBLE_DEVICES"] = ""
    return {key: value for key, value in wanted.items() if key not in base} | fixed
