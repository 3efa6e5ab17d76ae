"""The environment variables that the ranks of a job start with."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from orchestrator.config.schema import Device, RunConfig
from orchestrator.machine import children

TUNABLES = "GLIBC_TUNABLES"
GLIBC = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=8589934592"


def job_environment(config: RunConfig, base: Mapping[str, str], gpus: Sequence[str] | None = None) -> dict[str, str]:
    """The full environment of the ranks. Values that the user set are kept, except thread counts, PYTHONPATH and
    CUDA_VISIBLE_DEVICES.

    `gpus`: the subset of the user's GPUs assigned to this job, as entries of CUDA_VISIBLE_DEVICES.
    """
    given = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    return {**base, **job_settings(config, base), **given}


def job_settings(config: RunConfig, base: Mapping[str, str]) -> dict[str, str]:
    """The variables that zero-lab sets, without those of `base` that it keeps."""
    on_cuda = config.resources.device is Device.cuda
    threads = str(config.resources.threads)
    wanted = {
        "TOKENIZERS_PARALLELISM": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONFAULTHANDLER": "1",
        # The allocator reads this at process start: freed blocks are kept, so the next gather takes no page faults.
        TUNABLES: GLIBC,
    }
    if config.resources.nodes == 1:
        # All ranks are on one machine. Without this, gloo resolves the host name, which may fail.
        wanted["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    if on_cuda and "PYTORCH_CUDA_ALLOC_CONF" not in base:
        wanted["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    fixed = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, children.PYTHONPATH: children.named(base)}
    if not on_cuda:
        fixed["CUDA_VISIBLE_DEVICES"] = ""
    return {key: value for key, value in wanted.items() if key not in base} | fixed
